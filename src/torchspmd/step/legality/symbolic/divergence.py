"""Why two values are not the same, and whether that is certain.

Values are compared from the outside in, down to where they part. It is certain that an
edit changed a result where something that was computed before stands in another place
than before: another input, other elements of the same value, another order, another
number. It is not certain where the edit computes something new, which may or may not be
the same by a law that is not known here.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torchspmd.step.legality.symbolic.table import (
    COLLECTIVES,
    FILL,
    GATHER,
    INPUT,
    SCATTER,
    STRIDED,
    TUPLE,
    Flat,
    Term,
    ValueTable,
)
from torchspmd.step.legality.symbolic.views import VIEWS

_UNDERSTOOD = COLLECTIVES | {STRIDED, FILL, INPUT, TUPLE}
_NEUTRAL = {"mul": 1, "div": 1, "pow": 1, "add": 0, "sub": 0}
# What hands its operand on, where dtypes and shapes agree.
_IDLE = frozenset(
    {"copy", "where", "_to_copy", *(name.removeprefix("aten::") for name in VIEWS)}
)
_MOST_PAIRS = 64  # of segments, and of steps through operators that may do nothing


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two values part.

    Attributes:
        was: The value before.
        now: The value after.
        is_certain: Whether the results differ for certain.
        what: What is different, in a few words.
    """

    was: int
    now: int
    is_certain: bool
    what: str


@dataclass(frozen=True, slots=True)
class _Parts:
    """The pairs that a pair of values comes down to."""

    pairs: tuple[tuple[int, int], ...]
    one_is_enough: bool  # parts that do not depend on each other


