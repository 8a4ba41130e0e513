"""Measured steps beside their predictions: a file of them, and the pages that show them."""

import csv
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from _scatter import scatter

MEASURED = Path(__file__).parent / "measured"
STEPS = MEASURED / "predicted_steps.csv"
DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "predicted_steps.md"
PICTURE = DOCS / "images" / "h200_steps.svg"
DIGEST = DOCS / "predict_errors.md"  # has the table of tables between two comments
SUMMARY = DOCS / "predict_time.md"  # has the error bars between two


class Bar(StrEnum):
    """A table of ``validation.toml``."""

    DEVICE = "one_rank_h200"
    HOST = "near_host"
    ONE_RANK = "one_rank"
    SEVERAL_RANKS = "several_ranks"


class Step(NamedTuple):
    """A measured step and its prediction, in milliseconds; MiB, None where not compared."""

    bar: Bar
    table: str
    row: str
    measured: float
    predicted: float
    allocated: float | None = None
    allocated_predicted: float | None = None

    @property
    def error(self) -> float:
        """As a part of the measured step."""
        return abs(self.predicted / self.measured - 1)


class Table(NamedTuple):
    """Rows that were measured together on an H200."""

    title: str
    first: str = ""  # the file of what was predicted before they were measured


TABLES = {
    "h200": Table("rows of this repository"),
    "h200_second": Table("the same on another machine"),
    "h200_drawn_8": Table("drawn by seed 8", "h200_drawn_8_predicted"),
    "h200_drawn_9": Table("drawn by seed 9", "h200_drawn_9_predicted"),
    "h200_drawn_10": Table("drawn by seed 10", "h200_drawn_10_predicted"),
    "h200_drawn_11": Table("drawn by seed 11", "h200_drawn_11_predicted"),
    "h200_drawn_12": Table("drawn by seed 12", "h200_drawn_12_predicted"),
    "h200_jobs": Table("jobs, first and second set"),
    "h200_jobs_third": Table("jobs, third set", "h200_jobs_predicted"),
    "h200_jobs_fourth": Table("jobs, fourth set", "h200_jobs_fourth_predicted"),
    "h200_jobs_fifth": Table("jobs, fifth set", "h200_jobs_fifth_predicted"),
    "h200_jobs_sixth": Table("jobs, sixth set", "h200_jobs_sixth_predicted"),
    "h200_jobs_seventh": Table("jobs, seventh set", "h200_jobs_seventh_predicted"),
}


def write(steps: Iterable[Step]) -> None:
    """One line for each, sorted: the same rows give the same file."""
    with STEPS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Step._fields)
        for step in sorted(steps):
            writer.writerow((*step[:3], *map(_figure, step[3:])))


def read() -> list[Step]:
    with STEPS.open(encoding="utf-8", newline="") as file:
        return [
            Step(
                Bar(bar), table, row, float(step), float(predicted), *map(_read, peaks)
            )
            for bar, table, row, step, predicted, *peaks in list(csv.reader(file))[1:]
        ]


def _figure(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.2f}"


def _read(cell: str) -> float | None:
    return float(cell) if cell else None


def nine_of_ten(ordered: Sequence[float]) -> float:
    """What nine of ten errors stay within, of sorted ones."""
    return ordered[math.ceil(0.9 * len(ordered)) - 1]


def rounded_bar(ordered: Sequence[float]) -> float:
    """The same, in whole percent upwards: what predictions show."""
    return math.ceil(round(100 * nine_of_ten(ordered), 3)) / 100


# ----------------------------------------------------------------------------
# Pages


def write_pages(steps: list[Step]) -> None:
    """All rows, a picture of them, and the first table of ``predict_errors.md``."""
    PAGE.write_text(page(steps), encoding="utf-8")
    shown = [
        {
            "source": "the host needs most of the step"
            if step.bar is Bar.HOST
            else "the device bounds the step",
            "row": step.row,
            "step": step.measured,
            "predicted": step.predicted,
            "fitted": False,
        }
        for step in sorted(steps)
        if step.table in TABLES
    ]
    PICTURE.write_text(scatter(shown), encoding="utf-8")
    _replace(DIGEST, "steps", digest(steps))
    _replace(SUMMARY, "bars", bars(steps))


