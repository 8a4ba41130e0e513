"""How wrong is a predicted peak of memory? Real runs beside rehearsed ones.

    python benchmarks/validate_memory.py                       # both, where a GPU is
    python benchmarks/validate_memory.py --measure rows.json   # only the real runs
    python benchmarks/validate_memory.py --measured rows.json  # only rehearsals, anywhere

The rows are those of ``_rows.py``. ``--only NAME ...`` takes some of them, ``--markdown``
prints the table as the docs have it.
"""

from collections.abc import Iterable
from typing import Any

from _drawn_rows import drawn_rows
from _rows import ROWS, Row, compare_all, parse


def main() -> None:
    options = parse(__doc__)
    rows = ROWS if options.draw is None else drawn_rows(options.draw)
    table = compare_all("Predicted and measured memory, MiB", rows, options, compare)
    if table:
        print(*summary(table), sep="\n")


def by_period(phases: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Initialisation, first step, and the highest of the others."""
    first, second, *others = phases
    return {
        "initialisation": _peaks([first]),
        "first step": _peaks([second]),
        "steady step": _peaks(others),
        "steady": others[-1]["allocated"],
    }


def _peaks(phases: list[dict[str, Any]]) -> dict[str, int]:
    return {
        key: max(phase[f"{key}_peak"] for phase in phases)
        for key in ("allocated", "reserved")
    }


def predicted_periods(memory: dict[str, Any]) -> dict[str, Any]:
    """The same figures of a prediction."""
    periods: dict[str, Any] = {
        name: {
            "allocated": figures["allocated_peak_bytes"],
            "reserved": figures["reserved_peak_bytes"],
        }
        for name, figures in memory["periods"].items()
    }
    return {**periods, "steady": memory["steady_bytes"]}


def compare(
    row: Row, phases: list[dict[str, Any]], prediction: dict[str, Any]
) -> dict[str, Any]:
    """Peaks over the whole run, and what stays between steps; errors in percent."""
    measured = by_period(phase for phase in phases if "allocated" in phase)
    predicted = predicted_periods(prediction["memory"])
    figures = {"row": row.name, "ranks": row.ranks}
    for key in ("allocated", "reserved"):
        real, told = (_highest(each, key) for each in (measured, predicted))
        figures |= _pair(key, real, told)
    return figures | _pair("steady", measured["steady"], predicted["steady"])


def _highest(figures: dict[str, Any], key: str) -> int:
    return max(each[key] for each in figures.values() if isinstance(each, dict))


def _pair(key: str, real: int, told: int) -> dict[str, Any]:
    mib = 2**20
    return {
        key: real / mib,
        f"{key}, predicted": told / mib,
        f"{key}, error %": 100 * (told / real - 1),
    }


def summary(table: list[dict[str, Any]]) -> list[str]:
    """How many rows are within the bounds that the docs promise."""
    lines = []
    for key, bounds in (
        ("allocated", (2, 5)),
        ("reserved", (8,)),
        ("steady", (0.001,)),
    ):
        errors = [abs(row[f"{key}, error %"]) for row in table]
        for bound in bounds:
            within = sum(error <= bound for error in errors)
            lines.append(f"{key}: {within} of {len(errors)} rows within {bound:g} %")
        lines.append(f"{key}: worst {max(errors):.2f} %")
    return lines


if __name__ == "__main__":
    main()
