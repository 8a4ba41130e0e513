"""The runs of a graph and of the one before it, compared."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from torchspmd.step.graph.reports import PassReport
from torchspmd.step.graph.roles import output_values, written_state
from torchspmd.step.legality.interfaces import output_name as name_in_proof
from torchspmd.step.virtual.bisection import output_name
from torchspmd.step.virtual.certificate import EQUAL, Check
from torchspmd.step.virtual.differences import gap_between

_Results = list[list[Any]]  # of a step, by rank and output


@dataclass(frozen=True, slots=True)
class Trace:
    """The digests of a run's outputs by step, rank and output; which show nothing."""

    digests: list[list[list[str]]]
    vacuous: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """The runs of a graph and of the one before it."""

    graph: fx.Graph
    what: str
    order: str
    before: Trace
    after: Trace

    def differing(self) -> list[int]:
        """The outputs that have other bits on some rank at some step."""
        pairs = zip(self.before.digests, self.after.digests, strict=True)
        found: set[int] = set()
        for before, after in pairs:
            for ours, theirs in zip(before, after, strict=True):
                if len(ours) != len(theirs):
                    return list(range(len(theirs)))
                found |= {n for n, d in enumerate(theirs) if d != ours[n]}
        return sorted(found)

    def told(self, differing: list[int]) -> Iterator[str]:
        """A line about outputs with other bits; what is named comes first."""
        state = written_state(self.graph)
        ordered = sorted(differing, key=lambda index: index not in state)
        names = ", ".join(output_name(self.graph, n) for n in ordered[:6])
        more = ", ..." if len(ordered) > 6 else ""
        count = f"{len(ordered)} of {len(output_values(self.graph))}"
        yield f"  {count} outputs differ: {names}{more}"

    def check(self, differing: list[int], ranks: str, gap: float) -> Check:
        """What was compared and how it came out; the gap is that of ``furthest``."""
        result = EQUAL
        if differing:
            names = ", ".join(output_name(self.graph, n) for n in differing[:3])
            result = (
                f"other bits in {len(differing)} outputs ({names}), at most {gap:.2g} of "
                "the largest entry apart"
            )
        return Check(
            self.what,
            ranks,
            self.order,
            len(self.after.digests),
            len(self.after.digests[0][0]),
            result,
            tuple(output_name(self.graph, n) for n in self.after.vacuous),
        )


def settled(
    before: fx.Graph, pair: Pair, differing: list[int], report: PassReport | None
) -> tuple[str, ...]:
    """The unproved outputs of a pass that have the same bits, and show something."""
    if report is None or not report.unproved_names:
        return ()
    silent = {*differing, *pair.before.vacuous, *pair.after.vacuous}
    places = set(range(len(pair.after.digests[0][0]))) - silent
    shown = {name_in_proof(before, place) for place in places}
    return tuple(name for name in report.unproved_names if name in shown)


def furthest(
    before: Iterable[_Results], after: Iterable[_Results], outputs: Sequence[int]
) -> float:
    """How far outputs are apart in two runs, as ``gap_between`` counts it."""
    gaps = [
        gap_between(ours[place], theirs[place])
        for old, new in zip(before, after, strict=True)
        for ours, theirs in zip(old, new, strict=True)
        for place in outputs
    ]
    return max(gaps, default=0.0)
