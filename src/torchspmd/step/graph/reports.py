"""What a pass did to a graph, as data."""

import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from torchspmd.errors import UsageError
from torchspmd.step.graph.argument_checks import is_whole

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
        gain: How many times as fast the step is simulated to be with the pass as without
            it; None where the pass does not simulate.
    """

    matched: int
    changed: int
    refused: tuple[str, ...] = ()
    detail: tuple[str, ...] = ()
    keeps_bits: tuple[str, ...] | None = None
    gain: float | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value!r}: give a whole number, 0 or more"
            for name, value in (("matched", self.matched), ("changed", self.changed))
            if not is_whole(value) or value < 0
        ]
        problems += [
            f"{name}={value!r}: give a tuple of str, a line each"
            for name, value in (("refused", self.refused), ("detail", self.detail))
            if not _are_texts(value)
        ]
        claim = self.keeps_bits
        if claim is not None and not (_are_texts(claim) and set(claim) <= set(ORDERS)):
            orders = ", ".join(map(repr, ORDERS))
            problems.append(
                f"keeps_bits={claim!r}: give a tuple of reduction orders out of {orders}, "
                "such as ('rank',), () where bits may change, or None for no claim"
            )
        if problems:
            raise UsageError("Outcome: " + "; ".join(problems) + ".")


def _are_texts(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(each, str) for each in value)


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
        unproved: How many outputs were not proved equal.
        unproved_names: What these are called.
    """

    name: str
    outcome: Outcome
    before: GraphSize
    after: GraphSize
    proof: str
    seconds: float
    unproved: int = 0
    unproved_names: tuple[str, ...] = ()

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


def wrap_text(text: str, indent: int) -> list[str]:
    """The lines of a report's sentence, the first indented by so many blanks.

    >>> wrap_text("word " * 20, 2)[1]
    '    word word word word word'
    """
    first, others = " " * indent, " " * (indent + 2)
    return textwrap.wrap(text, 80, initial_indent=first, subsequent_indent=others)
