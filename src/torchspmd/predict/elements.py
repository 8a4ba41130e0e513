"""Seconds of pointwise operators and copies: kernels that go over elements.

Where elements do not lie in one row, a kernel computes the place of each.
"""

import math
from collections.abc import Sequence

from torchspmd.predict.byte_tables import ITEM, ByteTables, roofline
from torchspmd.predict.forms import (
    COPIES,
    by_clock,
    converts,
    element_seconds,
    loops,
    reached_bandwidth,
    sectors,
    touched_bytes,
)
from torchspmd.predict.traffic import base_name, is_contiguous, tensor_bytes
from torchspmd.rehearse.recording import Op, TensorSpec

__all__ = [
    "price_concatenation",
    "price_contiguous",
    "price_copy",
    "price_padding",
    "price_part_backward",
    "price_places",
    "price_pointwise",
    "price_reordered",
    "price_roll",
    "price_zeros",
]

_EDGE = 3  # as a roofline's corner, of computing places and moving bytes
_CAT_DIMS = 4  # more than these are concatenated by a copy of each part


def price_pointwise(
    tables: ByteTables, op: Op, key: str, nbytes: int, tensors: Sequence[TensorSpec]
) -> float:
    """A pointwise operator or a copy."""
    is_copy = base_name(op.name) in COPIES
    converted = converts(op, tensors)
    if is_copy and converted and not loops(tensors):
        return tables.by_bytes("cast", nbytes)
    if key in ("strided", "transpose", "broadcast"):
        key = "elementwise_1" if is_copy else f"elementwise_{min(len(tensors), 4) - 1}"
    plain = tables.by_bytes(key, nbytes)
    return max(plain, price_places(tables, tensors, converted))


def price_copy(tables: ByteTables, source: TensorSpec, target: TensorSpec) -> float:
    """A copy of one tensor into another of its shape."""
    plain = tables.by_bytes("elementwise_1", 2 * tensor_bytes(source))
    return max(plain, price_places(tables, (target, source), converted=False))


def price_contiguous(tables: ByteTables, spec: TensorSpec) -> float:
    """A copy of a tensor into one that is contiguous."""
    sizes = spec.shape
    steps = tuple(math.prod(sizes[place + 1 :]) for place in range(len(sizes)))
    return price_copy(tables, spec, spec._replace(stride=steps))


def price_places(
    tables: ByteTables, tensors: Sequence[TensorSpec], converted: bool
) -> float:
    """Where elements do not lie in one row, their places are computed; else 0.

    What is measured: two arguments of 2 bytes, one of which has positions and heads
    swapped; and a row that is added to all others.
    """
    found = loops(tensors)
    if not found and not converted:
        return 0.0
    result = tensors[0]
    count = math.prod(result.shape)
    table, size, dims = "strided", 3, 3
    if any(0 in loop.strides for loop in found):
        table, size, dims = "broadcast", 2, 2
    of_element = element_seconds(tables.figures, len(found), len(tensors), converted)
    ratio = of_element / element_seconds(tables.figures, dims, 3, converted=False)
    measured = tables.by_bytes(table, size * ITEM * count)
    computing = tables.floor + (measured - tables.floor) * ratio
    for place, spec in enumerate(tensors[1:], 1):
        step = found[0].strides[place] if found else 0
        others = (loop.strides[place] for loop in found[1:])
        if step > 1 and any(0 < other < step for other in others):
            across = max(0.0, price_reordered(tables, spec) - computing)
            computing += across / sectors(found[0], spec)
    touched = touched_bytes(result, written=True)
    touched += sum(touched_bytes(spec, written=False) for spec in tensors[1:])
    moving = touched / reached_bandwidth(tables.figures)
    return roofline(computing, moving, _EDGE)


def price_reordered(tables: ByteTables, spec: TensorSpec) -> float:
    """A copy of a tensor, in another order of its dimensions."""
    seconds = tables.by_bytes("transpose", 2 * tensor_bytes(spec))
    return seconds * _transposing(tables, spec)


def _transposing(tables: ByteTables, spec: TensorSpec) -> float:
    """Times the seconds of two bytes an element, at the same bytes."""
    if spec.dtype not in ("float32", "int32"):
        return 1.0
    return tables.figures.number("kernels.transpose_4_bytes")


def price_zeros(tables: ByteTables, spec: TensorSpec) -> float:
    """A new tensor of zeros."""
    return tables.by_bytes("fill", tensor_bytes(spec))


def price_concatenation(tables: ByteTables, op: Op) -> float:
    """One kernel for all parts; of many dimensions, a copy of each into its place."""
    result = op.outputs[0]
    parts = [spec for spec in op.inputs if math.prod(spec.shape)]
    if op.name.endswith(".out"):
        del parts[-1]
    dim = dict(op.scalars).get("dim", 0)
    dim = int(str(dim)) % max(len(result.shape), 1)
    stacked = base_name(op.name) == "stack"
    # A stack before the last dimension is a concatenation, seen otherwise.
    dims = len(result.shape) - (stacked and dim < len(result.shape) - 1)
    if dims > _CAT_DIMS:
        kept = result.stride
        kept = kept[:dim] + kept[dim + 1 :] if stacked else kept
        return sum(
            price_copy(tables, spec, result._replace(shape=spec.shape, stride=kept))
            for spec in parts
        )
    moved = 2 * sum(map(tensor_bytes, parts))  # read and written
    if all(map(is_contiguous, parts)):
        return tables.by_bytes("concatenate", moved)
    return tables.by_bytes("concatenate_strided", moved)


def price_padding(tables: ByteTables, op: Op, nbytes: int) -> float:
    """The result is filled, and the argument copied into it; or a part is copied."""
    before, after = (tensor_bytes(each[0]) for each in (op.inputs, op.outputs))
    filled = tables.by_bytes("fill", after) if after > before else 0.0
    return filled + tables.by_bytes("strided", 2 * min(before, after))


def price_part_backward(tables: ByteTables, op: Op, nbytes: int) -> float:
    """Zeros, and a copy into the part of them that was taken in forward."""
    (gradient, *_), result = op.inputs, op.outputs[0]
    scalars = dict(op.scalars)
    dim, step = (int(str(scalars.get(name, 1))) for name in ("dim", "step"))
    steps = list(result.stride)
    if "select" in op.name:
        del steps[dim]
    else:
        steps[dim] *= step
    part = result._replace(shape=gradient.shape, stride=tuple(steps))
    return price_zeros(tables, result) + price_copy(tables, gradient, part)


def price_roll(tables: ByteTables, op: Op, nbytes: int) -> float:
    """A kernel for each dimension."""
    dims = dict(op.scalars).get("dims")
    count = math.prod(op.inputs[0].shape)
    once = tables.floor + count * by_clock(tables.figures, "kernels.roll_element")
    once = max(once, tables.by_bytes("elementwise_1", nbytes))
    return once * (len(dims) if isinstance(dims, tuple) else 1)
