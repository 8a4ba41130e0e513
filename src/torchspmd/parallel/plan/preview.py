"""``Plan.preview``: what a plan does to a model, as a value, before it is done."""

import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard

from torchspmd.comm import Ledger, Total, format_bytes, format_count
from torchspmd.comm.folding import unfold
from torchspmd.comm.notebook import html_table
from torchspmd.errors import UsageError
from torchspmd.layout.placements import format_placement, positive_dim
from torchspmd.layout.shards import shard_size
from torchspmd.parallel.axis import MeshLike, PlanMesh, describe_mesh_axis
from torchspmd.parallel.plan.assignment import Assignment, own_style
from torchspmd.parallel.plan.forecast import forecast
from torchspmd.parallel.plan.names import fold, generalise
from torchspmd.parallel.plan.plan import Style
from torchspmd.parallel.plan.resolve import resolve
from torchspmd.parallel.plan.run import Inputs
from torchspmd.parallel.plan.text_form import describe_style
from torchspmd.parallel.style import Cut, Slab

# ----------------------------------------------------------------------------
# The parameters of a model under a plan: layout, local shape and bytes, as rows.


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRow:
    """One parameter, or the same one of many layers.

    Attributes:
        name: Its path; layers folded as in ``layers.[0-31].up.weight``.
        count: How many parameters the row stands for.
        style: The style that lays it out, as code; None where no style does.
        layout: Its placement as code, several for a fused one; None where no style
            touches it.
        shape: The whole shape of one of them.
        dtype: The element type.
        local_shapes: Shape on each rank of the axis; one where all are alike.
        local_bytes: Bytes of all of them on each rank; one where all are alike.
        total_bytes: Bytes of all of them on one device.
        parts: Of a fused one, the rows of each part and its placement as code; they
            lie one below the other.
    """

    name: str
    count: int
    style: str | None
    layout: str | None
    shape: tuple[int, ...]
    dtype: str
    local_shapes: tuple[tuple[int, ...], ...]
    local_bytes: tuple[int, ...]
    total_bytes: int
    parts: tuple[tuple[int, str], ...] = ()

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds all of it."""
        return self.layout is None or self.layout == "Replicate()"


def build_rows(
    model: nn.Module, assignments: Sequence[Assignment], num_ranks: int
) -> tuple[ParameterRow, ...]:
    """Every parameter once, those of numbered layers together."""
    layouts, styles = _layouts(assignments, num_ranks)
    aliases: dict[int, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(path)
    groups: dict[tuple[Any, ...], tuple[nn.Parameter, list[str]]] = {}
    for path, parameter in model.named_parameters():
        placed = next((p for p in aliases[id(parameter)] if p in layouts), path)
        key = (
            generalise(path),
            tuple(parameter.shape),
            parameter.dtype,
            layouts.get(placed),
            styles.get(placed),
        )
        groups.setdefault(key, (parameter, []))[1].append(path)
    rows = []
    for (*_, layout, style), (parameter, paths) in groups.items():
        for name in fold(paths):
            count = len(unfold(name))
            rows.append(_row(name, count, parameter, layout, style, num_ranks))
    return tuple(rows)


def _layouts(
    assignments: Sequence[Assignment], num_ranks: int
) -> tuple[dict[str, Cut], dict[str, str]]:
    """How each parameter is cut, by path, and the style that does it."""
    cuts: dict[str, Cut] = {}
    styles: dict[str, str] = {}
    for assignment in assignments:
        own, module = own_style(assignment.style), assignment.module
        placed = {} if own is None else own.parameter_cuts(module, num_ranks)
        text = describe_style(assignment.style)
        for name, _ in module.named_parameters(remove_duplicate=False):
            if own is None or name in placed:
                styles[assignment.parameter_path(name)] = text
        cuts |= {assignment.parameter_path(name): cut for name, cut in placed.items()}
    return cuts, styles


def _row(
    name: str,
    count: int,
    parameter: nn.Parameter,
    cut: Cut | None,
    style: str | None,
    num_ranks: int,
) -> ParameterRow:
    shape, itemsize = tuple(parameter.shape), parameter.element_size()
    shapes = _local_shapes(shape, cut or (), num_ranks)
    if len(set(shapes)) == 1:
        shapes = shapes[:1]
    return ParameterRow(
        name=name,
        count=count,
        style=style,
        layout=_layout_text(cut, len(shape), style),
        shape=shape,
        dtype=str(parameter.dtype).removeprefix("torch."),
        local_shapes=shapes,
        local_bytes=tuple(math.prod(local) * itemsize * count for local in shapes),
        total_bytes=math.prod(shape) * itemsize * count,
        parts=tuple(
            (slab.size, format_placement(positive_dim(slab.layout, len(shape))))
            for slab in cut or ()
            if slab.size is not None
        ),
    )


def _layout_text(cut: Cut | None, ndim: int, style: str | None) -> str | None:
    if cut is None:
        return None if style is None else "unknown"
    texts = [format_placement(positive_dim(slab.layout, ndim)) for slab in cut]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)


def _local_shapes(
    shape: tuple[int, ...], cut: Cut, num_ranks: int
) -> tuple[tuple[int, ...], ...]:
    """The shape on each rank; slabs lie side by side on the dimension that is cut."""
    if not any(isinstance(slab.layout, Shard) for slab in cut):
        return (shape,)
    if len(cut) == 1 and cut[0].size is None:
        layout = positive_dim(cut[0].layout, len(shape))
        assert isinstance(layout, Shard)
        dim = layout.dim
        cut = (Slab(shape[dim], layout),)
    else:
        dim = next(s.layout.dim for s in cut if isinstance(s.layout, Shard))
    sizes = (
        sum(_on_rank(s, num_ranks, rank) for s in cut) for rank in range(num_ranks)
    )
    return tuple((*shape[:dim], size, *shape[dim + 1 :]) for size in sizes)


def _on_rank(slab: Slab, num_ranks: int, rank: int) -> int:
    assert slab.size is not None
    if isinstance(slab.layout, Shard):
        return shard_size(slab.size, num_ranks, rank)
    return slab.size


def uneven_notes(rows: Sequence[ParameterRow]) -> list[str]:
    """A sentence for each parameter of which ranks hold different amounts."""
    notes = []
    for row in rows:
        sizes = [b // row.count for b in row.local_bytes]
        if len(set(sizes)) > 1:
            first, last = row.local_shapes[0], row.local_shapes[-1]
            empty = sum(size == 0 for size in sizes)
            nothing = f"; {empty} ranks hold nothing" if empty else ""
            notes.append(
                f"{row.name} is uneven: {list(first)} on the first rank, {list(last)} on "
                f"the last{nothing}."
            )
    return notes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Preview:
    """What a plan does to a model; ``print`` it, or read its rows.

    Attributes:
        model: The model's class.
        mesh: The mesh and the axis of the plan.
        rows: Every parameter, layers folded.
        ledger: The expected communication of one forward and backward of one rank;
            None where no input shape was given.
        notes: What the reader must know: assumptions, uneven shards, what is unknown.
    """

    model: str
    mesh: PlanMesh
    rows: tuple[ParameterRow, ...]
    ledger: Ledger | None
    notes: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all parameters on one device."""
        return sum(row.total_bytes for row in self.rows)

    @property
    def replicated_bytes(self) -> int:
        """Bytes of the parameters that every rank of the axis holds whole."""
        return sum(row.total_bytes for row in self.rows if row.is_replicated)

    def bytes_on_rank(self, rank: int) -> int:
        """Bytes of parameters that one rank of the axis holds."""
        if not 0 <= rank < self.mesh.size:
            raise UsageError(
                f"bytes_on_rank({rank}): the ranks of {self.mesh.axis} are 0 to "
                f"{self.mesh.size - 1}."
            )
        return sum(
            row.local_bytes[rank if len(row.local_bytes) > 1 else 0]
            for row in self.rows
        )

    def to_json(self) -> str:
        """All of it as JSON, sizes in bytes."""
        return json.dumps(self.as_dict(), indent=1)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data, sizes in bytes."""
        value: dict[str, Any] = {
            "format": "torchspmd/plan",
            "version": 1,
            "model": self.model,
            "mesh": dict(self.mesh.axes),
            "axis": self.mesh.axis,
            "total_bytes": self.total_bytes,
            "replicated_bytes": self.replicated_bytes,
            "bytes_on_rank_0": self.bytes_on_rank(0),
            "parameters": [asdict(row) for row in self.rows],
            "communication": None,
            "notes": self.notes,
        }
        if self.ledger is not None:
            totals = self.ledger.total_by("phase", "kind", "module")
            value["communication"] = [
                {"phase": phase, "kind": kind, "module": module, **asdict(total)}
                for (phase, kind, module), total in totals.items()
            ]
        return value

    def __str__(self) -> str:
        return _format_preview(self)

    def _repr_html_(self) -> str:
        """What a notebook shows: every parameter, layers folded."""
        rows = [
            [
                row.name,
                row.style or "-",
                row.layout or "-",
                " x ".join(map(str, row.local_shapes[0])) or "scalar",
                format_bytes(row.local_bytes[0]),
            ]
            for row in self.rows
        ]
        header = ("parameter", "style", "layout", "shape on a rank", "on a rank")
        title = f"{self.model} on {self.mesh.axis}={self.mesh.size} of the {self.mesh}"
        return html_table(
            title, header, rows, [*_summary(self).split("\n"), *self.notes]
        )


def build_preview(
    plan: Style | Mapping[str, Style],
    model: nn.Module,
    mesh: MeshLike,
    *,
    axis: str | None = None,
    tokens: tuple[int | None, int | None] = (None, None),
    example_inputs: Inputs | None = None,
) -> Preview:
    """See ``Plan.preview``."""
    mesh_axis = describe_mesh_axis(mesh, axis)
    resolved = resolve(plan, model, mesh_axis, call="Plan.preview")
    rows = build_rows(model, resolved.assignments, resolved.mesh.size)
    notes = uneven_notes(rows)
    ledger = None
    if example_inputs is not None or tokens != (None, None):
        ledger, more = forecast(model, resolved, example_inputs, _tokens(*tokens))
        notes += more
    return Preview(
        model=type(model).__name__,
        mesh=resolved.mesh,
        rows=rows,
        ledger=ledger,
        notes=tuple(notes),
    )


def _tokens(batch: int | None, seq: int | None) -> tuple[int, int]:
    for name, value in (("batch", batch), ("seq", seq)):
        if value is not None and (type(value) is not int or value < 1):
            raise UsageError(
                f"preview: {name} is {value!r}; pass a number of at least 1."
            )
    return batch or 1, seq or 1


# ----------------------------------------------------------------------------
# A preview as text, 80 columns wide.

_WIDTH = 80
_wrapper = textwrap.TextWrapper(
    _WIDTH,
    initial_indent="note: ",
    subsequent_indent="  ",
    break_long_words=False,
    break_on_hyphens=False,
)


def _format_preview(preview: Preview) -> str:
    """The parameters, the communication and the notes."""
    mesh = preview.mesh
    parts = [
        f"{preview.model} on {mesh.axis}={mesh.size} of the {mesh} "
        f"({mesh.num_ranks} ranks)",
        _parameter_table(preview.rows),
        _summary(preview),
    ]
    if preview.ledger is None:
        parts.append(
            "Communication: pass batch= and seq= (--batch and --seq) to see it."
        )
    else:
        parts.append(_communication(preview.ledger))
    if preview.notes:
        parts.append("\n".join(map(_wrapper.fill, preview.notes)))
    return "\n\n".join(parts)


def _parameter_table(rows: Sequence[ParameterRow]) -> str:
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


def _summary(preview: Preview) -> str:
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
        f"{str(phase).capitalize()}: {format_count(total.count, 'collective')}, "
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
    room = _WIDTH - sum(widths[1:]) - 2 * len(widths[1:])
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
