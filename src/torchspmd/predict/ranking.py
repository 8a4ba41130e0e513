"""Which candidates of a search are best, and why the others are not."""

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchspmd.predict.space import Candidate
from torchspmd.predict.text import size_text
from torchspmd.predict.time_text import seconds_text
from torchspmd.report.results import PREDICTION, SEARCH

__all__ = ["Asked", "Outcome", "SearchResult", "describe_search", "rank"]

_COLUMNS = 80

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


class Asked(NamedTuple):
    """What was searched for.

    Attributes:
        command: That did so.
        script: Whose arguments they are.
        world_size: Ranks.
        gpu: As it was named.
        rank: That is told of.
        gpus_per_node: Ranks of a node.
        nodes: The node of each rank; () where ranks fill nodes in their order.
        network: As it was named.
        device_bytes: Of the GPU.
        of: How to predict a candidate by itself.
    """

    command: str
    script: str
    world_size: int
    gpu: str
    rank: int
    gpus_per_node: int
    nodes: tuple[int, ...]
    network: str
    device_bytes: int
    of: Callable[[Candidate], str]


@dataclass(slots=True)
class SearchResult:
    """All outcomes, the best first.

    Attributes:
        fitting: Those that fit and have a step time, by work a second.
        too_large: Those that do not fit.
        failed: Those that did not run, with their problems.
        pareto: Of those that fit: none other is both faster and smaller.
        unit: Of the work.
        notes: What was assumed.
        asked: What was searched for.
    """

    fitting: list[Outcome]
    too_large: list[Outcome]
    failed: list[Outcome]
    pareto: list[Outcome]
    unit: str
    notes: list[str] = field(default_factory=list)
    asked: Asked | None = None

    def __str__(self) -> str:
        return describe_search(self)

    @property
    def best(self) -> Outcome | None:
        """The fastest that fits."""
        return self.fitting[0] if self.fitting else None

    def as_json(self) -> dict[str, Any]:
        """The search file: every candidate with what was predicted of it."""
        asked = self.asked
        about: dict[str, Any] = {}
        if asked is not None:
            about = {
                "script": asked.script,
                "world_size": asked.world_size,
                "gpu": asked.gpu,
            }
        document = {
            "format": SEARCH,
            "version": 1,
            "unit": self.unit,
            "best": dict(self.best.candidate.values) if self.best else None,
            "notes": list(self.notes),
            "candidates": [
                self._candidate(each, about)
                for each in (*self.fitting, *self.too_large, *self.failed)
            ],
            **about,
        }
        if asked is not None:
            document |= {"command": asked.command, "device_bytes": asked.device_bytes}
        return document

    def _candidate(self, each: Outcome, about: Mapping[str, Any]) -> dict[str, Any]:
        told = {
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
        asked = self.asked
        if asked is None:
            return told
        told["command"] = asked.of(each.candidate)
        if not each.problem:
            told["prediction"] = {
                "format": PREDICTION,
                "version": 1,
                **about,
                "command": told["command"],
                "rank": asked.rank,
                "gpus_per_node": asked.gpus_per_node,
                "nodes": list(asked.nodes),
                "network": asked.network,
                "modules": [],
                "timeline": None,
                **each.prediction,
            }
        return told


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
    """The table, the front, and what is not in them, in plain text of 80 columns."""
    names = _varying(result)
    lines = _wrapped(_best(result, names))
    lines += _table(result, names, result.fitting[:most])
    lines += _wrapped(_front(result, names, most))
    lines += _wrapped(_others(result, names, most))
    return "\n".join(lines)


def _wrapped(lines: Iterable[str]) -> list[str]:
    """What goes on stands further right than its line begins."""
    wrapped: list[str] = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        wrapped += textwrap.wrap(
            line,
            _COLUMNS,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return wrapped


def _varying(result: SearchResult) -> list[str]:
    """Arguments that tell candidates apart; all of them where there is one candidate."""
    values = [
        each.candidate.values
        for each in (*result.fitting, *result.too_large, *result.failed)
    ]
    names = list(values[0]) if values else []
    return [name for name in names if len({each[name] for each in values}) > 1] or names


def _label(outcome: Outcome, names: Sequence[str]) -> str:
    values = outcome.candidate.values
    return " ".join(f"{name}={values[name]}" for name in names)


def _best(result: SearchResult, names: Sequence[str]) -> Iterator[str]:
    best = result.best
    if best is None:
        yield f"No candidate {'fits' if result.too_large else 'was predicted'}."
    else:
        yield f"Best: {_label(best, names)}, {_rate(best, result.unit)}"


def _front(result: SearchResult, names: Sequence[str], most: int) -> Iterator[str]:
    if len(result.fitting) > most:
        yield f"  and {len(result.fitting) - most} more that fit"
    if len(result.fitting) > 1:
        yield "Pareto front, none is both faster and smaller:"
        for each in result.pareto:
            size = size_text(each.nbytes)
            yield f"  {_rate(each, result.unit):>22} {size:>11}  {_label(each, names)}"


def _others(result: SearchResult, names: Sequence[str], most: int) -> Iterator[str]:
    yield from _why(result, names, most)
    if result.too_large:
        count = len(result.too_large)
        verb = "does" if count == 1 else "do"
        yield f"{count} {verb} not fit{_shown(count, most, 'nearest')}:"
        for each in sorted(result.too_large, key=lambda each: each.nbytes)[:most]:
            yield f"  {_label(each, names)}: {_missing(each)}"
    if result.failed:
        count = len(result.failed)
        was = "was" if count == 1 else "were"
        yield f"{count} {was} not predicted{_shown(count, 2 * most, 'first')}:"
        for each in result.failed[: 2 * most]:
            yield f"  {_label(each, names)}: {each.problem}"
    yield from result.notes


def _shown(count: int, most: int, which: str) -> str:
    return f", the {which} {most}" if count > most else ""


def _size(unit: str) -> float:
    """Of a unit, in what rates are counted in: FLOPs, or items."""
    return 1e12 if unit == "TFLOP" else 1.0


def _rate(outcome: Outcome, unit: str) -> str:
    rate = _number(outcome.rate / _size(unit))
    return f"{rate} TFLOP/s a GPU" if unit == "TFLOP" else f"{rate} {unit}/s"


def _number(rate: float) -> str:
    return f"{rate:,.1f}" if rate >= 1 or not rate else f"{rate:.2g}"


def _missing(outcome: Outcome) -> str:
    memory = outcome.prediction.get("memory") or {}
    failure = memory.get("first_failure")
    missing = f"{size_text(-float(memory.get('margin_bytes', 0)))} too much"
    if not failure:
        return missing
    module = failure.get("module")
    where = f"in {module}" if module else "outside of modules"
    return f"{missing}, first {where} ({failure.get('phase', '?')})"


_SHARES = {
    "exposed": "exposed_seconds",
    "host": "host_seconds",
    "bubble": "bubble_seconds",
}


def _table(
    result: SearchResult, names: Sequence[str], rows: Sequence[Outcome]
) -> Iterator[str]:
    """Parts of the step that no row has any of have no column.

    Where arguments and figures have no room beside each other, a row's arguments stand
    below its figures.
    """
    if not rows:
        return
    shares = {
        title: [float(each.prediction.get(key) or 0) / each.seconds for each in rows]
        for title, key in _SHARES.items()
    }
    shares = {title: some for title, some in shares.items() if max(some) >= 0.005}
    cells = [["step", f"{result.unit}/s", "MFU", "memory", *shares]]
    for place, each in enumerate(rows):
        mfu = each.prediction.get("mfu")
        risk = "" if each.prediction.get("fits") == "yes" else " at risk"
        cells.append(
            [
                seconds_text(each.seconds),
                _number(each.rate / _size(result.unit)),
                "" if mfu is None else f"{mfu:.1%}",
                size_text(each.nbytes) + risk,
                *(f"{some[place]:.0%}" for some in shares.values()),
            ]
        )
    values = [[str(each.candidate.values[name]) for name in names] for each in rows]
    heads = [_parts(name) for name in names]
    beside = _columns(
        [*heads, *([head] for head in cells[0])],
        [left + right for left, right in zip(values, cells[1:], strict=True)],
    )
    if max(map(len, beside)) <= _COLUMNS:
        yield from beside
        return
    header, *figures = _columns([[head] for head in cells[0]], cells[1:])
    yield header
    for each, line in zip(rows, figures, strict=True):
        yield line
        yield from _wrapped([f"    {_label(each, names)}"])


def _columns(
    heads: Sequence[Sequence[str]], rows: Sequence[Sequence[str]]
) -> list[str]:
    """Lines of a table.

    Args:
        heads: Of each column, in parts: they may stand on lines of their own, where all
            of them have no room beside each other.
        rows: Cells.
    """
    least = [
        max(map(len, (*head, *column)))
        for head, column in zip(heads, zip(*rows, strict=True), strict=True)
    ]
    longest = max(len("".join(head)) for head in heads)
    for most in range(longest, 0, -1):
        widths = [
            max(width, min(len("".join(head)), most))
            for head, width in zip(heads, least, strict=True)
        ]
        if sum(widths) + 2 * len(widths) <= _COLUMNS:
            break
    broken = [_joined(head, width) for head, width in zip(heads, widths, strict=True)]
    height = max(map(len, broken))
    above = zip(*([""] * (height - len(b)) + b for b in broken), strict=True)
    return [
        "".join(
            f"  {cell:>{width}}" for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in (*above, *rows)
    ]


def _parts(name: str) -> list[str]:
    """A name, cut behind its underscores.

    >>> _parts("gradient_accumulation_steps")
    ['gradient_', 'accumulation_', 'steps']
    """
    return re.findall(r"[^_]*_+|[^_]+", name)


def _joined(parts: Sequence[str], width: int) -> list[str]:
    """As few lines as the width allows."""
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return lines


def _why(result: SearchResult, names: Sequence[str], most: int) -> Iterator[str]:
    """For each runner-up, what it loses the most time in against the best, per work."""
    best = result.best
    if best is None:
        return
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
            f"{seconds_text(loss)} more {name}"
            for name, loss in worst
            if loss > max(0.0, 0.01 * worst[0][1])
        )
        slower = best.rate / each.rate - 1 if each.rate else 0.0
        yield f"  {_label(each, names)}: {slower:.1%} slower; {told or 'a tie'}"
