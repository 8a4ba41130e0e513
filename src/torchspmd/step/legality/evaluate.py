"""A graph run over values instead of tensors, writes into memory included."""

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from torchspmd.step.graph.aliases import Written, find_writes
from torchspmd.step.legality.collective_rules import COLLECTIVE_RULES
from torchspmd.step.legality.edit import metadata_of
from torchspmd.step.legality.operator_rules import (
    OPERATOR_RULES,
    commuted,
    elementwise,
    foreach,
    fused,
    known_layout,
    layout_read,
    reads_layout,
    unknown_layout,
)
from torchspmd.step.legality.values import (
    INPUT,
    TUPLE,
    Fakes,
    Flat,
    Impossible,
    OpCall,
    Rule,
    Segment,
    Term,
    Unknown,
    ValueTable,
    read_call,
    shape_of,
    split_arguments,
)

# ----------------------------------------------------------------------------
# Writes into a part of a tensor's memory.


def overwrite(
    table: ValueTable, old: int, new: int, through: Callable[[int], int]
) -> int:
    """A tensor after ``new`` was written into a view of it.

    Args:
        table: The values.
        old: What the memory held.
        new: What is written.
        through: What the view shows of a value of the whole memory.
    """
    whole = table[old]
    if not isinstance(whole, Flat):
        return table.term("overwritten", None, (old, through(old), new))
    atom = table.term("memory", whole.shape, ())
    shown = through(table.tensor(atom, whole.shape))
    places = _places(table, shown, atom)
    if places is None or not isinstance(table[new], Flat):
        made = table.term("overwritten", None, (old, shown, new))
        return table.tensor(made, whole.shape)
    return table.flat(whole.shape, _spliced(table, old, new, places))


def _places(table: ValueTable, shown: int, memory: int) -> list[Segment] | None:
    """Which elements of the memory a view shows, in its own order."""
    flat = table[shown]
    if not isinstance(flat, Flat):
        return None
    places = [part for each in flat.segments for part in table.run_by_run(each)]
    return places if all(part.atom == memory for part in places) else None


def _spliced(
    table: ValueTable, old: int, new: int, places: list[Segment]
) -> list[Segment]:
    """The old elements, with the new ones at their places."""
    written: list[tuple[int, int, int]] = []  # where it goes, where it is, how long
    taken = 0
    for segment in places:
        written.append((segment.offset, taken, segment.length))
        taken += segment.length
    segments: list[Segment] = []
    at = 0
    kept, fresh = table.pieces(old), table.pieces(new)
    for start, source, length in sorted(written):
        segments += kept.cut(at, start - at)
        segments += fresh.cut(source, length)
        at = start + length
    return segments + kept.cut(at, table.num_elements(old) - at)


_RULES = {**OPERATOR_RULES, **COLLECTIVE_RULES}
_RULES_BY_PREFIX = {"aten::_foreach_": foreach, "aten::_fused_": fused}
# Views that copy where memory is not laid out for them: after a write to what they were
# taken of, they hold either the old or the new elements.
_MAY_COPY = frozenset(
    f"aten::{name}"
    for name in (
        "contiguous",
        "flatten",
        "native_dropout",
        "reshape",
        "to",
        "unflatten",
    )
)


@dataclass(frozen=True, slots=True)
class Earlier:
    """A graph whose values are known, for one that was made of it.

    Attributes:
        values: The values of its nodes.
        old: Its node for each node of the other graph that was made of one.
        same: The nodes of the other graph that do what they did with what they took.
    """

    values: "Evaluation"
    old: Mapping[fx.Node, fx.Node]
    same: Collection[fx.Node]


