"""Operators that work on each element alone, and on each item of lists of tensors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from torchspmd.step.legality.memory_rules import layouts_walked
from torchspmd.step.legality.shape_rules import fill_attributes, selected
from torchspmd.step.legality.values import (
    CAST,
    TUPLE,
    Flat,
    Impossible,
    OpCall,
    Reader,
    Rule,
    Segment,
    Shape,
    Term,
    Unknown,
    ValueTable,
    find_tensor,
    integers,
    kind_of,
    known,
    split_arguments,
    tensor_of,
)

_Kind = tuple[torch.dtype, torch.device]


def lifted(table: ValueTable, value: int, apply: Callable[[int], int]) -> int:
    """A tensor with a function of single elements applied to each of its segments."""
    segments = [
        Segment(_lift(table, atom, apply), offset, length)
        for atom, offset, length in table.segments(value)
    ]
    return table.flat(table.elements(value).shape, segments)


def _lift(table: ValueTable, atom: int, apply: Callable[[int], int]) -> int:
    """The function applied to every element of one value."""
    runs = table.runs_of(atom)
    if runs is not None:
        return table.strided(_lift(table, runs.base, apply), *runs[1:])
    made = apply(atom)
    table.sizes[made] = table.sizes[atom]
    return made


def elementwise(reader: Reader, call: OpCall) -> int:
    """An elementwise operator on one tensor; other operands are numbers of any kind."""
    signature = call.signature
    if signature is None or not signature.is_elementwise or signature.is_random:
        raise Unknown
    attributes, children = split_arguments(reader, call.arguments)
    shaped = [i for i, child in enumerate(children) if _has_dims(reader.table, child)]
    if len(shaped) != 1:
        raise Unknown
    place = shaped[0]

    def apply(atom: int) -> int:
        operands = (*children[:place], atom, *children[place + 1 :])
        return reader.table.term(call.head, attributes, operands)

    return lifted(reader.table, children[place], apply)


def _has_dims(table: ValueTable, value: int) -> bool:
    flat = table[value]
    return isinstance(flat, Flat) and bool(flat.shape)


def commuted(call: OpCall, children: list[int]) -> list[int]:
    """The operands of a sum or product in one order, since it does not matter."""
    is_sum = call.name == "aten::add" and call.arguments.get("alpha") == 1
    if (is_sum or call.name == "aten::mul") and len(children) == 2:
        return sorted(children)
    return children


# ----------------------------------------------------------------------------
# Casts, fills and permutations.


def _cast(reader: Reader, call: OpCall) -> int:
    value, _ = tensor_of(reader, call.first)
    kind, like = known(kind_of(reader, call.first)), call.arguments.get("other")
    if isinstance(like, fx.Node):
        wanted = known(kind_of(reader, like))
    else:
        dtype = call.arguments.get("dtype") or kind[0]
        device = call.arguments.get("device") or kind[1]
        if not isinstance(dtype, torch.dtype) or isinstance(device, fx.Node):
            raise Unknown
        wanted = dtype, torch.device(device)
    return _as_kind(reader.table, value, kind, wanted)


def _as_kind(table: ValueTable, value: int, kind: _Kind, wanted: _Kind) -> int:
    if kind == wanted:
        return value
    attributes = tuple(map(str, wanted))
    return lifted(table, value, lambda atom: table.cast(atom, attributes))


def _copy(reader: Reader, call: OpCall) -> int:
    """The source in the dtype of what it is copied to."""
    nodes = call.first, call.arguments.get("src")
    to, source = (tensor_of(reader, node) for node in nodes)
    wanted, kind = (known(kind_of(reader, node)) for node in nodes)
    if to.shape != source.shape:
        raise Unknown
    return _as_kind(reader.table, source.value, kind, wanted)


def _fill(number: float | None, reader: Reader, call: OpCall) -> int:
    """A tensor with one number everywhere; None for a number that is an argument."""
    given = call.arguments
    filling = given.get("fill_value", given.get("value")) if number is None else number
    if not isinstance(filling, (int, float)):
        raise Unknown
    size = given.get("size")
    shape = tensor_of(reader, call.first).shape if size is None else integers(size)
    dtype = given.get("dtype")
    if not isinstance(dtype, torch.dtype):
        dtype, _ = known(kind_of(reader, call.node) or kind_of(reader, call.first))
    return reader.table.filled(fill_attributes(filling, dtype), shape)


def _permute(reader: Reader, call: OpCall) -> int:
    value, shape = tensor_of(reader, call.first)
    places = list(range(len(shape)))
    if call.name == "aten::permute":
        places = [dim % len(shape) for dim in integers(call.arguments["dims"])]
    elif shape and call.name == "aten::transpose":
        one, two = (call.arguments[name] for name in ("dim0", "dim1"))
        places[one], places[two] = places[two], places[one]
    else:
        places.reverse()
    if sorted(places) != list(range(len(shape))):
        raise Unknown
    return _permuted(reader.table, value, tuple(places))


def _permuted(table: ValueTable, value: int, places: Shape) -> int:
    """A tensor with its dimensions in another order."""
    value, places = _origin(table, value, places)
    base = table.elements(value)
    shape = tuple(base.shape[place] for place in places)
    moving = [place for place in places if base.shape[place] != 1]
    if moving == sorted(moving):
        return table.flat(shape, base.segments)
    return table.tensor(table.term("permute", places, (value,)), shape)


def _origin(table: ValueTable, value: int, places: Shape) -> tuple[int, Shape]:
    """What a tensor was permuted from, and both permutations as one."""
    flat = table.elements(value)
    term: Any = table[flat.segments[0].atom] if len(flat.segments) == 1 else None
    if not isinstance(term, Term) or term.head != "permute":
        return value, places
    origin, earlier = table.elements(term.children[0]), term.attributes
    if tuple(origin.shape[place] for place in earlier) != flat.shape:
        return value, places
    return term.children[0], tuple(earlier[place] for place in places)


# ----------------------------------------------------------------------------
# Operators on lists of tensors: item i depends on item i of each list alone.

_TO_NUMBERS = ("aten::_foreach_norm", "aten::_foreach_max", "aten::_foreach_powsum")


def getitem(reader: Reader, call: OpCall) -> int:
    """One value out of a list of values."""
    source, index = (call.arguments[name] for name in ("0", "1"))
    term = reader.table[reader.value(source)]
    if not isinstance(term, Term) or term.head != TUPLE or type(index) is not int:
        raise Unknown
    if not -len(term.children) <= index < len(term.children):
        raise Impossible(f"item {index} of {len(term.children)}")
    return term.children[index]


def _items(call: OpCall) -> tuple[list[str], list[dict[str, Any]]]:
    """The arguments that are lists, and for each item all arguments with its own."""
    given = call.arguments
    lists = [name for name, each in given.items() if isinstance(each, (list, tuple))]
    lengths = {len(given[name]) for name in lists if given[name]}
    if len(lengths) > 1:
        raise Impossible(f"lists of lengths {sorted(lengths)}")
    if not lengths:
        raise Unknown
    return lists, [
        {**given, **{name: given[name][i] if given[name] else None for name in lists}}
        for i in range(lengths.pop())
    ]


def foreach(reader: Reader, call: OpCall) -> int:
    """The value of a ``_foreach_*`` operator."""
    _, items = _items(call)
    packed = find_tensor(reader, call.arguments.get("scalars"))
    if packed is not None and packed.shape != (len(items),):
        raise Impossible(
            f"numbers of shape {list(packed.shape)} for {len(items)} items"
        )
    values = [_foreach_item(reader, call, item, i) for i, item in enumerate(items)]
    return reader.table.list_of(values)


def _foreach_item(
    reader: Reader, call: OpCall, item: dict[str, Any], place: int
) -> int:
    if call.name == "aten::_foreach_copy" and _is_plain_copy(reader, item):
        return reader.value(item["src"])
    tensors = (find_tensor(reader, each) for each in item.values())
    shapes = (found.shape for found in tensors if found is not None)
    shape = () if call.name in _TO_NUMBERS else known(next(shapes, None))
    packed, numbers = call.arguments.get("scalars"), []
    if isinstance(packed, fx.Node):
        # The numbers of all items lie in one tensor: this item takes the one at its place.
        numbers = [selected(reader.table, tensor_of(reader, packed).value, 0, place)]
        item = {**item, "scalars": None}
    attributes, children = split_arguments(reader, item)
    atom = reader.table.term(call.head, attributes, (*children, *numbers))
    return reader.table.tensor(atom, shape)


def _is_plain_copy(reader: Reader, item: dict[str, Any]) -> bool:
    to, source = (find_tensor(reader, item[name]) for name in ("self", "src"))
    kinds = {kind_of(reader, item[name]) for name in ("self", "src")}
    if to is None or source is None or len(kinds) > 1 or None in kinds:
        return False
    return to.shape == source.shape


def fused(reader: Reader, call: OpCall) -> int:
    """A ``_fused_*`` optimizer: one list of new values for each list of old ones."""
    if not isinstance(call.first, (list, tuple)):
        return elementwise(reader, call)
    names, items = _items(call)
    outputs: dict[str, list[int]] = {name: [] for name in names}
    for item in items:
        attributes, children = split_arguments(reader, item)
        children += layouts_walked(reader, [item[name] for name in names])
        for number, name in enumerate(names):
            found = find_tensor(reader, item[name])
            if found is None:
                continue  # an empty list: this optimizer does not keep such a state
            value, shape = found
            if name != "grads" or item.get("grad_scale") is not None:
                atom = reader.table.term(call.head, (number, attributes), children)
                value = reader.table.tensor(atom, shape)
            outputs[name].append(value)
    return reader.table.list_of(map(reader.table.list_of, outputs.values()))


MATH_RULES: dict[str, Rule] = {
    CAST: _cast,
    "aten::to": _cast,
    "aten::copy": _copy,
    "aten::full": partial(_fill, None),
    "aten::full_like": partial(_fill, None),
    "aten::new_full": partial(_fill, None),
    "aten::fill": partial(_fill, None),
    "aten::zeros": partial(_fill, 0),
    "aten::zeros_like": partial(_fill, 0),
    "aten::new_zeros": partial(_fill, 0),
    "aten::zero": partial(_fill, 0),
    "aten::ones": partial(_fill, 1),
    "aten::ones_like": partial(_fill, 1),
    "aten::new_ones": partial(_fill, 1),
    "aten::t": _permute,
    "aten::transpose": _permute,
    "aten::permute": _permute,
    "call_function _operator.getitem": getitem,
}
