"""Operators that give the same elements in another shape."""

from math import prod

from torchspmd.step.legality.symbolic.call import (
    Call,
    Impossible,
    Reader,
    Rule,
    integers,
    tensor_of,
)
from torchspmd.step.legality.symbolic.segments import Shape
from torchspmd.step.legality.symbolic.table import Flat, ValueTable


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
