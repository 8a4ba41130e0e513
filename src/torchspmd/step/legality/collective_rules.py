"""Collectives, as what they do to each element.

A reduction adds up each element alone, a gather puts whole blocks of ranks one behind the
other, a reduce-scatter gives each rank its block of the sums. So a collective of a bucket
is a bucket of collectives. Every rank runs the same graph: a piece that stands at one
place here is taken to stand there on every rank. Values are equal as sums; in which order
a backend adds is said by the passes (``Outcome.keeps_bits``).
"""

from collections.abc import Callable, Hashable
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from torch import fx

from torchspmd import _torch
from torchspmd.step.legality.math_rules import lifted
from torchspmd.step.legality.values import (
    ALL_REDUCE,
    BROADCAST,
    EVERYWHERE,
    GATHER,
    SCATTER,
    Call,
    Flat,
    Impossible,
    Pieces,
    Reader,
    Rule,
    Segment,
    ValueTable,
    tensor_of,
)

_One = Callable[[ValueTable, int, dict[str, Any]], int | None]


def _all_reduce(table: ValueTable, value: int, given: dict[str, Any]) -> int:
    attributes = (given["reduce_op"], _group(given))
    return _lifted(table, value, ALL_REDUCE, attributes)


def _broadcast(table: ValueTable, value: int, given: dict[str, Any]) -> int:
    attributes = (given["src"], _group(given))
    return _lifted(table, value, BROADCAST, attributes)


def _lifted(table: ValueTable, value: int, head: str, attributes: Hashable) -> int:
    def apply(atom: int) -> int:
        return table.term(head, attributes, (table.uncast(atom),))

    return lifted(table, value, apply)


def _all_gather(table: ValueTable, value: int, given: dict[str, Any]) -> int | None:
    flat, num_ranks = table[value], given["group_size"]
    assert isinstance(flat, Flat), flat
    if type(num_ranks) is not int or not flat.shape:
        return None
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
    return table.flat((flat.shape[0] * num_ranks, *flat.shape[1:]), segments)


def _reduce_scatter(table: ValueTable, value: int, given: dict[str, Any]) -> int | None:
    flat, num_ranks = table[value], given["group_size"]
    assert isinstance(flat, Flat), flat
    if type(num_ranks) is not int or not flat.shape:
        return None
    if flat.shape[0] % num_ranks:
        raise Impossible(f"a share for {num_ranks} ranks of {list(flat.shape)}")
    shape = (flat.shape[0] // num_ranks, *flat.shape[1:])
    length, pieces = table.num_elements(value) // num_ranks, table.pieces(value)
    blocks = [pieces.cut(rank * length, length) for rank in range(num_ranks)]
    attributes = (given["reduce_op"], _group(given))
    columns = zip(*_cut_alike(blocks), strict=True)
    return table.flat(shape, [_share(table, each, attributes) for each in columns])


def _cut_alike(blocks: list[list[Segment]]) -> list[list[Segment]]:
    """All blocks cut wherever one of them is."""
    ends = {end for block in blocks for end in accumulate(s.length for s in block)}
    cuts = list(pairwise(sorted({0, *ends})))
    cutters = [Pieces(block) for block in blocks]
    return [
        [pieces.cut(start, end - start)[0] for start, end in cuts] for pieces in cutters
    ]


def _share(
    table: ValueTable, column: tuple[Segment, ...], attributes: tuple[Hashable, ...]
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


def _group(given: dict[str, Any]) -> Hashable:
    group = given["group_name"]
    return group if isinstance(group, str) else repr(group)


def _single(one: _One, reader: Reader, call: Call) -> int | None:
    found = tensor_of(reader, call.first)
    if found is None or _has_nodes(call):
        return None
    if _is_alone(call.arguments):
        return found[0]
    return one(reader.table, found[0], call.arguments)


def _coalesced(one: _One, reader: Reader, call: Call) -> int | None:
    found = [tensor_of(reader, each) for each in call.first]
    values = [each[0] for each in found if each is not None]
    if len(values) != len(found) or _has_nodes(call):
        return None
    if _is_alone(call.arguments):
        return reader.table.list_of(values)
    made = [one(reader.table, value, call.arguments) for value in values]
    known = [each for each in made if each is not None]
    return reader.table.list_of(known) if len(known) == len(made) else None


def _is_alone(given: dict[str, Any]) -> bool:
    """Whether a collective has one rank only, and so changes nothing."""
    if "group_size" in given:
        return bool(given["group_size"] == 1)
    try:
        group = _torch.resolve_group(given["group_name"])
    except (RuntimeError, ValueError):  # a graph read where its groups are not
        return False
    return group is not None and group.size() == 1


def _has_nodes(call: Call) -> bool:
    """Whether an argument besides the first is only known when the graph runs."""
    rest = list(call.arguments.values())[1:]
    return any(isinstance(each, fx.Node) for each in rest)


def _rules() -> dict[str, Rule]:
    ones: dict[str, _One] = {
        "all_reduce": _all_reduce,
        "broadcast": _broadcast,
        "all_gather_into_tensor": _all_gather,
        "reduce_scatter_tensor": _reduce_scatter,
    }
    prefix = "_c10d_functional::"
    rules: dict[str, Rule] = {
        prefix + name: partial(_single, one) for name, one in ones.items()
    }
    coalesced = {
        f"{prefix}{name}_coalesced": partial(_coalesced, one)
        for name, one in ones.items()
    }
    return {**rules, **coalesced}


COLLECTIVE_RULES = _rules()
