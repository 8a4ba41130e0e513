"""Check across ranks that values are what their layouts say; it costs collectives.

They are marked as checks, so that a ledger can leave them out of counts. Every rank of
an axis comes to the same verdict, so that all of them raise and none waits.
"""

import contextlib
import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Placement

from torchspmd import _torch
from torchspmd.comm import Kind, find_operator, marked_as_check
from torchspmd.errors import CheckError, SpmdError
from torchspmd.layout.placements import Layout, format_layout, shard_dim
from torchspmd.layout.shards import shard_size
from torchspmd.local.arguments import Options
from torchspmd.local.evidence import group_axes
from torchspmd.local.frame import Frame, LocalAxis
from torchspmd.local.outputs import Output
from torchspmd.local.specs import Problem, refuse

# ----------------------------------------------------------------------------
# Compare a tensor across the ranks of one mesh axis.
#
# Every rank takes the same path through here and gets the same answer; the communication
# is marked as a check.

# Ranks that do the same work in another order may differ by a few roundings.
_ROUNDINGS = 16
_MAX_DIMS = 16


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the ranks of an axis compare with the first of them.

    Attributes:
        rank: The first that differs; None when all hold the same.
        size: Largest absolute difference of an element; infinite for other shapes.
        scale: Largest absolute element on the first rank.
        has_contrast: The first rank's values are not all alike: equal constants on all
            ranks prove nothing.
    """

    rank: int | None
    size: float = 0.0
    scale: float = 0.0
    has_contrast: bool = False

    @property
    def is_same(self) -> bool:
        """All ranks hold the same values, but for a few roundings."""
        return self.rank is None

    @property
    def is_nonzero(self) -> bool:
        """The first rank holds something else than zeros."""
        return self.scale > 0


def can_compare(local: torch.Tensor, frame: Frame, axis: LocalAxis) -> bool:
    """Whether there are values and ranks to compare: not under fake tensors or groups."""
    group = frame.mesh.get_group(axis.index)
    return not _torch.is_fake(local) and str(dist.get_backend(group)) != "fake"


def compare(local: torch.Tensor, frame: Frame, axis: LocalAxis) -> Comparison:
    """Compare every rank along an axis with its rank 0."""
    rows = _gather_meta(local, frame, axis)
    for rank, row in enumerate(rows):
        if row != rows[0]:
            return Comparison(rank, math.inf)
    if local.numel() == 0:
        return Comparison(None)
    group = frame.mesh.get_group(axis.index)
    mine = _comparable(local)
    first = mine.clone()
    with marked_as_check():
        dist.broadcast(first, src=dist.get_global_rank(group, 0), group=group)
    scale = float(first.abs().max())
    figures = torch.tensor([_distance(mine, first)], dtype=torch.float64)
    sizes = [row[0] for row in _all_gather(figures, frame, axis)]
    return Comparison(
        _first_beyond(sizes, scale, local.dtype),
        max(sizes),
        scale,
        bool((first != first.flatten()[0]).any()),
    )


def gather_shapes(
    local: torch.Tensor, frame: Frame, axis: LocalAxis
) -> list[list[int]]:
    """The shape on every rank along an axis."""
    return [row[2 : 2 + row[0]] for row in _gather_meta(local, frame, axis)]


def _first_beyond(
    sizes: Sequence[float], scale: float, dtype: torch.dtype
) -> int | None:
    is_float = dtype.is_floating_point or dtype.is_complex
    tolerance = _ROUNDINGS * torch.finfo(dtype).eps if is_float else 0.0
    bound = tolerance * scale if math.isfinite(scale) else 0.0
    return next((rank for rank, size in enumerate(sizes) if size > bound), None)


def _comparable(local: torch.Tensor) -> torch.Tensor:
    """The values as doubles: every backend can send them, every dtype fits."""
    plain = torch.view_as_real(local) if local.is_complex() else local
    return plain.detach().to(torch.float64).contiguous()


def _distance(mine: torch.Tensor, first: torch.Tensor) -> float:
    same = (mine == first) | (mine.isnan() & first.isnan())
    distance = torch.where(same, 0.0, (mine - first).abs())
    return float(distance.nan_to_num(nan=math.inf, posinf=math.inf).max())


def _gather_meta(local: torch.Tensor, frame: Frame, axis: LocalAxis) -> list[list[int]]:
    """Number of dims, dtype and shape of every rank along an axis."""
    dtype = sum(str(local.dtype).encode())
    row = [local.ndim, dtype, *local.shape] + [0] * _MAX_DIMS
    numbers = torch.tensor(row[: _MAX_DIMS + 2], dtype=torch.float64)
    return [[int(n) for n in other] for other in _all_gather(numbers, frame, axis)]


def _all_gather(
    numbers: torch.Tensor, frame: Frame, axis: LocalAxis
) -> list[list[float]]:
    group = frame.mesh.get_group(axis.index)
    mine = numbers.to(frame.mesh.device_type)
    rows = [torch.empty_like(mine) for _ in range(axis.size)]
    with marked_as_check():
        dist.all_gather(rows, mine, group=group)
    return [row.tolist() for row in rows]


# ----------------------------------------------------------------------------
# Whole shapes, which each rank derives from its own part, must be the same on all.
#
# Ranks with other shapes wait for each other in the next collective. No rank waits here:
# the first to arrive posts its shape in the store, and the others compare theirs with it,
# once for each kind of call.

# What was posted under a key, in the order in which it came up: one piece of code may
# make several shapes of the same arguments, as closures do.
_posted: dict[str, list[tuple[int, ...]]] = {}


def compare_shapes(
    options: Options,
    frame: Frame,
    output: Output,
    value: torch.Tensor,
    shape: tuple[int, ...],
    given: Sequence[Sequence[int]],
) -> None:
    """Raise where another rank has derived another whole shape of an output."""
    assert output.layout is not None
    over = [
        axis
        for axis, entry in zip(frame.axes, output.layout, strict=True)
        if shard_dim(entry) is not None and axis.size > 1
    ]
    if not all(can_compare(value, frame, axis) for axis in over) or not over:
        return
    if any(type(size) is not int for size in shape):
        return  # symbolic: not known yet
    posted = _posted.setdefault(_shape_key(options, frame, output, given), [])
    if shape in posted:
        return
    posted.append(shape)
    key = f"{_shape_key(options, frame, output, given)}/{len(posted)}"
    mine = f"{dist.get_rank()}:{list(shape)}"
    first = _torch.default_store().compare_set(key, "", mine).decode()
    rank, _, other = first.partition(":")
    if other == str(list(shape)):
        return
    rule = "All ranks must derive the same whole shape, each from its own part."
    names = ", ".join(repr(axis.name) for axis in over)
    problem = Problem(
        f"{output.name}: has {list(value.shape)} here (rank {dist.get_rank()}) and is "
        f"{format_layout(output.layout)}, which makes {list(shape)} in all; on rank {rank} "
        f"its part makes {other}",
        f"Return equal pieces over {names}, or write the whole shape of {output.name} in "
        "out_shapes and return the piece that DTensor's split gives to this rank (the "
        "last ones smaller).",
    )
    refuse(options.name, frame.mesh, "an output's size", [problem], rule)


def _shape_key(
    options: Options, frame: Frame, output: Output, given: Sequence[Sequence[int]]
) -> str:
    code = getattr(options.function, "__code__", None)
    place = "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"
    ranks = frame.mesh.mesh.flatten().tolist()
    parts = (options.name, place, output.name, output.layout, list(map(list, given)))
    text = hashlib.sha256(repr((ranks, parts)).encode()).hexdigest()[:32]
    return f"torchspmd/local_map/{text}"


VARIABLE = "TORCHSPMD_CHECK"
_MAKES_EQUAL = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.BROADCAST)


def is_asked_for(option: bool | None) -> bool:
    """Whether checking is on: the option where it is given, else the environment."""
    if option is not None:
        return option
    return os.environ.get(VARIABLE, "0") not in ("", "0")


@dataclass(frozen=True, slots=True)
class Checker:
    """Compares the ranks of a region; one for each checked call.

    Attributes:
        function: Name of the function, for messages.
        frame: Mesh and axes of the region.
        reduced: Axes (by number) along which the function may have reduced by itself.
    """

    function: str
    frame: Frame
    reduced: frozenset[int] = frozenset()

    def check_output(
        self,
        local: torch.Tensor,
        layout: Layout,
        name: str,
        is_summed: Sequence[bool],
        has_graph: bool,
    ) -> None:
        """Check a layout that was declared for an output.

        Args:
            local: This rank's part.
            layout: What was declared.
            name: For messages.
            is_summed: For each axis, whether the function has reduced this output over
                it already, as far as is known without looking at values.
            has_graph: Whether that follows from the recorded graph.
        """
        problems = []
        for position, axis, entry in self._compared(local, layout):
            over = f"over {axis.name!r}"
            if entry.is_replicate():
                change = (
                    f"Declare {name} as Partial() {over} if it is a partial value, as "
                    "Shard(...) if it is a piece; or reduce it in the function."
                )
                problems += self._differs(local, axis, f"{name}: declared", change)
            elif entry.is_partial() and is_summed[position]:
                text = f"{name}: declared Partial() {over}, but the function reduces {over}"
                change = f"Declare {name} as Replicate() {over}"
                problems += self._is_doubled(local, axis, text, change, has_graph)
            elif (dim := shard_dim(entry)) is not None:
                problems += self._is_badly_cut(local, axis, dim, layout, name)
        self._refuse("an output is not what out_placements says", problems)

    def check_gradient(self, local: torch.Tensor, layout: Layout, name: str) -> None:
        """Check the gradient of an argument against the layout that it will be given."""
        problems = []
        for _, axis, entry in self._compared(local, layout):
            text = f"{name}: its gradient is taken as"
            if entry.is_replicate():
                change = (
                    f"Write Partial() for {axis.name!r} in in_grad_placements: each rank "
                    "holds a partial value of the gradient."
                )
                problems += self._differs(local, axis, text, change)
            elif entry.is_partial() and axis.index in self.reduced:
                text += (
                    f" Partial() over {axis.name!r}, but the region reduces over "
                    f"{axis.name!r} in backward"
                )
                change = f"Write Replicate() for {axis.name!r} in in_grad_placements"
                problems += self._is_doubled(local, axis, text, change, has_graph=False)
        self._refuse("a gradient is not what its layout says", problems)

    def _compared(
        self, local: torch.Tensor, layout: Layout
    ) -> Iterator[tuple[int, LocalAxis, Placement]]:
        """The axes whose ranks can be compared, with their positions and entries."""
        for position, axis in enumerate(self.frame.axes):
            if axis.size > 1 and can_compare(local, self.frame, axis):
                yield position, axis, layout[position]

    def _refuse(self, what: str, problems: list[Problem]) -> None:
        rule = "Checked across ranks because check=True or TORCHSPMD_CHECK=1."
        refuse(self.function, self.frame.mesh, what, problems, rule, CheckError)

    def _differs(
        self, local: torch.Tensor, axis: LocalAxis, text: str, change: str
    ) -> list[Problem]:
        """Replicas must hold the same values."""
        found = compare(local, self.frame, axis)
        if found.is_same:
            return []
        text = (
            f"{text} Replicate() over {axis.name!r}, but rank {found.rank} of "
            f"{axis.name!r} differs from rank 0 by {_size(found)}"
        )
        return [Problem(text, change)]

    def _is_doubled(
        self,
        local: torch.Tensor,
        axis: LocalAxis,
        text: str,
        change: str,
        has_graph: bool,
    ) -> list[Problem]:
        """What was reduced already is not a partial value."""
        found = compare(local, self.frame, axis)
        # Without a graph, equal constants may as well be equal partial values.
        is_telling = found.is_nonzero if has_graph else found.has_contrast
        if not (found.is_same and is_telling):
            return []
        text = f"{text} and all {axis.size} ranks hold the same values"
        change += (
            ", or leave the reduction out of the function: it would be summed twice."
        )
        return [Problem(text, change)]

    def _is_badly_cut(
        self, local: torch.Tensor, axis: LocalAxis, dim: int, layout: Layout, name: str
    ) -> list[Problem]:
        """Sizes along a sharded dim must be those of DTensor's own split."""
        axes_of_dim = [e for e in layout if shard_dim(e) == dim]
        if len(axes_of_dim) > 1:
            return []
        shapes = gather_shapes(local, self.frame, axis)
        if any(len(shape) <= dim for shape in shapes):
            return []
        sizes = [shape[dim] for shape in shapes]
        expected = [shard_size(sum(sizes), axis.size, r) for r in range(axis.size)]
        if sizes == expected:
            return []
        rank = next(r for r in range(axis.size) if sizes[r] != expected[r])
        return [
            Problem(
                f"{name}: declared {format_layout(layout)}, but rank {rank} of "
                f"{axis.name!r} holds {sizes[rank]} of {sum(sizes)} along dim {dim}, not "
                f"the {expected[rank]} that an even split gives it",
                "Return equal pieces (the last ranks may hold fewer), as DTensor splits.",
            )
        ]


