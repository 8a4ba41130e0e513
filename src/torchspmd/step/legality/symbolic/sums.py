"""Sums over ranks, in one form: what is summed first, and the sum over ranks outside.

``all_reduce(a) + all_reduce(b)`` is ``all_reduce(a + b)``; and an embedding's gradient of
what all ranks gathered is the sum of the ranks' own. Both are equal as sums, like every
collective here; a pass that uses them says that bits change.
"""

from torchspmd.step.legality.symbolic.call import (
    Call,
    Reader,
    Rule,
    shape_of,
    split_arguments,
)
from torchspmd.step.legality.symbolic.elementwise import commuted, lifted
from torchspmd.step.legality.symbolic.segments import EVERYWHERE, Pieces, Segment
from torchspmd.step.legality.symbolic.table import (
    ALL_REDUCE,
    GATHER,
    Flat,
    Term,
    ValueTable,
)

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
