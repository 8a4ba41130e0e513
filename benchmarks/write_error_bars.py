"""Where the error comes from that every predicted step is told with.

    python benchmarks/write_error_bars.py             # rehearse every row; half an hour
    python benchmarks/write_error_bars.py --measured  # published rows as the last time
    python benchmarks/write_error_bars.py --recorded  # all rows as the last time

Rows that were measured on an H200 (``validate_time.py``, ``validate_jobs.py``) and
published ones (``validate_published.py``) are predicted, and stand with their milliseconds
in ``measured/predicted_steps.csv``. An error bar is what nine of ten of its rows stay
within; they are written to ``src/torchspmd/predict/validation.toml``, which predictions
read. ``docs/predicted_steps.md``, its picture, and a table in ``docs/predict_errors.md``
and in ``docs/predict_time.md`` are written too. What is printed are the errors of each
table.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import validate_jobs
import validate_memory
import validate_published
import validate_time
from _drawn_rows import drawn_rows
from _published import SOURCES, sampled
from _rows import ALL_ROWS, rehearse, told_errors
from _steps import MEASURED, TABLES, Bar, Step, read, rounded_bar, write, write_pages

from torchspmd.predict.prediction import NEAR_HOST

BARS = Path(__file__).parent.parent / "src/torchspmd/predict/validation.toml"
GPU = "h200"
_SEEDS = (8, 9, 10, 11, 12)
_LATER_SETS = ("third", "fourth", "fifth", "sixth", "seventh")


# What a reader is told of the rows, beside their number.
_SOURCES = {
    Bar.DEVICE: "runs on one H200 that the device bounds; the cost model was made with "
    "most of them in sight",
    Bar.HOST: "runs on one H200 whose host needs three quarters of the step or more: hosts "
    "differ, so calibrate on yours",
    Bar.ONE_RANK: "published runs on one H100",
    Bar.SEVERAL_RANKS: "published runs on more than 8 GPUs; the cost model was made with "
    "them in sight",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--recorded", action="store_true", help="predict nothing: the rows of the CSV"
    )
    parser.add_argument(
        "--measured",
        action="store_true",
        help="predict the rows that were measured on an H200, in ten minutes",
    )
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if options.measured:
        others = [step for step in read() if step.table not in TABLES]
        write([*measured_rows(), *others])
    elif not options.recorded:
        write([*measured_rows(), *published(options.jobs)])
    steps = read()
    BARS.write_text(text(steps), encoding="utf-8")
    write_pages(steps)
    print(*summary(steps), sep="\n")


# ----------------------------------------------------------------------------
# Predictions


def measured_rows() -> list[Step]:
    """Two at a time: each is rehearsed in a process of its own."""
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(lambda of=of: list(of())) for of in (own_rows, jobs)]
        return [step for each in found for step in each.result()]


def own_rows() -> Iterator[Step]:
    """Of every run of the same rows; each row is rehearsed once."""
    rows = {row.name: row for row in ALL_ROWS if row.ranks == 1}
    rows |= {row.name: row for seed in _SEEDS for row in drawn_rows(seed)}
    predictions = {}
    for name in ("h200", "h200_second", *(f"h200_drawn_{seed}" for seed in _SEEDS)):
        measured = json.loads((MEASURED / f"{name}.json").read_text())
        for row in (rows[each] for each in rows if each in measured):
            if row.name not in predictions:
                predictions[row.name] = rehearse(row, GPU)
            prediction = predictions[row.name]
            phases = measured[row.name]
            seconds = validate_time.measured_seconds(phases)["step"]
            memory = validate_memory.compare(row, phases, prediction)
            yield Step(
                _bar(prediction),
                name,
                row.name,
                *_pair(seconds, prediction),
                memory["allocated"],
                memory["allocated, predicted"],
            )


def jobs() -> Iterator[Step]:
    """Models of other kinds."""
    for table in ("h200_jobs", *(f"h200_jobs_{each}" for each in _LATER_SETS)):
        measured = json.loads((MEASURED / f"{table}.json").read_text())
        for name, figures in measured.items():
            prediction = validate_jobs.predict(name, GPU)
            if "error" in prediction:
                print(
                    f"{table}, {name}: left out: {prediction['error']}", file=sys.stderr
                )
                continue
            pair = _pair(figures["ms"] / 1e3, prediction)
            told = prediction["memory"]["allocated_peak_bytes"]
            peaks = (figures["allocated"] / 2**20, told / 2**20)
            yield Step(_bar(prediction), table, name, *pair, *peaks)


def _bar(prediction: dict[str, float]) -> Bar:
    issuing, step = prediction["host_issue_seconds"], prediction["step_seconds"]
    return Bar.HOST if issuing > NEAR_HOST * step else Bar.DEVICE


def _pair(seconds: float, prediction: dict[str, float]) -> tuple[float, float]:
    return 1e3 * seconds, 1e3 * prediction["step_seconds"]


def published(processes: int) -> Iterator[Step]:
    """Those of the docs, of one GPU or more than a node; without a source's factor."""
    rows = [row for source in SOURCES.values() for row in source() if sampled(row)]
    rows = [row for row in rows if row.gpus == 1 or row.gpus > 8]
    answers = validate_published.predict(rows, processes)
    for row, answer in zip(rows, answers, strict=True):
        if isinstance(answer, str):
            raise SystemExit(f"write_error_bars.py: {row.name}: {answer}")
        bar = Bar.ONE_RANK if row.gpus == 1 else Bar.SEVERAL_RANKS
        seconds = validate_published.seconds_of(row, answer)
        yield Step(bar, row.source, row.name, 1e3 * row.seconds, 1e3 * seconds)


# ----------------------------------------------------------------------------
# Files


def text(steps: list[Step]) -> str:
    """The file of error bars."""
    lines = [
        "# The error of predicted steps that nine of ten rows of a validation table stay",
        "# within. Made by benchmarks/write_error_bars.py.",
    ]
    for bar in Bar:
        errors = sorted(step.error for step in steps if step.bar is bar)
        source = f"{len(errors)} {_SOURCES[bar]} (docs/predict_errors.md)"
        lines += ["", f"[{bar}]", f"error = {rounded_bar(errors)}"]
        lines.append(f'source = "{source}"')
    return "\n".join(lines) + "\n"


def summary(steps: list[Step]) -> Iterator[str]:
    """What the docs tell of each table, and of its rows by their error bar."""
    for table in dict.fromkeys(step.table for step in steps):
        these = [step for step in steps if step.table == table]
        bars = dict.fromkeys(step.bar for step in these)
        yield f"{table}, {told_errors(100 * step.error for step in these)}"
        for bar in bars if len(bars) > 1 else ():
            errors = (100 * step.error for step in these if step.bar is bar)
            yield f"  {bar}, {told_errors(errors)}"


if __name__ == "__main__":
    main()