class Evaluation:
    """The value of each node of a graph.

    Args:
        table: Where values are kept; graphs to be compared share one.
        graph: The graph; its nodes are in an order in which they can run.
        random: What tells random ops apart, for each of them.
        fakes: What each node gives, without values.
        memory: The memory that the graph writes into.
        earlier: A graph with values in the same table that this one was made of. Nodes of
            which all is the same, up to the inputs, have the values that they had. Not
            taken where either graph writes: then values depend on the order too.

    Attributes:
        made: The value that each node had when it ran.
        writers: The node that wrote each value that was written into memory.
        impossible: Nodes that cannot run on what they are given, and why.
        random: What tells random ops apart, as given.
    """

    def __init__(
        self,
        table: ValueTable,
        graph: fx.Graph,
        random: Mapping[fx.Node, Hashable],
        fakes: Fakes,
        memory: Written,
        earlier: Earlier | None = None,
    ) -> None:
        self.table = table
        self.fakes = fakes
        self.random = random
        self.made: dict[fx.Node, int] = {}
        self._root, self._written = memory
        self._memory: dict[fx.Node, int] = {}  # what each written root holds now
        self._version = dict.fromkeys(self._written, 0)
        self._shown: dict[fx.Node, tuple[int, int]] = {}  # version and value of views
        self._is_probing = False
        self.writers: dict[int, fx.Node] = {}
        self.impossible: dict[fx.Node, str] = {}
        self._num_inputs = 0
        self._layouts: dict[fx.Node, Hashable] = {}
        if earlier is None or self._written or earlier.values._written:
            earlier = None
        kept: set[fx.Node] = set()
        for node in graph.nodes:
            if node.op == "output":
                continue
            if earlier is not None and self._take_over(node, earlier, kept):
                kept.add(node)
            else:
                self._run(node)

    def value(self, node: fx.Node) -> int:
        """The value of a node, after all that has run so far."""
        root = self._root.get(node)
        if root not in self._written:
            return self.made[node]
        if node is root:
            return self._memory[root]
        version, value = self._shown[node]
        return value if version == self._version[root] else self._reload(node, root)

    def layout(self, node: fx.Node) -> Hashable:
        """How what a node gives lies in memory; few calls depend on it."""
        if node not in self._layouts:
            self._layouts[node] = known_layout(self.fakes[node])
        return self._layouts[node]

    def _reload(self, node: fx.Node, root: fx.Node) -> int:
        """A view's elements after a write to its memory."""
        call = read_call(node)
        if call.signature is not None and call.signature.written:
            now = self.value(call.arguments[call.signature.written[0]])
        else:
            now = self._compute(call)
        if call.name in _MAY_COPY:
            now = self._either(self.made[node], now)
        if not self._is_probing:
            self._shown[node] = self._version[root], now
        return now

    def _either(self, old: int, now: int) -> int:
        flat, atom = self.table[old], self.table.term("old or new", None, (old, now))
        return self.table.tensor(atom, flat.shape) if isinstance(flat, Flat) else atom

    def _take_over(
        self, node: fx.Node, earlier: Earlier, kept: Collection[fx.Node]
    ) -> bool:
        """Give a node the value that it had; whether it has what it had, in all."""
        was, values = earlier.old.get(node), earlier.values
        if was is None or node not in earlier.same:
            return False
        if not all(source in kept for source in node.all_input_nodes):
            return False
        if not _is_same_fake(self.fakes.get(node), values.fakes.get(was)):
            return False
        if self.random.get(node) != values.random.get(was):
            return False
        if node.op == "placeholder":  # known by its place, which may be another
            self._run(node)
            return self.made[node] == values.made[was]
        self.made[node] = values.made[was]
        if was in values.impossible:
            self.impossible[node] = values.impossible[was]
        if was in values._layouts:
            self._layouts[node] = values._layouts[was]
        return True

    def _run(self, node: fx.Node) -> None:
        root = self._root.get(node)
        if node.op == "placeholder":
            value = self._shaped(node, self.table.term(INPUT, self._num_inputs, ()))
            self._num_inputs += 1
        else:
            call = read_call(node)
            if call.signature is not None and call.signature.written:
                computed = self._compute(_kept_apart(self.fakes, call))
                value = self._write_all(call, computed)
            else:
                value = self._compute(call)
        self.made[node] = value
        if self.fakes.get(node) is None:
            self._layouts[node] = unknown_layout(self, node)
        if root in self._written:
            self._shown[node] = self._version[root], value
            self._memory.setdefault(root, value)

    def _compute(self, call: OpCall) -> int:
        try:
            return _rule_of(call)(self, call)
        except Unknown:
            pass
        except Impossible as error:
            self.impossible.setdefault(call.node, str(error))
        except (ArithmeticError, LookupError):
            self.impossible.setdefault(call.node, "its arguments")
        return self._unknown(call)

    def _unknown(self, call: OpCall) -> int:
        """The value of a call about which only its name and arguments are known."""
        attributes, children = split_arguments(self, call.arguments)
        operands = commuted(call, children)
        if call.node in self.random:
            attributes = (self.random[call.node], attributes)
        if reads_layout(call):
            operands = [*operands, layout_read(self, call)]
        atom = self.table.term(call.head, attributes, operands)
        if call.signature is not None and len(call.signature.written) == 1:
            written = find_writes(call.node)
            if written and written[0].item is None:
                return self._like(written[0].node, atom)
        return self._shaped(call.node, atom)

    def _shaped(self, node: fx.Node, atom: int) -> int:
        shape = shape_of(self.fakes.get(node))
        return atom if shape is None else self.table.tensor(atom, shape)

    def _write_all(self, call: OpCall, result: int) -> int:
        """Write what an in-place operator computes; return what the node itself holds."""
        assert call.signature is not None
        is_several = len(call.signature.written) > 1
        for node, number, item in find_writes(call.node):
            path = () if item is None else (item,)
            new = _at(self.table, result, (number, *path) if is_several else path)
            if new is None:
                atom = self.table.term("written", (number, item or 0), (result,))
                new = self._like(node, atom)
            self._write(node, new)
            self.writers.setdefault(new, call.node)
        return result

    def _like(self, node: fx.Node, atom: int) -> int:
        """A value in the shape of a node's."""
        flat = self.table[self.value(node)]
        return self.table.tensor(atom, flat.shape) if isinstance(flat, Flat) else atom

    def _write(self, node: fx.Node, new: int) -> None:
        root = self._root[node]
        old = self._memory[root]
        if node is not root:
            new = overwrite(
                self.table, old, new, lambda hole: self._through(node, hole)
            )
        self._memory[root] = new
        self._version[root] += 1

    def _through(self, node: fx.Node, whole: int) -> int:
        """What a view would show if its root held this value."""
        root = self._root[node]
        kept = self._memory[root]
        self._memory[root], self._is_probing = whole, True
        self._version[root] += 1
        shown = self.value(node)
        self._memory[root], self._is_probing = kept, False
        return shown


