"""Operators that work on each element alone, so that they pass through segments."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torchspmd.step.legality.shape_rules import fill_attributes
from torchspmd.step.legality.values import (
    ALL_REDUCE,
    CAST,
    EVERYWHERE,
    GATHER,
    Call,
    Flat,
    Pieces,
    Reader,
    Rule,
    Segment,
    Shape,
    Term,
    ValueTable,
    integers,
    kind_of,
    shape_of,
    split_arguments,
    tensor_of,
)


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


# ----------------------------------------------------------------------------
# Sums over ranks, in one form: what is summed first, and the sum over ranks outside.
#
# ``all_reduce(a) + all_reduce(b)`` is ``all_reduce(a + b)``; and an embedding's gradient of
# what all ranks gathered is the sum of the ranks' own. Both are equal as sums, like every
# collective here; a pass that uses them says that bits change.

_Attributes = tuple[object, ...]
_MOST_RUNS = 1024  # more ranks than that are not looked at one by one


def _sum_of_sums(reader: Reader, call: Call) -> int | None:
    """A sum of two reduced tensors, as the reduction of their sum."""
    attributes, children = split_arguments(reader, call.arguments)
    found = [_unreduced(reader.table, child) for child in children]
    known = [each for each in found if each is not None]
    if len(known) != 2 or len(found) != 2 or known[0][0] != known[1][0]:
        return None
    shapes = {reader.table[value][0] for _, value in known}
    if shapes != {shape_of(reader.fakes.get(call.node))}:
        return None
    operands = commuted(call, [value for _, value in known])
    atom = reader.table.term(call.head, attributes, operands)
    return _reduced(reader, call, atom, known[0][0])


def _of_gathered_rows(reader: Reader, call: Call) -> int | None:
    """The gradient of an embedding from the rows and indices of all ranks."""
    if call.arguments["scale_grad_by_freq"] is not False:
        return None
    attributes, children = split_arguments(reader, call.arguments)
    found = [_ungathered(reader.table, child) for child in children]
    known = [each for each in found if each is not None]
    if len(known) != 2 or len(found) != 2 or known[0][0] != known[1][0]:
        return None
    _, group = known[0][0]
    atom = reader.table.term(call.head, attributes, [value for _, value in known])
    return _reduced(reader, call, atom, ("sum", group))


def _reduced(
    reader: Reader, call: Call, atom: int, attributes: _Attributes
) -> int | None:
    table, shape = reader.table, shape_of(reader.fakes.get(call.node))
    if shape is None:
        return None

    def reduce(each: int) -> int:
        return table.term(ALL_REDUCE, attributes, (each,))

    return lifted(table, table.tensor(atom, shape), reduce)


def _unreduced(table: ValueTable, value: int) -> tuple[_Attributes, int] | None:
    """How a tensor was summed over ranks, and what it was before."""
    flat = table[value]
    if not isinstance(flat, Flat) or not flat.shape or not flat.segments:
        return None
    segments, how = [], set()
    for atom, offset, length in table.segments(value):
        term = table[atom]
        if not isinstance(term, Term) or term.head != ALL_REDUCE:
            return None
        how.add(term.attributes)
        segments.append(Segment(term.children[0], offset, length))
    attributes = how.pop()
    if how or attributes[0] != "sum":
        return None
    return attributes, table.flat(flat.shape, segments)


def _ungathered(table: ValueTable, value: int) -> tuple[_Attributes, int] | None:
    """Among how many ranks of which group a tensor was gathered, and one rank's own."""
    flat = table[value]
    if not isinstance(flat, Flat) or not flat.shape or not flat.segments:
        return None
    segments = [part for each in table.segments(value) for part in _runs(table, each)]
    first = table[segments[0].atom]
    if not isinstance(first, Term) or first.head != GATHER:
        return None
    num_ranks = first.attributes[0]
    length = table.num_elements(value) // num_ranks
    if flat.shape[0] % num_ranks:
        return None
    pieces = Pieces(segments)
    shares = {
        _share(table, pieces.cut(rank * length, length), rank, first.attributes)
        for rank in range(num_ranks)
    }
    own = shares.pop()
    if shares or own is None:
        return None
    shape = (flat.shape[0] // num_ranks, *flat.shape[1:])
    return first.attributes, table.flat(shape, own)


def _runs(table: ValueTable, segment: Segment) -> list[Segment]:
    """Runs of one value one by one, as the parts of all ranks in what was gathered."""
    runs = table.runs_of(segment.atom)
    if (
        runs is None
        or runs.num > _MOST_RUNS
        or segment.length != runs.length * runs.num
    ):
        return [segment]
    starts = [runs.offset + number * runs.stride for number in range(runs.num)]
    return [Segment(runs.base, start, runs.length) for start in starts]


def _share(
    table: ValueTable, given: list[Segment], rank: int, attributes: _Attributes
) -> tuple[Segment, ...] | None:
    """What a rank gave to a gathered tensor, in terms of its own values."""
    own = []
    for atom, offset, size in given:
        term = table[atom]
        is_gathered = isinstance(term, Term) and term.head == GATHER
        if not is_gathered or offset == EVERYWHERE or term[1] != attributes:
            return None
        child = term[2][0]  # type: ignore[misc]
        own.append(Segment(child, offset - rank * table.sizes[child], size))
    return tuple(own)


SUMS: dict[str, Rule] = {
    "aten::add": _sum_of_sums,
    "aten::embedding_dense_backward": _of_gathered_rows,
}
