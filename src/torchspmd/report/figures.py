"""Two predictions side by side as a table on a console, and figures as text."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from torchspmd.comm import format_bytes
from torchspmd.report.results import compare_results
from torchspmd.report.text import plain_table
from torchspmd.report.views import build_page

__all__ = ["differing_figures", "figure_text", "print_figures"]


def figure_text(value: Any, unit: str) -> str:
    """A figure with its unit.

    >>> figure_text(0.0125, "s"), figure_text(2048, "B"), figure_text(0.415, "%")
    ('12.5 ms', '2.00 KiB', '41.5%')
    """
    if value is None:
        return "-"
    if unit == "B":
        return format_bytes(round(value))
    if unit == "s":
        return f"{value * 1e3:.4g} ms"
    if unit == "%":
        return f"{value:.1%}"
    return str(value)


def differing_figures(
    before: dict[str, Any], after: dict[str, Any], names: tuple[str, str]
) -> list[dict[str, Any]]:
    """Figures of two predictions that differ: label, unit, before and after.

    >>> one = {"format": "torchspmd/prediction", "version": 1, "fits": "yes", "memory": {},
    ...        "modules": [], "step_seconds": 0.5}
    >>> differing_figures(one, {**one, "step_seconds": 0.25}, ("before", "after"))
    [{'label': 'step', 'unit': 's', 'before': 0.5, 'after': 0.25}]
    """
    page = build_page(compare_results(before, after, names))
    rows = page["views"]["compare"]["figures"]
    keys = ("label", "unit", "before", "after")
    answers = [
        {"label": "fits", "unit": "", "before": before["fits"], "after": after["fits"]}
    ]
    return [
        *(row for row in answers if row["before"] != row["after"]),
        *(
            {key: row[key] for key in keys}
            for row in rows
            if row["before"] != row["after"]
        ),
    ]


def print_figures(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """What differs, or that nothing does.

    >>> print_figures([], Console())
    Fit, times and memory are equal.
    """
    if not rows:
        console.print("Fit, times and memory are equal.")
        return
    table = plain_table("What is predicted", console.is_terminal)
    table.add_column("figure")
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        before, after = row["before"], row["after"]
        table.add_row(
            Text(row["label"]),
            figure_text(before, row["unit"]),
            figure_text(after, row["unit"]),
            _change(before, after),
        )
    console.print(table)
    console.print()


def _change(before: Any, after: Any) -> str:
    if isinstance(before, str) or not before or after is None:
        return ""
    return f"{100 * (after - before) / abs(before):+.1f} %"
