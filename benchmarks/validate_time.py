"""How wrong is a predicted step time? Real runs beside rehearsed ones.

    python benchmarks/validate_time.py                        # both, where a GPU is
    python benchmarks/validate_time.py --measure rows.json    # only the real runs
    python benchmarks/validate_time.py --measured rows.json   # only rehearsals, anywhere
    python benchmarks/validate_time.py --measured rows.json --gpu my.toml  # calibrated

The rows are those of ``_rows.py``, the same file of measurements as for memory. Ranks that
share one GPU take turns on it, so rows of several ranks are not compared. ``--draw SEED``
takes rows of ``_drawn_rows.py`` instead, ``--predict FILE`` predicts them before they are
measured.
``--only NAME ...`` takes some of the rows, ``--markdown`` prints the table of the docs.
"""

import statistics
from typing import Any

from _drawn_rows import drawn_rows
from _rows import ALL_ROWS, Row, compare_all, parse, told_errors


def main() -> None:
    options = parse(__doc__)
    drawn = None if options.draw is None else drawn_rows(options.draw)
    rows = drawn or [row for row in ALL_ROWS if row.ranks == 1 or options.measure]
    rows.sort(key=lambda row: row.ranks)  # where time is short, those that are compared
    table = compare_all("Predicted and measured steps, ms", rows, options, compare)
    if table:
        print(told_errors(row["error %"] for row in table))


def measured_seconds(phases: list[dict[str, Any]]) -> dict[str, float]:
    """A step in a row with others; the host's part of one; from ``train.py``'s line."""
    seconds = next(phase for phase in phases if phase["phase"] == "seconds")
    return {
        "step": seconds["in_a_row"],
        "alone": statistics.median(seconds["wall"]),
        "host": statistics.median(seconds["host"]),
    }


def compare(
    row: Row, phases: list[dict[str, Any]], prediction: dict[str, Any]
) -> dict[str, Any]:
    """Milliseconds, and the error in percent."""
    measured = measured_seconds(phases)
    predicted = prediction["step_seconds"]
    return {
        "row": row.name,
        "step": 1e3 * measured["step"],
        "predicted": 1e3 * predicted,
        "error %": 100 * (predicted / measured["step"] - 1),
        "host": 1e3 * measured["host"],
        "host, predicted": 1e3 * prediction["host_issue_seconds"],
    }


if __name__ == "__main__":
    main()
