"""Which candidates of a search are best, and why the others are not."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchspmd.predict.space import Candidate
from torchspmd.predict.text import size_text
from torchspmd.predict.time_text import seconds_text

__all__ = ["Outcome", "SearchResult", "describe_search", "rank"]

_PARTS = {
    "compute_seconds": "compute",
    "exposed_seconds": "exposed communication",
    "host_seconds": "waiting for the host",
    "bubble_seconds": "bubble",
}


@dataclass(slots=True)
class Outcome:
    """What came of a candidate.

    Attributes:
        candidate: The point of the space.
        prediction: Keys of docs/prediction_format.md; {} where it did not run.
        work: Items, or model FLOPs, of a step.
        problem: Why it did not run, or was left out; "" where it was predicted.
        cached: Whether it was predicted before.
    """

    candidate: Candidate
    prediction: Mapping[str, Any] = field(default_factory=dict)
    work: float = 0.0
    problem: str = ""
    cached: bool = False

    @property
    def seconds(self) -> float:
        """Of a step; 0 where none was predicted."""
        return float(self.prediction.get("step_seconds") or 0.0)

    @property
    def rate(self) -> float:
        """Work a second."""
        return self.work / self.seconds if self.seconds else 0.0

    @property
    def nbytes(self) -> int:
        """The most of the device that is in use."""
        memory = self.prediction.get("memory") or {}
        return int(memory.get("device_peak_bytes", 0))

    @property
    def fits(self) -> bool:
        """Whether it runs, if only perhaps."""
        return self.prediction.get("fits") in ("yes", "at risk")


@dataclass(frozen=True, slots=True)
class SearchResult:
    """All outcomes, the best first.

    Attributes:
        fitting: Those that fit and have a step time, by work a second.
        too_large: Those that do not fit.
        failed: Those that did not run, with their problems.
        pareto: Of those that fit: none other is both faster and smaller.
        unit: Of the work.
        notes: What was assumed.
    """

    fitting: list[Outcome]
    too_large: list[Outcome]
    failed: list[Outcome]
    pareto: list[Outcome]
    unit: str
    notes: list[str] = field(default_factory=list)

    @property
    def best(self) -> Outcome | None:
        """The fastest that fits."""
        return self.fitting[0] if self.fitting else None

    def as_json(self) -> dict[str, Any]:
        """Plain data: every candidate with what was predicted of it."""
        return {
            "format": "torchspmd/search",
            "version": 1,
            "unit": self.unit,
            "best": dict(self.best.candidate.values) if self.best else None,
            "notes": list(self.notes),
            "candidates": [
                {
                    "values": dict(each.candidate.values),
                    "arguments": list(each.candidate.words),
                    "work_per_second": each.rate / _size(self.unit),
                    "pareto": each in self.pareto,
                    "problem": each.problem,
                    **{
                        key: each.prediction.get(key)
                        for key in ("fits", "step_seconds", "mfu", *_PARTS)
                    },
                    "device_peak_bytes": None if each.problem else each.nbytes,
                }
                for each in (*self.fitting, *self.too_large, *self.failed)
            ],
        }


def rank(outcomes: Sequence[Outcome], unit: str) -> SearchResult:
    """Sort them."""
    fitting = [each for each in outcomes if not each.problem and each.fits]
    fitting.sort(key=lambda each: (-each.rate, each.nbytes, str(each.candidate)))
    pareto = []
    least = float("inf")
    for each in fitting:
        if each.nbytes < least:
            pareto.append(each)
            least = each.nbytes
    return SearchResult(
        fitting=fitting,
        too_large=[each for each in outcomes if not each.problem and not each.fits],
        failed=[each for each in outcomes if each.problem],
        pareto=pareto,
        unit=unit,
    )


def describe_search(result: SearchResult, *, most: int = 10) -> str:
    """The table, the front, and what is not in them, in plain text."""
    return "\n".join(_lines(result, most))


def _lines(result: SearchResult, most: int) -> Iterator[str]:
    best = result.best
    if best is None:
        yield "No candidate fits."
    else:
        yield f"Best: {best.candidate}, {_rate(best, result.unit)}"
        yield from _table(result, result.fitting[:most])
        if len(result.fitting) > most:
            yield f"  and {len(result.fitting) - most} more that fit"
        yield "Pareto front, none is both faster and smaller:"
        for each in result.pareto:
            size = size_text(each.nbytes)
            yield f"  {_rate(each, result.unit):>26} {size:>11}  {each.candidate}"
        yield from _why(result, most)
    if result.too_large:
        yield f"{len(result.too_large)} do not fit:"
        for each in sorted(result.too_large, key=lambda each: each.nbytes)[:most]:
            yield f"  {each.candidate}: {_missing(each)}"
    if result.failed:
        yield f"{len(result.failed)} were not predicted:"
        for each in result.failed[: 2 * most]:
            yield f"  {each.candidate}: {each.problem}"
    yield from result.notes


def _size(unit: str) -> float:
    """Of a unit, in what rates are counted in: FLOPs, or items."""
    return 1e12 if unit == "TFLOP" else 1.0


def _rate(outcome: Outcome, unit: str) -> str:
    rate = outcome.rate / _size(unit)
    if unit == "TFLOP":
        return f"{rate:.1f} TFLOP/s a GPU"
    return f"{rate:,.1f} {unit}/s"


def _missing(outcome: Outcome) -> str:
    memory = outcome.prediction.get("memory") or {}
    failure = memory.get("first_failure")
    missing = f"{size_text(-float(memory.get('margin_bytes', 0)))} too much"
    if not failure:
        return missing
    where = failure.get("module") or "no module"
    return f"{missing}, first in {where} ({failure.get('phase', '?')})"


def _table(result: SearchResult, rows: Sequence[Outcome]) -> Iterator[str]:
    names = list(rows[0].candidate.values) if rows else []
    head = [
        *names,
        "step",
        result.unit + "/s",
        "MFU",
        "memory",
        "exposed",
        "host",
        "bubble",
    ]
    cells = [head]
    for each in rows:
        prediction, seconds = each.prediction, each.seconds
        mfu = prediction.get("mfu")
        parts = [
            f"{float(prediction.get(key) or 0) / seconds:.0%}"
            for key in ("exposed_seconds", "host_seconds", "bubble_seconds")
        ]
        rate = each.rate / _size(result.unit)
        risk = "" if prediction.get("fits") == "yes" else " at risk"
        cells.append(
            [
                *(str(each.candidate.values[name]) for name in names),
                seconds_text(seconds),
                f"{rate:,.1f}",
                "" if mfu is None else f"{mfu:.1%}",
                size_text(each.nbytes) + risk,
                *parts,
            ]
        )
    widths = [max(len(row[at]) for row in cells) for at in range(len(head))]
    for row in cells:
        pairs = zip(row, widths, strict=True)
        yield "  " + "  ".join(cell.rjust(width) for cell, width in pairs)


def _why(result: SearchResult, most: int) -> Iterator[str]:
    """For each runner-up, what it loses the most time in against the best, per work."""
    best = result.best
    assert best is not None
    if len(result.fitting) > 1:
        yield "Why the runners-up lose, for the same work:"
    for each in result.fitting[1 : min(most, 6)]:
        scale = best.work / each.work if each.work else 1.0
        losses = {
            name: float(each.prediction.get(key) or 0) * scale
            - float(best.prediction.get(key) or 0)
            for key, name in _PARTS.items()
        }
        worst = sorted(losses.items(), key=lambda pair: -pair[1])[:2]
        told = ", ".join(
            f"{seconds_text(loss)} more {name}" for name, loss in worst if loss > 0
        )
        slower = best.rate / each.rate - 1 if each.rate else 0.0
        yield f"  {each.candidate}: {slower:.1%} slower; {told or 'a tie'}"
