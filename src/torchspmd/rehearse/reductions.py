"""CUDA's reductions: sums, means and norms that many blocks of threads work on.

Where few results come of many elements, several blocks work on each result, and meet in
global memory: partial results, and a counter for each group of results. How many do depends
on the layout and on the multiprocessors of the GPU, as in ``ATen/native/cuda/Reduce.cuh``.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

__all__ = ["Reduction", "plan_reduction", "reduction_buffers"]

_THREADS = 512  # of a block
_THREADS_OF_A_PROCESSOR = 2048
_WARP = 32
_FEWEST, _MOST = 16, 256  # values for each thread


@dataclass(frozen=True, slots=True)
class _Dim:
    size: int
    stride: int
    is_reduced: bool


@dataclass(frozen=True, slots=True)
class Reduction:
    """How the threads of a GPU share a reduction.

    Attributes:
        along: Whether neighbours in a block add up one result.
        width: Threads of a block along the fastest dimension.
        height: Threads of a block across it.
        vector: Results that a thread works on.
        grid: Blocks, for as many groups of results.
        blocks: That work on each group, and meet in global memory.
        values: That each thread adds up.
    """

    along: bool
    width: int
    height: int
    vector: int
    grid: int
    blocks: int
    values: int


def plan_reduction(
    shape: Sequence[int],
    strides: Sequence[int],
    reduced: Collection[int],
    processors: int,
) -> Reduction | None:
    """As torch launches it; None without elements.

    Args:
        shape: Of what is reduced.
        strides: Its layout, in elements.
        reduced: The dimensions that go away.
        processors: Multiprocessors of the GPU.
    """
    dims = _joined(shape, strides, reduced)
    inner = [dim for dim in dims if dim.is_reduced]
    outer = [dim for dim in dims if not dim.is_reduced]
    num_inputs, num_outputs = _numel(inner), _numel(outer)
    if num_inputs * num_outputs == 0:
        return None
    along = not outer or (bool(inner) and inner[0].stride < outer[0].stride)
    fastest = (inner if along else outer)[0].stride if dims else 1
    width, height = (num_inputs, num_outputs) if along else (num_outputs, num_inputs)
    vector = 1
    if fastest == 1 and along and width >= 128 and len(inner) == 1:
        width //= 4
    elif fastest == 1 and not along:
        vector = _vector(outer, inner)
        width //= vector
    width, height = _block(width, height, _THREADS // vector)
    step_in, step_out = (width, 1) if along else (1, width)
    splits = _up(num_inputs, step_in) >= min(16 * height, _MOST)
    if splits:
        step_in *= height
    else:  # each warp has results of its own
        step_out *= height
    grid = _up(num_outputs // vector, step_out)
    values = _up(num_inputs, step_in)
    target = processors * (_THREADS_OF_A_PROCESSOR // (width * height))
    blocks = 1
    if splits and values >= _MOST and grid <= target:
        blocks = max(min(_up(target, grid), _up(values, _FEWEST)), _up(values, _MOST))
    return Reduction(along, width, height, vector, grid, blocks, _up(values, blocks))


def reduction_buffers(
    shape: Sequence[int],
    strides: Sequence[int],
    reduced: Collection[int],
    processors: int,
    itemsize: int = 4,
) -> tuple[int, ...]:
    """Bytes of the partial results and of the counters; () where no blocks meet.

    Args:
        shape: Of what is reduced.
        strides: Its layout, in elements.
        reduced: The dimensions that go away.
        processors: Multiprocessors of the GPU.
        itemsize: Bytes of a partial result.
    """
    plan = plan_reduction(shape, strides, reduced, processors)
    if plan is None or plan.blocks == 1:
        return ()
    kept = (size for place, size in enumerate(shape) if place not in reduced)
    partial = itemsize * prod(kept) * plan.blocks
    whole = partial if plan.along else partial * plan.width * plan.vector
    return whole, 4 * plan.grid


def _joined(
    shape: Sequence[int], strides: Sequence[int], reduced: Collection[int]
) -> list[_Dim]:
    """Reduced dimensions first, each kind from the fastest on, neighbours joined."""
    dims = sorted(
        (
            _Dim(size, stride, place in reduced)
            for place, (size, stride) in enumerate(zip(shape, strides, strict=True))
            if size != 1
        ),
        key=lambda dim: (not dim.is_reduced, dim.stride),
    )
    result: list[_Dim] = []
    for dim in dims:
        last = result[-1] if result else None
        if (
            last is not None
            and last.is_reduced == dim.is_reduced
            and last.size * last.stride == dim.stride
        ):
            result[-1] = _Dim(last.size * dim.size, last.stride, last.is_reduced)
        else:
            result.append(dim)
    return result


def _vector(outer: Sequence[_Dim], inner: Sequence[_Dim]) -> int:
    """Up to four results, where sizes and strides are multiples of it."""
    vector = 4
    for value in (outer[0].size, *(dim.stride for dim in (*inner, *outer[1:]))):
        while value % vector:
            vector //= 2
    return vector


def _block(width: int, height: int, most: int) -> tuple[int, int]:
    """Threads along the fastest dimension, and across."""
    columns, rows = (_power(min(each, most)) for each in (width, height))
    height = min(rows, most // min(columns, _WARP))
    return min(columns, most // height), height


def _numel(dims: Sequence[_Dim]) -> int:
    count = 1
    for dim in dims:
        count *= dim.size
    return count


def _power(value: int) -> int:
    """The largest power of two up to a value."""
    return 1 << max(value.bit_length() - 1, 0)


def _up(value: int, divisor: int) -> int:
    return -(-value // divisor)