def _replace(page: Path, name: str, table: Iterable[str]) -> None:
    """What a page has between two comments."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise SystemExit(f"{page.name} has no lines {begin} and {end} for the table.")
    told = "\n".join([before + begin, *table, end + after])
    page.write_text(told, encoding="utf-8")


_KINDS = {
    Bar.DEVICE: "one H200; the device bounds the step",
    Bar.HOST: "one H200; the host needs three quarters of the step or more",
    Bar.ONE_RANK: "one other GPU",
    Bar.SEVERAL_RANKS: "more than 8 GPUs; also shown for 2 to 8",
}


def bars(steps: list[Step]) -> Iterator[str]:
    """The error bars that predictions show, in percent."""
    yield "| steps of this kind | number | mean error % | give or take % | worst % |"
    yield "|---|---|---|---|---|"
    for bar, kind in _KINDS.items():
        errors = sorted(step.error for step in steps if step.bar is bar)
        cells = [
            kind,
            str(len(errors)),
            _percent(statistics.fmean(errors)),
            f"{100 * rounded_bar(errors):.0f}",
            _percent(errors[-1]),
        ]
        yield f"| {' | '.join(cells)} |"


def digest(steps: list[Step]) -> Iterator[str]:
    """A line for each table: errors as first predicted, and now; in percent."""
    head = ["", "rows", "first: mean", "median", "worst", "now: mean", "median"]
    head += ["nine of ten", "worst", "the device bounds", "mean", "worst"]
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for name, table in TABLES.items():
        these = [step for step in steps if step.table == name]
        first = [error for error in first_errors(name, these).values() if error]
        device = sorted(step.error for step in these if step.bar is Bar.DEVICE)
        errors = sorted(step.error for step in these)
        cells = [
            table.title,
            str(len(these)),
            *(_three(first) if first else ("", "", "")),
            _percent(statistics.fmean(errors)),
            _percent(statistics.median(errors)),
            _percent(nine_of_ten(errors)),
            _percent(errors[-1]),
            str(len(device)),
            _percent(statistics.fmean(device)),
            _percent(device[-1]),
        ]
        yield f"| {' | '.join(cells)} |"


def first_errors(name: str, steps: Sequence[Step]) -> dict[str, float | None]:
    """Of each row, as it was predicted before it was measured; None: it could not be."""
    told = _first_predicted(name)
    return {
        step.row: None
        if not told[step.row]
        else abs(told[step.row] / step.measured - 1)
        for step in steps
        if step.row in told
    }


def _first_predicted(name: str) -> dict[str, float]:
    """Milliseconds by row; 0 where there was an error."""
    if not (file := TABLES[name].first):
        return {}
    predictions = json.loads((MEASURED / f"{file}.json").read_text(encoding="utf-8"))
    return {row: 1e3 * each.get("step_seconds", 0) for row, each in predictions.items()}


def _three(errors: Sequence[float]) -> tuple[str, str, str]:
    found = statistics.fmean(errors), statistics.median(errors), max(errors)
    mean, middle, worst = map(_percent, found)
    return mean, middle, worst


def _percent(part: float) -> str:
    return f"{100 * part:.1f}"


def page(steps: list[Step]) -> str:
    """Every row that was measured on an H200."""
    lines = [
        "# Every measured step",
        "",
        "Training runs on one H200 (torch 2.11) beside what `torchspmd predict` says of",
        "them. Each error is in percent of what was measured: +10 means that the",
        "prediction is 10 % too long, or too large.",
        "",
        "| column | meaning |",
        "|---|---|",
        "| bound by | `host`: issuing the operators takes three quarters of the predicted "
        "step or more; otherwise `device` |",
        "| measured, ms | one step, measured over several in a row |",
        "| first, ms | the prediction that was committed before the row was measured; "
        "only in tables that have such predictions |",
        "| now, ms | the prediction of this version with `--gpu h200` |",
        "| peak, MiB | the highest allocated memory that was measured; empty where it was "
        "not compared |",
        "",
        "`python benchmarks/write_error_bars.py` predicts every row again and writes this",
        "page. [How wrong predictions are](predict_errors.md#one-h200) says how the rows",
        "were chosen.",
        "",
        "![Predicted against measured milliseconds](images/h200_steps.svg)",
    ]
    for name, table in TABLES.items():
        lines += ["", f"## {table.title[0].upper()}{table.title[1:]}", ""]
        lines.append(f"`benchmarks/measured/{name}.json`")
        lines += ["", *_rows(name, [step for step in steps if step.table == name])]
    return "\n".join(lines) + "\n"


def _rows(name: str, steps: Sequence[Step]) -> Iterator[str]:
    first = _first_predicted(name)
    head = ["row", "bound by", "measured, ms"]
    head += ["first, ms", "error %"] if first else []
    head += ["now, ms", "error %", "peak, MiB", "error %"]
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for step in steps:
        bound = "host" if step.bar is Bar.HOST else "device"
        cells = [step.row, bound, f"{step.measured:.1f}"]
        if first:
            cells += _cell(first.get(step.row), step.measured)
        cells += _cell(step.predicted, step.measured)
        cells += _peak(step)
        yield f"| {' | '.join(cells)} |"


def _peak(step: Step) -> list[str]:
    if step.allocated is None or step.allocated_predicted is None:
        return ["", ""]
    return [
        f"{step.allocated:.0f}",
        _cell(step.allocated_predicted, step.allocated)[1],
    ]


def _cell(predicted: float | None, measured: float) -> list[str]:
    if not predicted:
        return ["" if predicted is None else "an error", ""]
    return [f"{predicted:.1f}", f"{100 * (predicted / measured - 1):+.1f}"]
