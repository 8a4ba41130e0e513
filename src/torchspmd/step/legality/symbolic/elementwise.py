"""Operators that work on each element alone, so that they pass through segments."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torchspmd.step.legality.symbolic.call import (
    Call,
    Reader,
    Rule,
    integers,
    kind_of,
    split_arguments,
    tensor_of,
)
from torchspmd.step.legality.symbolic.cuts import fill_attributes
from torchspmd.step.legality.symbolic.segments import Segment, Shape
from torchspmd.step.legality.symbolic.table import CAST, Flat, Term, ValueTable


def lifted(table: ValueTable, value: int, apply: Callable[[int], int]) -> int:
    """A tensor with a function of single elements applied to each of its segments."""
    flat = table[value]
    assert isinstance(flat, Flat), flat
    segments = [
        Segment(lift(table, atom, apply), offset, length)
        for atom, offset, length in table.segments(value)
    ]
    return table.flat(flat.shape, segments)


def lift(table: ValueTable, atom: int, apply: Callable[[int], int]) -> int:
    """The function applied to every element of one value."""
    runs = table.runs_of(atom)
    if runs is not None:
        return table.strided(lift(table, runs.base, apply), *runs[1:])
    made = apply(atom)
    table.sizes[made] = table.sizes[atom]
    return made


def elementwise(reader: Reader, call: Call) -> int | None:
    """An elementwise operator on one tensor; other operands are numbers of any kind."""
    if call.signature is None or not call.signature.is_elementwise:
        return None
    if call.signature.draws:
        return None
    attributes, children = split_arguments(reader, call.arguments)
    shaped = [i for i, child in enumerate(children) if _has_dims(reader.table, child)]
    if len(shaped) != 1:
        return None
    place = shaped[0]

    def apply(atom: int) -> int:
        operands = (*children[:place], atom, *children[place + 1 :])
        return reader.table.term(call.head, attributes, operands)

    return lifted(reader.table, children[place], apply)


def _has_dims(table: ValueTable, value: int) -> bool:
    flat = table[value]
    return isinstance(flat, Flat) and bool(flat.shape)


def _cast(reader: Reader, call: Call) -> int | None:
    found, kind = tensor_of(reader, call.first), kind_of(reader, call.first)
    if found is None or kind is None:
        return None
    like = call.arguments.get("other")
    other = kind_of(reader, like)
    if isinstance(like, fx.Node) and other is None:
        return None
    dtype = other[0] if other else call.arguments.get("dtype") or kind[0]
    device = other[1] if other else call.arguments.get("device") or kind[1]
    if not isinstance(dtype, torch.dtype) or isinstance(device, fx.Node):
        return None
    wanted = (dtype, torch.device(device))
    return _as_kind(reader.table, found[0], kind, wanted)


def _as_kind(table: ValueTable, value: int, kind: Any, wanted: Any) -> int:
    if kind == wanted:
        return value
    attributes = tuple(map(str, wanted))
    return lifted(table, value, lambda atom: table.cast(atom, attributes))


def _copy(reader: Reader, call: Call) -> int | None:
    """The source in the dtype of what it is copied to."""
    source = call.arguments.get("src")
    to, found = tensor_of(reader, call.first), tensor_of(reader, source)
    kinds = kind_of(reader, call.first), kind_of(reader, source)
    if to is None or found is None or None in kinds:
        return None
    if to[1].shape != found[1].shape:
        return None
    return _as_kind(reader.table, found[0], kinds[1], kinds[0])


def _fill(number: float | None) -> Rule:
    """A tensor with one number everywhere; None for a number that is an argument."""

    def rule(reader: Reader, call: Call) -> int | None:
        arguments = call.arguments
        value = arguments.get("fill_value", arguments.get("value"))
        filling = number if number is not None else value
        shape = _size(reader, call)
        dtype = _filled_dtype(reader, call)
        if shape is None or dtype is None or not isinstance(filling, (int, float)):
            return None
        return reader.table.filled(fill_attributes(filling, dtype), shape)

    return rule


def _filled_dtype(reader: Reader, call: Call) -> torch.dtype | None:
    asked = call.arguments.get("dtype")
    if isinstance(asked, torch.dtype):
        return asked
    kind = kind_of(reader, call.node) or kind_of(reader, call.first)
    return None if kind is None else kind[0]


def _size(reader: Reader, call: Call) -> Shape | None:
    if "size" in call.arguments:
        return integers(call.arguments["size"])
    like = tensor_of(reader, call.first)
    return None if like is None else like[1].shape


def _permute(reader: Reader, call: Call) -> int | None:
    found = tensor_of(reader, call.first)
    if found is None:
        return None
    value, (shape, _) = found
    if not shape:
        return value
    places = list(range(len(shape)))
    if call.name == "aten::permute":
        dims = integers(call.arguments["dims"])
        places = [dim % len(shape) for dim in dims or ()]
    elif call.name == "aten::transpose":
        one, two = (call.arguments[name] for name in ("dim0", "dim1"))
        places[one], places[two] = places[two], places[one]
    else:
        places.reverse()
    if sorted(places) != list(range(len(shape))):
        return None
    return permuted(reader.table, value, tuple(places))


def permuted(table: ValueTable, value: int, places: Shape) -> int:
    """A tensor with its dimensions in another order."""
    flat = table[value]
    assert isinstance(flat, Flat), flat
    value, places = _undo(table, value, flat, places)
    base = table[value]
    assert isinstance(base, Flat), base
    shape = tuple(base.shape[place] for place in places)
    moving = [place for place in places if base.shape[place] != 1]
    if moving == sorted(moving):
        return table.flat(shape, base.segments)
    return table.tensor(table.term("permute", places, (value,)), shape)


def _undo(
    table: ValueTable, value: int, flat: Flat, places: Shape
) -> tuple[int, Shape]:
    """Of a tensor that was permuted already: its origin, and both orders as one."""
    term: Any = table[flat.segments[0].atom] if len(flat.segments) == 1 else None
    if not isinstance(term, Term) or term.head != "permute":
        return value, places
    origin: Any = table[term.children[0]]
    earlier: Any = term.attributes
    if tuple(origin.shape[place] for place in earlier) != flat.shape:
        return value, places
    return term.children[0], tuple(earlier[place] for place in places)


def commuted(call: Call, children: list[int]) -> list[int]:
    """The operands of a sum or product in one order, since it does not matter."""
    is_sum = call.name == "aten::add" and call.arguments.get("alpha") == 1
    if (is_sum or call.name == "aten::mul") and len(children) == 2:
        return sorted(children)
    return children


ELEMENTWISE: dict[str, Rule] = {
    CAST: _cast,
    "aten::to": _cast,
    "aten::copy": _copy,
    "aten::full": _fill(None),
    "aten::full_like": _fill(None),
    "aten::new_full": _fill(None),
    "aten::fill": _fill(None),
    "aten::zeros": _fill(0),
    "aten::zeros_like": _fill(0),
    "aten::new_zeros": _fill(0),
    "aten::zero": _fill(0),
    "aten::ones": _fill(1),
    "aten::ones_like": _fill(1),
    "aten::new_ones": _fill(1),
    "aten::t": _permute,
    "aten::transpose": _permute,
    "aten::permute": _permute,
}
