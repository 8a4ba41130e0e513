"""What a pass did to a graph, as data."""

from dataclasses import asdict, dataclass
from typing import Any

ORDERS = ("rank", "ring", "tree")  # in which order a reduction adds the ranks' values


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a pass returns about its own work.

    Attributes:
        matched: How many places it looked for and found.
        changed: How many of them it changed.
        refused: Why it left the others alone, a line each.
        detail: What it made, a line each.
        keeps_bits: Reduction orders under which every result keeps its bits; None where
            the pass makes no claim.
    """

    matched: int
    changed: int
    refused: tuple[str, ...] = ()
    detail: tuple[str, ...] = ()
    keeps_bits: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class GraphSize:
    """How large a graph is: nodes, collectives, and the bytes that these take in."""

    nodes: int
    collectives: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class PassReport:
    """One application of a pass.

    Attributes:
        name: The pass.
        outcome: What the pass says of itself.
        before: The graph before.
        after: The graph after.
        proof: What the legality check showed, in a few words.
        seconds: Time of the pass and its check.
    """

    name: str
    outcome: Outcome
    before: GraphSize
    after: GraphSize
    proof: str
    seconds: float

    def __str__(self) -> str:
        """A line for people, and a line for each refusal.

        >>> size = GraphSize(10, 2, 64)
        >>> smaller = GraphSize(9, 1, 64)
        >>> print(PassReport("fuse", Outcome(2, 2), size, smaller, "proved", 0.01))
        fuse: changed 2 of 2, 10 -> 9 nodes, 2 -> 1 collectives, proved
        """
        outcome = self.outcome
        head = (
            f"{self.name}: changed {outcome.changed} of {outcome.matched}, "
            f"{self.before.nodes} -> {self.after.nodes} nodes, "
            f"{self.before.collectives} -> {self.after.collectives} collectives, "
            f"{self.proof}"
        )
        lines = [f"  {line}" for line in outcome.detail]
        lines += [f"  left alone: {line}" for line in outcome.refused]
        return "\n".join([head, *lines])

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)