def _size(found: Comparison) -> str:
    if found.size == float("inf"):
        return "its shape, its dtype or a value that is not finite"
    return f"up to {found.size:.3g} (largest element {found.scale:.3g})"


@contextlib.contextmanager
def refusing_together(
    function: str, frame: Frame, values: Sequence[Any]
) -> Iterator[None]:
    """A refusal on one rank is one on all: the others would wait in the checks."""
    tensors = [torch.empty(0)]  # where nothing comes out: is this a fake mode?
    tensors += [value for value in values if isinstance(value, torch.Tensor)]
    axes = [
        axis
        for axis in frame.axes
        if axis.size > 1 and all(can_compare(each, frame, axis) for each in tensors)
    ]
    try:
        yield
    except SpmdError:
        _find_refusing(frame, axes, dist.get_rank())
        raise
    rank = _find_refusing(frame, axes, -1)
    problem = Problem(f"rank {rank} has refused this call", "Its error says why.")
    rule = "Checked across ranks because check=True or TORCHSPMD_CHECK=1."
    problems = [] if rank < 0 else [problem]
    refuse(function, frame.mesh, "another rank's outputs", problems, rule, CheckError)


def _find_refusing(frame: Frame, axes: Sequence[LocalAxis], rank: int) -> int:
    """A rank that refuses, from any of the axes; -1 when none does."""
    for axis in axes:  # a refusal along one axis is passed on along the next
        mine = torch.tensor([rank], dtype=torch.float64)
        rank = int(max(row[0] for row in _all_gather(mine, frame, axis)))
    return rank


@contextlib.contextmanager
def observe_reductions(
    frame: Frame, axes: set[int], is_checked: bool
) -> Iterator[None]:
    """Note the axes along which what runs inside makes values equal."""
    if not is_checked:
        yield
        return

    def note(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        operator = find_operator(_torch.packet_name(op))
        if operator is not None and operator.kind in _MAKES_EQUAL:
            given = dict(zip(_torch.argument_names(op), args, strict=False), **kwargs)
            named = given.get("group_name", given.get("process_group"))
            group = _torch.resolve_group(named)
            axes.update(group_axes(frame.mesh, group) if group is not None else ())

    with _torch.observe_calls(note):
        yield