class Comparer:
    """Compares values of an edited graph with those of the graph before.

    Args:
        table: The values.
        known: All values of the graph before.
    """

    def __init__(self, table: ValueTable, known: Collection[int]) -> None:
        self._table = table
        self._known = set(_closure(table, known))
        self._found: dict[tuple[int, int], Divergence] = {}

    def compare(self, was: int, now: int) -> Divergence | None:
        """Where two values part; None where they are the same."""
        if was == now:
            return None
        waiting = [(was, now)]
        while waiting:
            pair = waiting[-1]
            if pair in self._found:
                waiting.pop()
                continue
            parts = self._look(*pair)
            missing = [each for each in parts.pairs if each not in self._found]
            waiting += missing
            if parts.pairs and not missing:
                self._found[pair] = self._combine(pair, parts)
        return self._found[was, now]

    def _look(self, was: int, now: int) -> _Parts:
        """Decide a pair, or say which pairs it comes down to."""
        one, two = self._table[was], self._table[now]
        if isinstance(one, Flat) and isinstance(two, Flat):
            return self._look_at_tensors(was, now, one, two)
        if isinstance(one, Term) and isinstance(two, Term) and _is_alike(one, two):
            if now not in self._known:
                return self._look_at_terms(was, now, one, two)
        return self._settle(was, now, self._is_elsewhere(was, now), "another value")

    def _look_at_tensors(self, was: int, now: int, one: Flat, two: Flat) -> _Parts:
        if one.shape != two.shape:
            return self._settle(was, now, True, "another shape")
        pairs: dict[tuple[int, int], None] = {}
        for a, b in self._aligned(was, now):
            if a == b:
                return self._settle(was, now, True, "other elements")
            pairs[a, b] = None
        return _Parts(tuple(pairs), one_is_enough=True)

    def _aligned(self, was: int, now: int) -> Iterator[tuple[int, int]]:
        """What segments are taken of that differ, at the same place in two tensors."""
        one, two = self._table.pieces(was), self._table.pieces(now)
        at, total, found = 0, self._table.num_elements(was), 0
        while at < total and found < _MOST_PAIRS:
            a, b = one.at(at), two.at(at)
            length = min(a.length, b.length)
            if (a.atom, a.offset) != (b.atom, b.offset):
                found += 1
                yield a.atom, b.atom
            at += length

    def _look_at_terms(self, was: int, now: int, one: Term, two: Term) -> _Parts:
        children = list(zip(one.children, two.children, strict=True))
        pairs = tuple(dict.fromkeys(pair for pair in children if pair[0] != pair[1]))
        if not pairs:
            return self._settle(was, now, True, "another number or option")
        if one.attributes == two.attributes and sorted(one.children) == sorted(
            two.children
        ):
            return self._settle(was, now, True, "operands in another order")
        return _Parts(pairs, one_is_enough=one.head in (TUPLE, SCATTER))

    def _settle(self, was: int, now: int, is_certain: bool, what: str) -> _Parts:
        self._found[was, now] = Divergence(was, now, is_certain, what)
        return _Parts((), one_is_enough=False)

    def _combine(self, pair: tuple[int, int], parts: _Parts) -> Divergence:
        found = [self._found[each] for each in parts.pairs]
        certain = [each for each in found if each.is_certain]
        if len(certain) == len(found) or (certain and parts.one_is_enough):
            return certain[0]
        if isinstance(self._table[pair[0]], Term) and self._is_elsewhere(*pair):
            return Divergence(*pair, True, "another value")
        return next(each for each in found if not each.is_certain)

    def _is_elsewhere(self, was: int, now: int) -> bool:
        """Whether a value of the graph before stands where another one stood."""
        one, two = self._table[was], self._table[now]
        heads = {each.head for each in (one, two) if isinstance(each, Term)}
        if len(heads) > 1 and heads <= COLLECTIVES and now not in self._known:
            return False  # an all-reduce is a reduce-scatter and an all-gather
        return self._is_known(now) and not self._may_be_idle(was, now)

    def _is_known(self, value: int) -> bool:
        """Whether a value is made of what the graph before computed, and nothing else."""
        waiting, seen = [value], {value}
        while waiting:
            each = waiting.pop()
            if each in self._known:
                continue
            found = self._table[each]
            if isinstance(found, Term) and found.head not in _UNDERSTOOD:
                return False
            parts = {*_parts(found)} - seen
            seen |= parts
            waiting += parts
        return True

    def _may_be_idle(self, was: int, now: int) -> bool:
        """Whether ``now`` is ``was`` without operators that may change nothing."""
        waiting, steps = [was], 0
        while waiting and steps < _MOST_PAIRS:
            found, steps = self._table[waiting.pop()], steps + 1
            if isinstance(found, Term) and not self._is_neutral(found):
                continue
            parts = list(_parts(found))
            if now in parts:
                return True
            waiting += parts
        return False

    def _is_neutral(self, term: Term) -> bool:
        """Whether an operator may hand one of its operands on as it is."""
        namespace, _, rest = term.head.partition("::")
        if namespace != "aten":  # an operator or function of which nothing is known
            is_known = term.head in _UNDERSTOOD or "_operator." in term.head
            return not is_known or term.head == GATHER  # this rank's part of it
        name = rest.partition(".")[0]
        if name not in _NEUTRAL:
            return name in _IDLE
        number = dict(term.attributes).get("other")
        if number in (
            ("int", str(_NEUTRAL[name])),
            ("float", str(_NEUTRAL[name] * 1.0)),
        ):
            return True
        return any(map(self._is_constant, term.children))

    def _is_constant(self, value: int) -> bool:
        found = self._table[value]
        if isinstance(found, Term):
            return found.head == FILL
        return all(self._table[atom][0] == FILL for atom in _parts(found))


def _is_alike(one: Term, two: Term) -> bool:
    return one.head == two.head and len(one.children) == len(two.children)


def _parts(value: Term | Flat) -> Iterator[int]:
    if isinstance(value, Term):
        yield from value.children
    else:
        yield from dict.fromkeys(segment.atom for segment in value.segments)


def _closure(table: ValueTable, values: Collection[int]) -> Iterator[int]:
    """Values with the values of their segments and items."""
    for value in values:
        yield value
        found = table[value]
        if isinstance(found, Flat) or found.head == TUPLE:
            for part in _parts(found):
                yield part
                inner = table[part]
                if isinstance(inner, Flat):
                    yield from _parts(inner)
