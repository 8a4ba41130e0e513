"""Whether two graphs compute the same outputs, shown on values (translation validation).

Both graphs run over values in one table; what a pass does to pack, reduce and unpack
tensors has one form, and all other operators stand for themselves. An output is proved
equal where both graphs give it the same value.
"""

from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from torchspmd.step.graph.metadata import output_values, readable_name, written_state
from torchspmd.step.legality.edit import Edit, Problem, output_name, shorten
from torchspmd.step.legality.evaluate import Earlier, Evaluation
from torchspmd.step.legality.graph_rules import random_nodes
from torchspmd.step.legality.operator_rules import VIEWS
from torchspmd.step.legality.values import (
    COLLECTIVES,
    FILL,
    GATHER,
    INPUT,
    SCATTER,
    STRIDED,
    TUPLE,
    Fakes,
    Flat,
    Term,
    ValueTable,
)

# ----------------------------------------------------------------------------
# Why two values are not the same, and whether that is certain.
#
# Values are compared from the outside in, down to where they part. It is certain that an
# edit changed a result where something that was computed before is in another place
# than before: another input, other elements of the same value, another order, another
# number. It is not certain where the edit computes something new, which may or may not be
# the same by a law that is not known here.

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
        if isinstance(one, Term) and isinstance(two, Term) and now not in self._known:
            if one.head == two.head and len(one.children) == len(two.children):
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
        """Whether a value of the graph before is where another one was."""
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


