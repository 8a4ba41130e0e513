"""The measured exposure of a step as a table."""

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from torchspmd.comm import format_bytes
from torchspmd.report.text import plain_table
from torchspmd.step.measure.exposure_report import ExposureReport, MeasuredExposure


def print_exposure(
    report: ExposureReport, console: Console, worst: int | None = None
) -> None:
    """The sums, every collective with its reason, and what a reader must know.

    Args:
        report: What was measured.
        console: Where to print.
        worst: Print only so many, those that are exposed longest; all by default.
    """
    chosen = report.collectives if worst is None else report.worst(worst)
    console.print(Text(report.summary()))
    console.print()
    if chosen:
        console.print(exposure_table(chosen, console.is_terminal))
    else:
        console.print("No collective is waited for.")
    left = len(report.collectives) - len(chosen)
    if left:
        console.print(f"and {left} more, exposed no longer than these")
    console.print()
    for note in report.notes:
        console.print(Text(f"Note: {note}."))


def exposure_table(
    chosen: tuple[MeasuredExposure, ...], is_terminal: bool = False
) -> Table:
    """A row for each collective: whose it is, its times in milliseconds, the reason."""
    table = plain_table("Exposed communication, ms", is_terminal)
    table.add_column("collective", overflow="fold", ratio=1)
    table.add_column("axis", no_wrap=True)
    for name in ("payload", "to use", "exposed", "simulated"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in chosen:
        simulated = each.simulated_ms
        table.add_row(
            _name_and_reason(each),
            Text(each.event.axis),
            format_bytes(each.event.payload_bytes),
            f"{each.distance_ms:.2f}",
            f"{each.exposed_ms:.2f}",
            "?" if simulated is None else f"{simulated:.2f}",
        )
    return table


def _name_and_reason(each: MeasuredExposure) -> Group:
    parts = [part for part in each.reason.split("; ") if part]
    indented = (Padding(Text(part), (0, 0, 0, 2)) for part in parts)
    return Group(Text(f"{each.start}, {each.what}"), *indented)
