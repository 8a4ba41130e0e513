"""Collectives, as what they do to each element.

A reduction adds up each element alone, a gather puts whole blocks of ranks one behind the
other, a reduce-scatter gives each rank its block of the sums. So a collective of a bucket
is a bucket of collectives. Every rank runs the same graph: a piece that is at one
place here is taken to be there on every rank. Values are equal as sums; in which order
a backend adds is said by the passes (``Outcome.keeps_bits``).
"""

from collections.abc import Callable, Hashable
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from torch import fx

from torchspmd import _torch
from torchspmd.step.legality.operator_rules import commuted, elementwise, lifted
from torchspmd.step.legality.values import (
    ALL_REDUCE,
    BROADCAST,
    EVERYWHERE,
    GATHER,
    SCATTER,
    Flat,
    Impossible,
    OpCall,
    Pieces,
    Reader,
    Rule,
    Segment,
    Segments,
    Term,
    Unknown,
    ValueTable,
    known,
    shape_of,
    split_arguments,
    tensor_of,
)

_Arguments = dict[str, Any]
_Attributes = tuple[Hashable, ...]


def _all_reduce(table: ValueTable, value: int, given: _Arguments) -> int:
    attributes = (given["reduce_op"], _group(given))
    return _lifted(table, value, ALL_REDUCE, attributes)


def _broadcast(table: ValueTable, value: int, given: _Arguments) -> int:
    return _lifted(table, value, BROADCAST, (given["src"], _group(given)))


def _lifted(table: ValueTable, value: int, head: str, attributes: _Attributes) -> int:
    def apply(atom: int) -> int:
        return table.term(head, attributes, (table.uncast(atom),))

    return lifted(table, value, apply)


def _all_gather(table: ValueTable, value: int, given: _Arguments) -> int:
    shape, num_ranks = _divisible(table, value, given)
    attributes = (num_ranks, _group(given))
    shares = []
    for atom, offset, length in table.segments(value):
        size = table.sizes[atom]
        whole = table.term(GATHER, attributes, (table.uncast(atom),))
        table.sizes[whole] = size * num_ranks
        shares.append((whole, offset, length, size))
    segments = [
        Segment(whole, offset if offset == EVERYWHERE else rank * size + offset, length)
        for rank in range(num_ranks)
        for whole, offset, length, size in shares
    ]
    return table.flat((shape[0] * num_ranks, *shape[1:]), segments)


