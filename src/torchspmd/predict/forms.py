"""How the time of a kernel that memory bounds changes with the shape of its tensors.

Tables of seconds by bytes are measured with one shape each. A closed form of the kernel, of
which only the ratio between two shapes counts, carries them over to others. Its figures
are under ``[kernels]`` of the hardware files.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torchspmd import _torch
from torchspmd.predict.figures import Figures
from torchspmd.predict.hardware import Hardware
from torchspmd.predict.traffic import base_name, item_bytes, tensor_bytes
from torchspmd.rehearse.recording import Op, TensorSpec
from torchspmd.rehearse.reductions import plan_reduction

__all__ = [
    "COPIES",
    "SECTOR",
    "Loop",
    "blocks_seconds",
    "by_clock",
    "clocks",
    "converts",
    "element_seconds",
    "iterated",
    "loops",
    "norm_seconds",
    "reached_bandwidth",
    "reduction_seconds",
    "sectors",
    "touched_bytes",
]

COPIES = frozenset({"_to_copy", "copy_", "clone", "contiguous"})
_ALSO_POINTWISE = frozenset({"masked_fill_"})  # torch does not say so
SECTOR = 32  # bytes that memory moves at once
_THREADS = 128  # of a block of an elementwise kernel
_WARP = 32
# Rows from which on the gradients of a norm's weights are summed up in parts, one for each
# 32 rows (LaunchGammaBetaBackwardCUDAKernel in ATen/native/cuda/layer_norm_kernel.cu).
_MANY_ROWS = 64 * 1024


# ----------------------------------------------------------------------------
# Elements whose places are computed


class Loop(NamedTuple):
    """Dimensions of a kernel's tensors that are one to it: their size, and each stride."""

    size: int
    strides: tuple[int, ...]


def iterated(op: Op) -> list[TensorSpec] | None:
    """The result of a pointwise operator or a copy, and what it reads; else None."""
    base = base_name(op.name)
    is_copy = base in COPIES
    if not (is_copy or base in _ALSO_POINTWISE or _torch.is_pointwise(op.name)):
        return None
    result = op.outputs[0] if op.outputs else next(iter(op.inputs), None)
    if result is None or base.startswith("_foreach_"):
        return None
    read = [spec for spec in op.inputs if spec.shape or spec.device != "cpu"]
    tensors = [result, *(read[-1:] if is_copy else read)]
    if any(
        len(spec.stride) != len(spec.shape) or len(spec.shape) > len(result.shape)
        for spec in tensors
    ):
        return None
    return tensors


def loops(tensors: Sequence[TensorSpec]) -> list[Loop]:
    """Of a kernel over the elements of the first tensor, from its fastest dimension on.

    None where all are contiguous, or lie alike without gaps.
    """
    shape = tensors[0].shape
    strides = [_broadcast(spec, shape) for spec in tensors]
    places = [place for place, size in enumerate(shape) if size != 1]
    joined: list[Loop] = []
    for place in sorted(places, key=lambda place: [each[place] for each in strides]):
        loop = Loop(shape[place], tuple(each[place] for each in strides))
        last = joined[-1] if joined else None
        if last and loop.strides == tuple(last.size * each for each in last.strides):
            joined[-1] = Loop(last.size * loop.size, last.strides)
        else:
            joined.append(loop)
    if len(joined) == 1 and set(joined[0].strides) == {1}:
        return []
    return joined


def _broadcast(spec: TensorSpec, shape: Sequence[int]) -> list[int]:
    missing = len(shape) - len(spec.shape)
    return [0] * missing + [
        stride if size == shape[missing + place] else 0
        for place, (size, stride) in enumerate(
            zip(spec.shape, spec.stride, strict=True)
        )
    ]


def converts(op: Op, tensors: Sequence[TensorSpec]) -> bool:
    """Whether elements are converted one by one as they are read or written."""
    result, *read = tensors
    if base_name(op.name) in COPIES and read:
        narrows = read[0].dtype == "float32" and result.dtype in ("bfloat16", "float16")
        return read[0].dtype != result.dtype and not narrows  # has a kernel of its own
    return len({spec.dtype for spec in tensors} - {"bool"}) > 1


