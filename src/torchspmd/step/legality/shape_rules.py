"""Operators that cut tensors apart and put them together."""

from math import prod
from typing import Any

import torch

from torchspmd.step.legality.values import (
    EVERYWHERE,
    ROWS,
    Call,
    Flat,
    Impossible,
    Reader,
    Rule,
    Segment,
    Shape,
    ValueTable,
    concatenate,
    integers,
    kind_of,
    narrow,
    tensor_of,
)

# ----------------------------------------------------------------------------
# Operators that give the same elements in another shape.


def _same(reader: Reader, call: Call) -> int | None:
    """Hands its first argument on; clones and casts to the same dtype among them."""
    found = tensor_of(reader, call.first)
    return None if found is None else found[0]


def _reshape(reader: Reader, call: Call) -> int | None:
    found = tensor_of(reader, call.first)
    size = integers(call.arguments.get("size", call.arguments.get("shape")))
    if found is None or size is None:
        return None
    return reshaped(reader.table, found[0], size)


def reshaped(table: ValueTable, value: int, size: Shape) -> int:
    """A tensor in another shape, in which one size may be -1."""
    flat = table[value]
    assert isinstance(flat, Flat), flat
    total = prod(flat.shape)
    if -1 in size:
        known = -prod(size)
        size = tuple(total // known if n == -1 and known else n for n in size)
    if prod(size) != total:
        raise Impossible(f"a shape of {list(size)} for {total} elements")
    return table.flat(size, flat.segments)


def _flatten(reader: Reader, call: Call) -> int | None:
    found = tensor_of(reader, call.first)
    if found is None:
        return None
    value, (shape, _) = found
    if not shape:
        return reshaped(reader.table, value, (1,))
    first = call.arguments["start_dim"] % len(shape)
    last = call.arguments["end_dim"] % len(shape)
    size = (*shape[:first], prod(shape[first : last + 1]), *shape[last + 1 :])
    return reshaped(reader.table, value, size)


def _unflatten(reader: Reader, call: Call) -> int | None:
    found = tensor_of(reader, call.first)
    sizes = integers(call.arguments["sizes"])
    if found is None or sizes is None:
        return None
    value, (shape, _) = found
    dim = call.arguments["dim"] % len(shape)
    if -1 in sizes:
        known = -prod(sizes)
        sizes = tuple(shape[dim] // known if n == -1 else n for n in sizes)
    size = (*shape[:dim], *sizes, *shape[dim + 1 :])
    return reshaped(reader.table, value, size)


def _squeeze(reader: Reader, call: Call) -> int | None:
    found = tensor_of(reader, call.first)
    if found is None:
        return None
    value, (shape, _) = found
    dims = call.arguments.get("dim", tuple(range(len(shape))))
    chosen = {dim % len(shape) for dim in integers(dims) or ()} if shape else set()
    size = tuple(n for i, n in enumerate(shape) if n != 1 or i not in chosen)
    return reshaped(reader.table, value, size)


def _unsqueeze(reader: Reader, call: Call) -> int | None:
    found = tensor_of(reader, call.first)
    if found is None:
        return None
    value, (shape, _) = found
    dim = call.arguments["dim"] % (len(shape) + 1)
    return reshaped(reader.table, value, (*shape[:dim], 1, *shape[dim:]))


def _expand(reader: Reader, call: Call) -> int | None:
    found = tensor_of(reader, call.first)
    size = integers(call.arguments["size"])
    if found is None or size is None or len(size) != len(found[1].shape):
        return None
    pairs = zip(size, found[1].shape, strict=True)
    return found[0] if all(n in (-1, old) for n, old in pairs) else None


VIEWS: dict[str, Rule] = {
    "aten::view": _reshape,
    "aten::reshape": _reshape,
    "aten::_unsafe_view": _reshape,
    "aten::_reshape_alias": _reshape,
    "aten::flatten": _flatten,
    "aten::unflatten": _unflatten,
    "aten::squeeze": _squeeze,
    "aten::unsqueeze": _unsqueeze,
    "aten::expand": _expand,
    "aten::alias": _same,
    "aten::detach": _same,
    "aten::clone": _same,
    "aten::contiguous": _same,
    "aten::lift_fresh": _same,
    "aten::lift_fresh_copy": _same,
    "_c10d_functional::wait_tensor": _same,
    "c10d_functional::wait_tensor": _same,
}


_MOST_SEGMENTS = 4096  # of a concatenation along an inner dimension, at once
_MOST_ROWS = 1 << 18


def narrowed(
    table: ValueTable, value: int, dim: int, start: int, length: int
) -> int | None:
    """Some places of one dimension of a tensor."""
    flat = table[value]
    assert isinstance(flat, Flat), flat
    shape, segments = flat
    if start < 0 or start + length > shape[dim]:
        end = start + length
        raise Impossible(f"places {start} to {end} of dimension {dim} of {list(shape)}")
    if (start, length) == (0, shape[dim]):
        return value
    size = (*shape[:dim], length, *shape[dim + 1 :])
    num_rows = prod(shape[:dim])
    if len(segments) == 1 and segments[0].offset == EVERYWHERE:
        return table.flat(size, (segments[0]._replace(length=prod(size)),))
    if len(segments) == 1 and num_rows > 1 and table[segments[0].atom][0] != ROWS:
        inner = prod(shape[dim + 1 :])
        runs = (start * inner, length * inner, shape[dim] * inner, num_rows)
        return table.flat(size, (_runs(table, segments[0], *runs),))
    if num_rows > _MOST_ROWS:
        return None
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


def _slice(reader: Reader, call: Call) -> int | None:
    found = tensor_of(reader, call.first)
    names = ("dim", "start", "end", "step")
    dim, start, end, step = (call.arguments[name] for name in names)
    if found is None or integers([dim, start or 0, end or 0]) is None or step != 1:
        return None
    value, (shape, _) = found
    dim %= len(shape)
    places = range(shape[dim])[slice(start, end)]
    return narrowed(reader.table, value, dim, places.start, len(places))


def _narrow(reader: Reader, call: Call) -> int | None:
    found = tensor_of(reader, call.first)
    place = integers([call.arguments[name] for name in ("dim", "start", "length")])
    if found is None or place is None:
        return None
    dim, start, length = place
    dim %= len(found[1].shape)
    start += found[1].shape[dim] if start < 0 else 0
    return narrowed(reader.table, found[0], dim, start, length)


def _select(reader: Reader, call: Call) -> int | None:
    found = tensor_of(reader, call.first)
    place = integers([call.arguments[name] for name in ("dim", "index")])
    if found is None or place is None:
        return None
    return selected(reader.table, found[0], *place)


def selected(table: ValueTable, value: int, dim: int, index: int) -> int | None:
    """One place of a dimension of a tensor."""
    flat = table[value]
    assert isinstance(flat, Flat), flat
    dim %= len(flat.shape)
    one = narrowed(table, value, dim, index % flat.shape[dim], 1)
    size = (*flat.shape[:dim], *flat.shape[dim + 1 :])
    return None if one is None else reshaped(table, one, size)


def _unbind(reader: Reader, call: Call) -> int | None:
    found = tensor_of(reader, call.first)
    if found is None:
        return None
    dim = call.arguments["dim"] % len(found[1].shape)
    count = found[1].shape[dim]
    parts = [selected(reader.table, found[0], dim, i) for i in range(count)]
    return _tuple(reader.table, parts)


def _split(reader: Reader, call: Call) -> int | None:
    found = tensor_of(reader, call.first)
    asked: Any = call.arguments.get("split_size", call.arguments.get("split_sizes"))
    sizes = integers(asked)
    if found is None or sizes is None:
        return None
    value, (shape, _) = found
    dim = call.arguments["dim"] % len(shape)
    if not isinstance(asked, (list, tuple)):
        sizes = _even(shape[dim], asked)
    if sum(sizes) != shape[dim]:
        text = (
            f"pieces of {sum(sizes)} places in all of dimension {dim} of {list(shape)}"
        )
        raise Impossible(text)
    return _parts(reader.table, value, dim, sizes)


def _chunk(reader: Reader, call: Call) -> int | None:
    found = tensor_of(reader, call.first)
    chunks = call.arguments["chunks"]
    if found is None or integers(chunks) is None:
        return None
    value, (shape, _) = found
    dim = call.arguments["dim"] % len(shape)
    return _parts(reader.table, value, dim, _even(shape[dim], -(-shape[dim] // chunks)))


def _even(total: int, size: int) -> Shape:
    if size <= 0:
        return (total,)
    return tuple(min(size, total - start) for start in range(0, total, size)) or (0,)


def _parts(table: ValueTable, value: int, dim: int, sizes: Shape) -> int | None:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = [
        narrowed(table, value, dim, *place) for place in zip(starts, sizes, strict=True)
    ]
    return _tuple(table, parts)


def _tuple(table: ValueTable, parts: list[int | None]) -> int | None:
    known = [part for part in parts if part is not None]
    return table.list_of(known) if len(known) == len(parts) else None


def _cat(reader: Reader, call: Call) -> int | None:
    nodes = call.arguments["tensors"]
    found = [tensor_of(reader, node) for node in nodes]
    kinds = {kind_of(reader, node) for node in nodes}
    values = [each for each in found if each is not None]
    if len(values) != len(found) or len(kinds) != 1 or None in kinds:
        return None
    # An empty vector may be concatenated with anything.
    parts = [value for value, flat in values if flat.shape != (0,)]
    return joined(reader.table, parts, call.arguments["dim"]) if parts else values[0][0]


def joined(table: ValueTable, parts: list[int], dim: int) -> int:
    """Tensors one behind the other along a dimension."""
    shapes = [_shape(table, part) for part in parts]
    dim %= len(shapes[0])
    rests = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if len(rests) > 1:
        raise Impossible(f"tensors of shapes {[list(shape) for shape in shapes]}")
    num_rows = prod(shapes[0][:dim])
    length = sum(shape[dim] for shape in shapes)
    size = (*shapes[0][:dim], length, *shapes[0][dim + 1 :])
    if num_rows * len(parts) > _MOST_SEGMENTS and num_rows > 1:
        return table.tensor(table.rows(tuple(parts), num_rows), size)
    rows = [(table.pieces(part), prod(_shape(table, part)[dim:])) for part in parts]
    return table.flat(size, concatenate(rows, num_rows))


def _shape(table: ValueTable, value: int) -> Shape:
    flat = table[value]
    assert isinstance(flat, Flat), flat
    return flat.shape


def _stack(reader: Reader, call: Call) -> int | None:
    nodes = call.arguments["tensors"]
    found = [tensor_of(reader, node) for node in nodes]
    kinds = {kind_of(reader, node) for node in nodes}
    values = [each for each in found if each is not None]
    if not values or len(values) != len(found) or len(kinds) != 1 or None in kinds:
        return None
    dim = call.arguments["dim"] % (len(values[0][1].shape) + 1)
    longer = [
        reshaped(reader.table, value, (*flat.shape[:dim], 1, *flat.shape[dim:]))
        for value, flat in values
    ]
    return joined(reader.table, longer, dim)


def _pad(reader: Reader, call: Call) -> int | None:
    found, pad = tensor_of(reader, call.first), integers(call.arguments["pad"])
    kind, number = kind_of(reader, call.first), call.arguments["value"]
    if found is None or pad is None or kind is None or min(pad, default=0) < 0:
        return None
    value: int | None = found[0]
    for i in range(0, len(pad), 2):
        dim = len(found[1].shape) - 1 - i // 2
        value = _padded(reader.table, value, dim, pad[i : i + 2], (number, kind[0]))
    return value


def _padded(
    table: ValueTable, value: int | None, dim: int, pad: Shape, filling: Any
) -> int | None:
    if value is None or isinstance(filling[0], (complex, str)):
        return None
    shape = _shape(table, value)
    ends = [(*shape[:dim], length, *shape[dim + 1 :]) for length in pad]
    before, after = (table.filled(fill_attributes(*filling), end) for end in ends)
    return joined(table, [before, value, after], dim)


def fill_attributes(number: Any, dtype: torch.dtype) -> tuple[str, str]:
    """What a tensor filled with one number is told apart by.

    >>> fill_attributes(2**53 + 1, torch.int64), fill_attributes(2, torch.float32)
    (('9007199254740993', 'torch.int64'), ('2.0', 'torch.float32'))
    """
    if dtype.is_floating_point or dtype.is_complex:
        return repr(float(number)), str(dtype)
    # As a float a large integer would lose its last bits.
    is_whole = isinstance(number, int) or number.is_integer()
    return repr(int(number) if is_whole else number), str(dtype)


CUTS: dict[str, Rule] = {
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