def _reduce_scatter(table: ValueTable, value: int, given: _Arguments) -> int:
    shape, num_ranks = _divisible(table, value, given)
    if shape[0] % num_ranks:
        raise Impossible(f"a share for {num_ranks} ranks of {list(shape)}")
    length, pieces = table.num_elements(value) // num_ranks, table.pieces(value)
    blocks = [pieces.cut(rank * length, length) for rank in range(num_ranks)]
    attributes = (given["reduce_op"], _group(given))
    columns = zip(*_cut_alike(blocks), strict=True)
    segments = [_share(table, each, attributes) for each in columns]
    return table.flat((shape[0] // num_ranks, *shape[1:]), segments)


def _divisible(
    table: ValueTable, value: int, given: _Arguments
) -> tuple[tuple[int, ...], int]:
    """The shape of a tensor with a first dimension, and the number of ranks."""
    shape, num_ranks = table.elements(value).shape, given["group_size"]
    if type(num_ranks) is not int or not shape:
        raise Unknown
    return shape, num_ranks


def _cut_alike(blocks: list[list[Segment]]) -> list[list[Segment]]:
    """All blocks cut wherever one of them is."""
    ends = {end for block in blocks for end in accumulate(s.length for s in block)}
    cuts = list(pairwise(sorted({0, *ends})))
    cutters = [Pieces(block) for block in blocks]
    return [
        [pieces.cut(start, end - start)[0] for start, end in cuts] for pieces in cutters
    ]


def _share(
    table: ValueTable, column: tuple[Segment, ...], attributes: _Attributes
) -> Segment:
    """What each rank gets: the sums of a segment of its own, here one for each rank.

    It is named by the values that the segments are taken of and by their distances, so
    that a part of it has the same name.
    """
    offsets = [each.offset for each in column]
    first = next((each for each in offsets if each != EVERYWHERE), EVERYWHERE)
    away = tuple(None if each == EVERYWHERE else each - first for each in offsets)
    atoms = [table.uncast(each.atom) for each in column]
    made = table.term(SCATTER, (*attributes, away), atoms)
    table.sizes[made] = max(table.sizes[atom] for atom in atoms)
    return Segment(made, first, column[0].length)


def _group(given: _Arguments) -> Hashable:
    group = given["group_name"]
    return group if isinstance(group, str) else repr(group)


_OfTensor = Callable[[ValueTable, int, _Arguments], int]


def _collective(of_tensor: _OfTensor, reader: Reader, call: OpCall) -> int:
    """A collective of one tensor, or of each tensor of a list."""
    rest = list(call.arguments.values())[1:]
    if any(isinstance(each, fx.Node) for each in rest):
        raise Unknown  # until the graph runs
    if isinstance(call.first, (list, tuple)):
        values = [tensor_of(reader, each).value for each in call.first]
    else:
        values = [tensor_of(reader, call.first).value]
    if not _is_alone(call.arguments):
        values = [of_tensor(reader.table, value, call.arguments) for value in values]
    is_list = isinstance(call.first, (list, tuple))
    return reader.table.list_of(values) if is_list else values[0]


def _is_alone(given: _Arguments) -> bool:
    """Whether a collective has one rank only, and so changes nothing."""
    if "group_size" in given:
        return bool(given["group_size"] == 1)
    try:
        group = _torch.resolve_group(given["group_name"])
    except (RuntimeError, ValueError):  # a graph read where its groups are not
        return False
    return group is not None and group.size() == 1


# ----------------------------------------------------------------------------
# Sums over ranks, in one form: what is summed first, and the sum over ranks outside.
#
# ``all_reduce(a) + all_reduce(b)`` is ``all_reduce(a + b)``; and an embedding's gradient of
# what all ranks gathered is the sum of the ranks' own. Both are equal as sums, like every
# collective here; a pass that uses them says that bits change.


def _add(reader: Reader, call: OpCall) -> int:
    """A sum; that of two reduced tensors is the reduction of their sum."""
    attributes, children = split_arguments(reader, call.arguments)
    found = _alike(reader.table, children, _unreduced)
    if found is None:
        return elementwise(reader, call)
    how, values = found
    shapes = {reader.table.elements(value).shape for value in values}
    if shapes != {shape_of(reader.fakes.get(call.node))}:
        return elementwise(reader, call)
    atom = reader.table.term(call.head, attributes, commuted(call, values))
    return _reduced(reader, call, atom, how)


def _embedding_gradient(reader: Reader, call: OpCall) -> int:
    """The gradient of an embedding from the rows and indices of all ranks."""
    attributes, children = split_arguments(reader, call.arguments)
    found = _alike(reader.table, children, _ungathered)
    if call.arguments["scale_grad_by_freq"] is not False or found is None:
        raise Unknown
    (_, group), values = found
    atom = reader.table.term(call.head, attributes, values)
    return _reduced(reader, call, atom, ("sum", group))


def _reduced(reader: Reader, call: OpCall, atom: int, attributes: _Attributes) -> int:
    shape = known(shape_of(reader.fakes.get(call.node)))
    value = reader.table.tensor(atom, shape)
    return _lifted(reader.table, value, ALL_REDUCE, attributes)


_Origin = tuple[_Attributes, int]  # how ranks made a tensor, and one rank's own value


def _alike(
    table: ValueTable,
    values: list[int],
    origin_of: Callable[[ValueTable, int], _Origin | None],
) -> tuple[_Attributes, list[int]] | None:
    """One rank's own values of two tensors that ranks made in the same way."""
    origins = [origin_of(table, value) for value in values]
    found = [each for each in origins if each is not None]
    if len(origins) != 2 or len(found) != 2 or found[0][0] != found[1][0]:
        return None
    return found[0][0], [own for _, own in found]


def _unreduced(table: ValueTable, value: int) -> _Origin | None:
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


def _ungathered(table: ValueTable, value: int) -> _Origin | None:
    """Among how many ranks of which group a tensor was gathered, and one rank's own."""
    flat = table[value]
    if not isinstance(flat, Flat) or not flat.shape or not flat.segments:
        return None
    segments = [
        part for each in table.segments(value) for part in table.run_by_run(each)
    ]
    first = table[segments[0].atom]
    if not isinstance(first, Term) or first.head != GATHER:
        return None
    num_ranks = first.attributes[0]
    length = table.num_elements(value) // num_ranks
    if flat.shape[0] % num_ranks:
        return None
    pieces = Pieces(segments)
    shares = {
        _own(table, pieces.cut(rank * length, length), rank, first.attributes)
        for rank in range(num_ranks)
    }
    own = shares.pop()
    if shares or own is None:
        return None
    shape = (flat.shape[0] // num_ranks, *flat.shape[1:])
    return first.attributes, table.flat(shape, own)


def _own(
    table: ValueTable, given: list[Segment], rank: int, attributes: _Attributes
) -> Segments | None:
    """What a rank gave to a gathered tensor, in terms of its own values."""
    own = []
    for atom, offset, size in given:
        term = table[atom]
        if not isinstance(term, Term) or term.head != GATHER:
            return None
        if offset == EVERYWHERE or term.attributes != attributes:
            return None
        (child,) = term.children
        own.append(Segment(child, offset - rank * table.sizes[child], size))
    return tuple(own)


_OF_TENSOR: dict[str, _OfTensor] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
}
COLLECTIVE_RULES: dict[str, Rule] = {
    "aten::add": _add,
    "aten::embedding_dense_backward": _embedding_gradient,
    **{
        f"_c10d_functional::{name}{suffix}": partial(_collective, of_tensor)
        for name, of_tensor in _OF_TENSOR.items()
        for suffix in ("", "_coalesced")
    },
}