_SAME = "A pass may move and regroup work; each output must stay the same value."
_SHAPES = "A bucket is split as it was concatenated."
_WRITES = "Only the next value of an input may be written into it."


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two nodes that must hold the same, and the place of the output that they are."""

    was: fx.Node
    now: fx.Node
    place: int | None = None


class Equivalence:
    """The values of a graph before and after an edit.

    Args:
        edit: The edit.
        fakes: What the nodes of the edited graph give, without values.
        ignores_casts: Take a collective in another dtype for the same.
        earlier: Values from before that the graph before the edit still has; they must
            come from a table that does not ignore casts.
    """

    def __init__(
        self,
        edit: Edit,
        fakes: Fakes,
        ignores_casts: bool = False,
        earlier: Earlier | None = None,
    ) -> None:
        self._edit = edit
        self.table = (
            ValueTable(ignores_casts) if earlier is None else earlier.values.table
        )
        old = {node: _random_mark(node, earlier) for node in random_nodes(edit.before)}
        new = {
            node: old.get(edit.old.get(node), object())  # type: ignore[arg-type]
            for node in random_nodes(edit.after)
        }
        written_down = {node: node.meta.get("val") for node in edit.before.nodes}
        self.before = Evaluation(
            self.table, edit.before, old, written_down, edit.written_before, earlier
        )
        self.after = Evaluation(
            self.table,
            edit.after,
            new,
            fakes,
            edit.written_after,
            Earlier(self.before, edit.old, edit.same),
        )

    def elements(self, node: fx.Node) -> Hashable:
        """Which elements of which values a node of the edited graph holds."""
        value = self.after.value(node)
        found = self.table[value]
        return found.segments if isinstance(found, Flat) else value

    def compare(self) -> tuple[list[str], list[Problem]]:
        """Compare all outputs, and what is written into inputs.

        Returns:
            The names of outputs of which nothing is certain, and what certainly changed.
        """
        comparer: Comparer | None = None
        unproved: list[str] = []
        changed: dict[Divergence, list[_Pair]] = {}
        for pair in [*self._outputs(), *self._writes()]:
            was, now = self.before.value(pair.was), self.after.value(pair.now)
            if was == now:
                continue
            comparer = comparer or Comparer(self.table, self._values_before())
            found = comparer.compare(was, now)
            if found is None:
                continue
            if found.is_certain:
                changed.setdefault(found, []).append(pair)
            else:
                unproved.append(self._name(pair))
        problems = [self._problem(found, pairs) for found, pairs in changed.items()]
        problems += [*self._unasked_writes(), *self._impossible()]
        return unproved, problems

    def _outputs(self) -> Iterator[_Pair]:
        old, new = (output_values(g) for g in (self._edit.before, self._edit.after))
        for place, (was, now) in enumerate(zip(old, new, strict=True)):
            if isinstance(was, fx.Node) and isinstance(now, fx.Node):
                yield _Pair(was, now, place)

    def _writes(self) -> Iterator[_Pair]:
        """Inputs that both graphs write into; those that only one does are states."""
        for was, now in self._placeholders():
            written = self.before.value(was) != self.before.made[was]
            if written and self.after.value(now) != self.after.made[now]:
                yield _Pair(was, now)

    def _name(self, pair: _Pair) -> str:
        if pair.place is None:
            return f"what is left in {readable_name(pair.was)}"
        return output_name(self._edit.before, pair.place)

    def _unasked_writes(self) -> Iterator[Problem]:
        """Writes into an input that are new, or gone, and no state's next value."""
        outputs = output_values(self._edit.after)
        state = {
            holder: outputs[place]
            for place, holder in written_state(self._edit.after).items()
        }
        for was, now in self._placeholders():
            old, new = self.before.value(was), self.after.value(now)
            writes = old != self.before.made[was], new != self.after.made[now]
            if writes == (False, True):
                value = state.get(now)
                if isinstance(value, fx.Node) and self.after.value(value) == new:
                    continue
                text = f"the graph now writes into its input {readable_name(now)}"
                writer = self.after.writers.get(new)
                by = f", with {readable_name(writer)}" if writer else ""
                yield Problem("state", text + by, _WRITES)
            elif writes == (True, False):
                text = f"the write into the input {readable_name(now)} is gone"
                yield Problem("state", text, _WRITES)

    def _impossible(self) -> Iterator[Problem]:
        """Nodes that could run before and cannot run now."""
        for node, what in self.after.impossible.items():
            if self._edit.old.get(node) in self.before.impossible:
                continue
            sources = ", ".join(map(readable_name, node.all_input_nodes[:3]))
            text = f"{readable_name(node)} takes {what} from {sources}"
            yield Problem("shape", text, _SHAPES)

    def _placeholders(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        graphs = self._edit.before, self._edit.after
        yield from zip(*(g.find_nodes(op="placeholder") for g in graphs), strict=True)

    def _values_before(self) -> list[int]:
        nodes = [node for node in self._edit.before.nodes if node.op != "output"]
        return [*self.before.made.values(), *map(self.before.value, nodes)]

    @cached_property
    def _makers(self) -> tuple[dict[int, fx.Node], dict[int, fx.Node]]:
        return _makers(self.before), _makers(self.after)

    def _problem(self, found: Divergence, pairs: list[_Pair]) -> Problem:
        makers_before, makers_after = self._makers
        before = makers_before.get(found.was, pairs[0].was)
        # A value may have no node of its own any more.
        elsewhere = makers_before.get(found.now, pairs[0].now)
        after = makers_after.get(found.now, elsewhere)
        names = shorten([self._name(pair) for pair in pairs])
        text = (
            f"{names}: {found.what}: {readable_name(before)} was where "
            f"{readable_name(after)} is now"
        )
        return Problem("value", text, _SAME)


def _random_mark(node: fx.Node, earlier: Earlier | None) -> Hashable:
    """What tells a random op from all others, and stays when its graph is copied."""
    was = None if earlier is None else earlier.old.get(node)
    found = None if earlier is None else earlier.values.random.get(was)  # type: ignore[arg-type]
    return object() if found is None else found


def _makers(values: Evaluation) -> dict[int, fx.Node]:
    """The first node that computes each value, or a tensor that holds it."""
    makers = dict(values.writers)
    made = [(value, node) for node, value in values.made.items()]
    for value, node in made:
        makers.setdefault(value, node)
    for value, node in [*made, *values.writers.items()]:
        found = values.table[value]
        for segment in found.segments if isinstance(found, Flat) else ():
            makers.setdefault(segment.atom, node)
    return makers
