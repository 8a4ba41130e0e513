"""Operators on lists of tensors: item i depends on item i of each list alone."""

from typing import Any

from torch import fx

from torchspmd.step.legality.memory_rules import layouts_walked
from torchspmd.step.legality.shape_rules import selected
from torchspmd.step.legality.values import (
    TUPLE,
    Call,
    Impossible,
    Reader,
    Shape,
    Term,
    kind_of,
    split_arguments,
    tensor_of,
)

_TO_NUMBERS = ("aten::_foreach_norm", "aten::_foreach_max", "aten::_foreach_powsum")


def on_lists(reader: Reader, call: Call) -> int | None:
    """The value of a ``_foreach_*`` or ``_fused_*`` operator; None for any other."""
    if call.name.startswith("aten::_foreach_"):
        return _foreach(reader, call)
    if call.name.startswith("aten::_fused_") and isinstance(call.first, (list, tuple)):
        return _fused(reader, call)
    return None


def getitem(reader: Reader, call: Call) -> int | None:
    """One value out of a list of values."""
    source, index = (call.arguments[name] for name in ("0", "1"))
    term = reader.table[reader.value(source)]
    if not isinstance(term, Term) or term.head != TUPLE or type(index) is not int:
        return None
    if not -len(term.children) <= index < len(term.children):
        raise Impossible(f"item {index} of {len(term.children)}")
    return term.children[index]


def _items(call: Call) -> list[dict[str, Any]] | None:
    """The arguments of each item: from every list its item, all else as it is."""
    lists = {
        name: each
        for name, each in call.arguments.items()
        if isinstance(each, (list, tuple))
    }
    lengths = {len(each) for each in lists.values() if each}
    if len(lengths) > 1:
        raise Impossible(f"lists of lengths {sorted(lengths)}")
    if not lengths:
        return None
    return [
        {
            **call.arguments,
            **{name: each[i] if each else None for name, each in lists.items()},
        }
        for i in range(lengths.pop())
    ]


def _foreach(reader: Reader, call: Call) -> int | None:
    items = _items(call)
    if items is None:
        return None
    _check_packed(reader, call, len(items))
    values = [_foreach_item(reader, call, item, i) for i, item in enumerate(items)]
    known = [value for value in values if value is not None]
    return reader.table.list_of(known) if len(known) == len(values) else None


def _check_packed(reader: Reader, call: Call, count: int) -> None:
    found = tensor_of(reader, call.arguments.get("scalars"))
    if found is not None and found[1].shape != (count,):
        shape = list(found[1].shape)
        raise Impossible(f"numbers of shape {shape} for {count} items")


def _foreach_item(
    reader: Reader, call: Call, item: dict[str, Any], place: int
) -> int | None:
    if call.name == "aten::_foreach_copy" and _is_plain_copy(reader, item):
        return reader.value(item["src"])
    shape = () if call.name in _TO_NUMBERS else _shape(reader, item)
    if shape is None:
        return None
    packed = call.arguments.get("scalars")
    if not isinstance(packed, fx.Node):
        atom = reader.table.term(call.head, *split_arguments(reader, item))
        return reader.table.tensor(atom, shape)
    # The numbers of all items lie in one tensor: this item takes the one at its place.
    found = tensor_of(reader, packed)
    number = None if found is None else selected(reader.table, found[0], 0, place)
    if number is None:
        return None
    attributes, children = split_arguments(reader, {**item, "scalars": None})
    atom = reader.table.term(call.head, attributes, (*children, number))
    return reader.table.tensor(atom, shape)


def _is_plain_copy(reader: Reader, item: dict[str, Any]) -> bool:
    to, source = (tensor_of(reader, item[name]) for name in ("self", "src"))
    if to is None or source is None or kind_of(reader, item["self"]) is None:
        return False
    same_kind = kind_of(reader, item["self"]) == kind_of(reader, item["src"])
    return same_kind and to[1].shape == source[1].shape


def _shape(reader: Reader, item: dict[str, Any]) -> Shape | None:
    tensors = (tensor_of(reader, each) for each in item.values())
    return next((found[1].shape for found in tensors if found is not None), None)


def _fused(reader: Reader, call: Call) -> int | None:
    """One list of new values for each list of old ones, as the operators return them."""
    items = _items(call)
    if items is None:
        return None
    names = [n for n, each in call.arguments.items() if isinstance(each, (list, tuple))]
    stripped = []
    for item in items:
        attributes, children = split_arguments(reader, item)
        children += layouts_walked(reader, [item[name] for name in names])
        stripped.append((attributes, children))
    outputs = []
    for number, name in enumerate(names):
        values = []
        for item, (attributes, children) in zip(items, stripped, strict=True):
            found = tensor_of(reader, item[name])
            if found is None:
                continue  # an empty list: this optimizer does not keep such a state
            value, flat = found
            if name != "grads" or item.get("grad_scale") is not None:
                atom = reader.table.term(call.head, (number, attributes), children)
                value = reader.table.tensor(atom, flat.shape)
            values.append(value)
        outputs.append(reader.table.list_of(values))
    return reader.table.list_of(outputs)
