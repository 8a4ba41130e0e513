"""A preview as text, 80 columns wide."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torchspmd.comm import Ledger, Total, format_bytes
from torchspmd.parallel.plan.names import fold, generalise

if TYPE_CHECKING:
    from torchspmd.parallel.plan.preview import ParameterRow, Preview

WIDTH = 80


def format_preview(preview: "Preview") -> str:
    """The parameters, the communication and the notes."""
    mesh = preview.mesh
    parts = [
        f"{preview.model} on {mesh.axis}={mesh.size} of the {mesh} "
        f"({mesh.num_ranks} ranks)",
        _parameter_table(preview.rows),
        _summary(preview),
    ]
    if preview.ledger is None:
        parts.append("Communication: pass batch= and seq= to see it.")
    else:
        parts.append(_communication(preview.ledger))
    if preview.notes:
        parts.append("\n".join(_wrap(f"note: {note}") for note in preview.notes))
    return "\n\n".join(parts)


def _parameter_table(rows: Sequence["ParameterRow"]) -> str:
    cells = [
        (
            row.name,
            _short_style(row.style),
            _short_layout(row.layout),
            " x ".join(map(str, row.local_shapes[0])) or "scalar",
            format_bytes(row.local_bytes[0]),
        )
        for row in rows
    ]
    header = ("parameter", "style", "layout", "shape on a rank", "on a rank")
    return _table(header, cells, right=(4,))


def _short_style(style: str | None) -> str:
    """``ColwiseParallel(...)`` as ``Colwise``; the layout has a column of its own."""
    return "-" if style is None else style.partition("(")[0].removesuffix("Parallel")


def _short_layout(layout: str | None) -> str:
    if layout is None:
        return "-"
    return "in parts" if "," in layout else layout.removesuffix("()")


def _summary(preview: "Preview") -> str:
    total, first = preview.total_bytes, preview.bytes_on_rank(0)
    replicated = [row for row in preview.rows if row.is_replicated]
    share = 100 * preview.replicated_bytes / first if first else 0.0
    num_replicated = sum(row.count for row in replicated)
    num_all = sum(row.count for row in preview.rows)
    return (
        f"Parameters: {format_bytes(total)} in all, {format_bytes(first)} on rank 0 of the "
        f"axis.\nReplicated: {num_replicated} of {num_all} parameters, "
        f"{format_bytes(preview.replicated_bytes)} on every rank ({share:.1f} % of it)."
    )


def _communication(ledger: Ledger) -> str:
    totals = ledger.total_by("module", "phase", "kind")
    if not totals:
        return "Communication: none."
    groups: dict[tuple[str, str, str], tuple[list[str], Total]] = {}
    for (module, phase, kind), total in totals.items():
        key = (generalise(str(module)), str(phase), str(kind))
        names, sum_ = groups.get(key, ([], Total()))
        groups[key] = ([*names, str(module)], sum_ + total)
    cells = [
        (_module_name(names), phase, kind, str(t.count), format_bytes(t.wire_bytes))
        for (_, phase, kind), (names, t) in groups.items()
    ]
    header = ("module", "phase", "kind", "times", "sends")
    lines = ["Communication of one rank, in one forward and backward:", ""]
    lines += [_table(header, cells, right=(3, 4)), "", *_totals(ledger)]
    return "\n".join(lines)


def _module_name(modules: list[str]) -> str:
    """The modules without the model's class in front, folded; many as the first."""
    names = fold([module.partition(".")[2] or module for module in modules])
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _totals(ledger: Ledger) -> list[str]:
    return [
        f"{str(phase).capitalize()}: {total.count} collectives, "
        f"{format_bytes(total.payload_bytes)} payload, rank sends "
        f"{format_bytes(total.wire_bytes)}."
        for (phase,), total in ledger.total_by("phase").items()
    ]


def _table(
    header: tuple[str, ...], rows: Iterable[tuple[str, ...]], right: tuple[int, ...]
) -> str:
    """Columns with two spaces between; a long first cell has a line of its own."""
    cells = [header, *rows]
    widths = [max(len(row[place]) for row in cells) for place in range(len(header))]
    room = WIDTH - sum(widths[1:]) - 2 * len(widths[1:])
    widths[0] = min(widths[0], max(room, 2))
    lines = []
    for number, row in enumerate(cells):
        first, *others = row
        if len(first) > widths[0]:
            lines.append(first)
            first = ""
        line = [first.ljust(widths[0])] + [
            text.rjust(width) if place in right else text.ljust(width)
            for place, (text, width) in enumerate(
                zip(others, widths[1:], strict=True), start=1
            )
        ]
        lines.append("  ".join(line).rstrip())
        if number == 0:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _wrap(text: str) -> str:
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append(f"  {word}")
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return "\n".join(lines)