def element_seconds(
    figures: Figures, dims: int, tensors: int, converted: bool
) -> float:
    """Of one element whose place is computed over some dimensions, in each tensor."""
    of_tensor = figures.number("kernels.element_tensor")
    of_conversion = figures.number("kernels.element_conversion") if converted else 0.0
    return (
        figures.number("kernels.element")
        + dims * figures.number("kernels.element_dimension")
        + (tensors - 2) * of_tensor
        + tensors * of_conversion
    )


def touched_bytes(spec: TensorSpec, *, written: bool) -> float:
    """Bytes of the sectors that a tensor lies in; to write parts of one, it is read."""
    steps = [
        stride
        for size, stride in zip(spec.shape, spec.stride, strict=True)
        if size != 1 and stride
    ]
    item = item_bytes(spec)
    gap = min(min(steps, default=1), SECTOR // item)
    return tensor_bytes(spec) * gap * (2 if written and gap > 1 else 1)


def sectors(loop: Loop, spec: TensorSpec) -> float:
    """Parts of a sector that a block of threads uses at once, reading across rows.

    A block works on neighbours of the result. Where those are a short row, it goes on to
    the next ones, which lie beside the first in what it reads.
    """
    item = item_bytes(spec)
    elements = _THREADS * (2 if item >= 4 else 4)
    return max(1.0, min(SECTOR / item, elements / loop.size))


# ----------------------------------------------------------------------------
# Reductions and norms


def reduction_seconds(figures: Figures, spec: TensorSpec, reduced: set[int]) -> float:
    """Of a sum; where several blocks work on a result, one of them adds up their parts."""
    processors = int(figures.number("chip.sms"))
    plan = plan_reduction(spec.shape, spec.stride, reduced, processors)
    if plan is None:
        return 0.0
    of_part = figures.number("kernels.reduction_part")
    adding = max(
        _moving(figures, tensor_bytes(spec)),
        plan.values * figures.number("kernels.reduction_value"),
    )
    meeting = math.ceil(plan.blocks / plan.height) if plan.blocks > 1 else 0
    return adding + meeting * of_part


def norm_seconds(
    figures: Figures,
    rows: float,
    width: float,
    item: int,
    *,
    backward: bool,
    weights: bool,
) -> float:
    """Of a layer norm: a block of threads for each row.

    In backward, another kernel sums up the gradients of weights, with a block for each 32
    columns: it goes down all rows, unless there are very many.
    """
    nbytes = rows * width * item
    if not backward:
        of_row = by_clock(figures, "kernels.layer_norm_row")
        return rows * of_row + _moving(figures, 2 * nbytes)
    seconds = rows * by_clock(figures, "kernels.layer_norm_backward_row")
    seconds += _moving(figures, 3 * nbytes)
    if not weights:
        return seconds
    moving = _moving(figures, 2 * nbytes)
    if rows > _MANY_ROWS and width / _WARP < figures.number("chip.sms") / 2:
        return seconds + moving
    return seconds + max(
        moving, rows * by_clock(figures, "kernels.layer_norm_weights_row")
    )


def blocks_seconds(figures: Figures, count: float) -> float:
    """Of a kernel whose blocks of threads do little: what starting them takes."""
    return figures.number("launch.kernel") + count * by_clock(figures, "kernels.block")


def by_clock(figures: Figures, key: str) -> float:
    """Seconds that multiprocessors take: the more, the fewer and slower they are."""
    seconds = figures.number(key)
    measured, _ = figures.used[key]
    return seconds * clocks(figures, measured) / clocks(figures, figures.gpu)


def clocks(figures: Figures, hardware: Hardware) -> float:
    """Clocks of all multiprocessors in a second."""
    number = figures.number if hardware is figures.gpu else hardware.number
    return number("chip.sms") * number("chip.clock")


def reached_bandwidth(figures: Figures) -> float:
    """Bytes a second that long simple kernels move."""
    return figures.number("kernels.memory") * figures.number("bandwidth.memory")


def _moving(figures: Figures, nbytes: float) -> float:
    return nbytes / reached_bandwidth(figures)
