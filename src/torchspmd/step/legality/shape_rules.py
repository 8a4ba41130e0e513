"""Operators that reshape tensors, cut them apart and put them together."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from torchspmd.step.legality.values import (
    EVERYWHERE,
    ROWS,
    Impossible,
    OpCall,
    Reader,
    Rule,
    Segment,
    Shape,
    Tensor,
    Unknown,
    ValueTable,
    concatenate,
    integers,
    kind_of,
    known,
    narrow,
    tensor_of,
)

_Arguments = dict[str, Any]

# ----------------------------------------------------------------------------
# Operators that give the same elements in another shape.


def same(reader: Reader, call: OpCall) -> int:
    """Hands its first argument on; clones and casts to the same dtype among them."""
    return tensor_of(reader, call.first).value


def _view(size_of: Callable[[Shape, _Arguments], Shape]) -> Rule:
    """A view whose size follows from the shape of its operand and its arguments."""

    def rule(reader: Reader, call: OpCall) -> int:
        value, shape = tensor_of(reader, call.first)
        return reshaped(reader.table, value, size_of(shape, call.arguments))

    return rule


def reshaped(table: ValueTable, value: int, size: Shape) -> int:
    """A tensor in another shape, in which one size may be -1."""
    flat = table.elements(value)
    total = prod(flat.shape)
    if -1 in size:
        rest = -prod(size)
        size = tuple(total // rest if n == -1 and rest else n for n in size)
    if prod(size) != total:
        raise Impossible(f"a shape of {list(size)} for {total} elements")
    return table.flat(size, flat.segments)


def _reshape(shape: Shape, given: _Arguments) -> Shape:
    return integers(given.get("size", given.get("shape")))


def _flatten(shape: Shape, given: _Arguments) -> Shape:
    if not shape:
        return (1,)
    first, last = given["start_dim"] % len(shape), given["end_dim"] % len(shape)
    return (*shape[:first], prod(shape[first : last + 1]), *shape[last + 1 :])


def _unflatten(shape: Shape, given: _Arguments) -> Shape:
    sizes, dim = integers(given["sizes"]), given["dim"] % len(shape)
    if -1 in sizes:
        rest = -prod(sizes)
        sizes = tuple(shape[dim] // rest if n == -1 else n for n in sizes)
    return _with_dim(shape, dim, *sizes)


def _squeeze(shape: Shape, given: _Arguments) -> Shape:
    if not shape:
        return shape
    dims = given.get("dim", tuple(range(len(shape))))
    chosen = {dim % len(shape) for dim in integers(dims)}
    return tuple(n for i, n in enumerate(shape) if n != 1 or i not in chosen)


def _unsqueeze(shape: Shape, given: _Arguments) -> Shape:
    dim = given["dim"] % (len(shape) + 1)
    return (*shape[:dim], 1, *shape[dim:])


def _expand(shape: Shape, given: _Arguments) -> Shape:
    size = integers(given["size"])
    if len(size) != len(shape) or not all(map(_is_kept, size, shape)):
        raise Unknown
    return shape


def _is_kept(new: int, old: int) -> bool:
    return new in (-1, old)


def _with_dim(shape: Shape, dim: int, *sizes: int) -> Shape:
    """A shape with other sizes in the place of one dimension."""
    return (*shape[:dim], *sizes, *shape[dim + 1 :])


VIEWS: dict[str, Rule] = {
    "aten::view": _view(_reshape),
    "aten::reshape": _view(_reshape),
    "aten::_unsafe_view": _view(_reshape),
    "aten::_reshape_alias": _view(_reshape),
    "aten::flatten": _view(_flatten),
    "aten::unflatten": _view(_unflatten),
    "aten::squeeze": _view(_squeeze),
    "aten::unsqueeze": _view(_unsqueeze),
    "aten::expand": _view(_expand),
    "aten::alias": same,
    "aten::detach": same,
    "aten::clone": same,
    "aten::contiguous": same,
    "aten::lift_fresh": same,
    "aten::lift_fresh_copy": same,
    "_c10d_functional::wait_tensor": same,
    "c10d_functional::wait_tensor": same,
}

# ----------------------------------------------------------------------------
# Operators that take some places of a dimension.

_MOST_SEGMENTS = 4096  # of a concatenation along an inner dimension, at once
_MOST_ROWS = 1 << 18


def narrowed(table: ValueTable, value: int, dim: int, start: int, length: int) -> int:
    """Some places of one dimension of a tensor."""
    shape, segments = table.elements(value)
    if start < 0 or start + length > shape[dim]:
        end = start + length
        raise Impossible(f"places {start} to {end} of dimension {dim} of {list(shape)}")
    if (start, length) == (0, shape[dim]):
        return value
    size = _with_dim(shape, dim, length)
    num_rows = prod(shape[:dim])
    if len(segments) == 1 and segments[0].offset == EVERYWHERE:
        return table.flat(size, (segments[0]._replace(length=prod(size)),))
    if len(segments) == 1 and num_rows > 1 and table[segments[0].atom][0] != ROWS:
        inner = prod(shape[dim + 1 :])
        runs = (start * inner, length * inner, shape[dim] * inner, num_rows)
        return table.flat(size, (_runs(table, segments[0], *runs),))
    if num_rows > _MOST_ROWS:
        raise Unknown
    pieces = table.pieces(value)
    return table.flat(size, narrow(pieces, shape, dim, start, length))


def _runs(
    table: ValueTable, segment: Segment, offset: int, run: int, stride: int, count: int
) -> Segment:
    """Regular runs of one segment; runs of runs are runs of what these were taken of."""
    atom, begin = segment.atom, segment.offset
    inner = table.runs_of(atom)
    if inner and begin == 0 and (inner.length, inner.num) == (stride, count):
        atom, begin, _, stride, _ = inner
    made = table.strided(atom, begin + offset, run, stride, count)
    return Segment(made, 0, run * count)


def _slice(reader: Reader, call: OpCall) -> int:
    value, shape = tensor_of(reader, call.first)
    names = ("dim", "start", "end", "step")
    dim, start, end, step = (call.arguments[name] for name in names)
    integers([dim, start or 0, end or 0])
    if step != 1:
        raise Unknown
    dim %= len(shape)
    places = range(shape[dim])[slice(start, end)]
    return narrowed(reader.table, value, dim, places.start, len(places))


def _narrow(reader: Reader, call: OpCall) -> int:
    value, shape = tensor_of(reader, call.first)
    names = ("dim", "start", "length")
    dim, start, length = integers([call.arguments[name] for name in names])
    dim %= len(shape)
    start += shape[dim] if start < 0 else 0
    return narrowed(reader.table, value, dim, start, length)


def _select(reader: Reader, call: OpCall) -> int:
    value, _ = tensor_of(reader, call.first)
    dim, index = integers([call.arguments[name] for name in ("dim", "index")])
    return selected(reader.table, value, dim, index)


def selected(table: ValueTable, value: int, dim: int, index: int) -> int:
    """One place of a dimension of a tensor."""
    shape = table.elements(value).shape
    dim %= len(shape)
    one = narrowed(table, value, dim, index % shape[dim], 1)
    return reshaped(table, one, _with_dim(shape, dim))


def _unbind(reader: Reader, call: OpCall) -> int:
    value, shape = tensor_of(reader, call.first)
    dim = call.arguments["dim"] % len(shape)
    parts = [selected(reader.table, value, dim, i) for i in range(shape[dim])]
    return reader.table.list_of(parts)


def _split(reader: Reader, call: OpCall) -> int:
    value, shape = tensor_of(reader, call.first)
    asked: Any = call.arguments.get("split_size", call.arguments.get("split_sizes"))
    sizes, dim = integers(asked), call.arguments["dim"] % len(shape)
    if not isinstance(asked, (list, tuple)):
        sizes = _even(shape[dim], asked)
    if sum(sizes) != shape[dim]:
        raise Impossible(
            f"pieces of {sum(sizes)} places in all of dimension {dim} of {list(shape)}"
        )
    return _parts(reader.table, value, dim, sizes)


def _chunk(reader: Reader, call: OpCall) -> int:
    value, shape = tensor_of(reader, call.first)
    (chunks,), dim = integers(call.arguments["chunks"]), call.arguments["dim"]
    dim %= len(shape)
    return _parts(reader.table, value, dim, _even(shape[dim], -(-shape[dim] // chunks)))


def _even(total: int, size: int) -> Shape:
    if size <= 0:
        return (total,)
    return tuple(min(size, total - start) for start in range(0, total, size)) or (0,)


def _parts(table: ValueTable, value: int, dim: int, sizes: Shape) -> int:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    places = zip(starts, sizes, strict=True)
    return table.list_of([narrowed(table, value, dim, *place) for place in places])


# ----------------------------------------------------------------------------
# Operators that put tensors together.


def _cat(reader: Reader, call: OpCall) -> int:
    tensors = _tensors(reader, call.arguments["tensors"])
    # An empty vector may be concatenated with anything.
    parts = [value for value, shape in tensors if shape != (0,)]
    if not parts:
        return tensors[0].value
    return joined(reader.table, parts, call.arguments["dim"])


def _stack(reader: Reader, call: OpCall) -> int:
    tensors = _tensors(reader, call.arguments["tensors"])
    dim = call.arguments["dim"] % (len(tensors[0].shape) + 1)
    longer = [
        reshaped(reader.table, value, (*shape[:dim], 1, *shape[dim:]))
        for value, shape in tensors
    ]
    return joined(reader.table, longer, dim)


def _tensors(reader: Reader, nodes: Sequence[Any]) -> list[Tensor]:
    """Tensors of one dtype and device, which are not cast when they are joined."""
    tensors = [tensor_of(reader, node) for node in nodes]
    kinds = {kind_of(reader, node) for node in nodes}
    if len(kinds) != 1 or None in kinds:
        raise Unknown
    return tensors


def joined(table: ValueTable, parts: list[int], dim: int) -> int:
    """Tensors one behind the other along a dimension."""
    shapes = [table.elements(part).shape for part in parts]
    dim %= len(shapes[0])
    if len({_with_dim(shape, dim) for shape in shapes}) > 1:
        raise Impossible(f"tensors of shapes {[list(shape) for shape in shapes]}")
    num_rows = prod(shapes[0][:dim])
    size = _with_dim(shapes[0], dim, sum(shape[dim] for shape in shapes))
    if num_rows * len(parts) > _MOST_SEGMENTS and num_rows > 1:
        return table.tensor(table.rows(tuple(parts), num_rows), size)
    widths = [prod(shape[dim:]) for shape in shapes]
    rows = list(zip(map(table.pieces, parts), widths, strict=True))
    return table.flat(size, concatenate(rows, num_rows))


def _pad(reader: Reader, call: OpCall) -> int:
    value, shape = tensor_of(reader, call.first)
    pad, number = integers(call.arguments["pad"]), call.arguments["value"]
    dtype, _ = known(kind_of(reader, call.first))
    if min(pad, default=0) < 0 or not isinstance(number, (int, float)):
        raise Unknown
    filling = fill_attributes(number, dtype)
    for i in range(0, len(pad), 2):
        dim, shape = len(shape) - 1 - i // 2, reader.table.elements(value).shape
        ends = [_with_dim(shape, dim, length) for length in pad[i : i + 2]]
        before, after = (reader.table.filled(filling, end) for end in ends)
        value = joined(reader.table, [before, value, after], dim)
    return value


def fill_attributes(number: float, dtype: torch.dtype) -> tuple[str, str]:
    """What distinguishes tensors filled with one number.

    >>> fill_attributes(2**53 + 1, torch.int64), fill_attributes(2, torch.float32)
    (('9007199254740993', 'torch.int64'), ('2.0', 'torch.float32'))
    """
    if dtype.is_floating_point or dtype.is_complex:
        return repr(float(number)), str(dtype)
    # As a float a large integer would lose its last bits.
    is_whole = isinstance(number, int) or number.is_integer()
    return repr(int(number) if is_whole else number), str(dtype)


SHAPE_RULES: dict[str, Rule] = {
    **VIEWS,
    "aten::slice": _slice,
    "aten::narrow": _narrow,
    "aten::select": _select,
    "aten::unbind": _unbind,
    "aten::split": _split,
    "aten::split_with_sizes": _split,
    "aten::chunk": _chunk,
    "aten::cat": _cat,
    "aten::stack": _stack,
    "aten::constant_pad_nd": _pad,
}