def _is_same_fake(one: Any, other: Any) -> bool:
    if one is other:
        return True
    is_known = one is not None and other is not None
    return is_known and metadata_of(one) == metadata_of(other)


def _rule_of(call: OpCall) -> Rule:
    found = _RULES.get(call.name)
    if found is not None:
        return found
    prefixes = (each for each in _RULES_BY_PREFIX if call.name.startswith(each))
    prefix = next(prefixes, None)
    return elementwise if prefix is None else _RULES_BY_PREFIX[prefix]


def _kept_apart(fakes: Fakes, call: OpCall) -> OpCall:
    """A call that writes; where that casts its result, it is like no functional one."""
    if call.name == "aten::copy" or call.name.startswith("aten::_fused_"):
        return call
    values: list[Any] = [fakes.get(node) for node in call.node.all_input_nodes]
    if len({each.dtype for each in values if getattr(each, "ndim", 0)}) < 2:
        return call
    return replace(call, name=f"{call.name}_", head=f"{call.head}_")


def _at(table: ValueTable, value: int, path: tuple[int, ...]) -> int | None:
    """A value inside of lists of values; the value itself for an empty path."""
    for place in path:
        term = table[value]
        if not isinstance(term, Term) or term.head != TUPLE:
            return None
        value = term.children[place]
    return value if isinstance(table[value], Flat) else None
