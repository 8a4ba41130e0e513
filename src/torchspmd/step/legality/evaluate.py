"""A graph run over values instead of tensors, writes into memory included."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from torchspmd import _torch
from torchspmd.step.graph.aliases import find_aliases, operator_of
from torchspmd.step.legality.collective_rules import COLLECTIVE_RULES
from torchspmd.step.legality.list_rules import getitem, on_lists
from torchspmd.step.legality.math_rules import ELEMENTWISE, SUMS, commuted, elementwise
from torchspmd.step.legality.memory_rules import (
    find_layouts,
    layout_read,
    reads_layout,
    walks_memory,
)
from torchspmd.step.legality.shape_rules import CUTS, VIEWS
from torchspmd.step.legality.values import (
    INPUT,
    TUPLE,
    Call,
    Fakes,
    Flat,
    Impossible,
    Layouts,
    Pieces,
    Segment,
    Term,
    ValueTable,
    read_call,
    shape_of,
    split_arguments,
)

# ----------------------------------------------------------------------------
# Writes into a part of a tensor's memory.

_MOST_RUNS = 4096


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
    places: list[Segment] = []
    for segment in flat.segments:
        runs = table.runs_of(segment.atom)
        if segment.atom == memory:
            places.append(segment)
            continue
        if runs is None or runs.base != memory or runs.num > _MOST_RUNS:
            return None
        parts = [
            Segment(memory, runs.offset + i * runs.stride, runs.length)
            for i in range(runs.num)
        ]
        places += Pieces(parts).cut(segment.offset, segment.length)
    return places


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


_RULES = {**VIEWS, **CUTS, **ELEMENTWISE, **COLLECTIVE_RULES}
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


class Evaluation:
    """The value of each node of a graph.

    Args:
        table: Where values are kept; graphs to be compared share one.
        graph: The graph; its nodes stand in an order in which they can run.
        draws: What tells random draws apart, for each node that takes random numbers.
        fakes: What each node gives, without values; by default as it is written down.

    Attributes:
        layouts: How tensors lie; empty in a graph of which no node reads that.
        writers: The node that wrote each value that was written into memory.
        impossible: Nodes that cannot run on what they are given, and why.
    """

    def __init__(
        self,
        table: ValueTable,
        graph: fx.Graph,
        draws: Mapping[fx.Node, Hashable],
        fakes: Fakes | None = None,
    ) -> None:
        self.table = table
        written_down = {node: node.meta.get("val") for node in graph.nodes}
        self.fakes: Fakes = written_down if fakes is None else fakes
        self._draws = draws
        self._values: dict[fx.Node, int] = {}
        written = written_nodes(graph)
        # Few graphs write at all, and then nothing need be known about memory.
        self._root = find_aliases(graph).root if written else {}
        self._written = {self._root[node] for node in written}
        self._memory: dict[fx.Node, int] = {}  # what each written root holds now
        self._version = dict.fromkeys(self._written, 0)
        self._shown: dict[fx.Node, tuple[int, int]] = {}  # version and value of views
        self._is_probing = False
        self.writers: dict[int, fx.Node] = {}
        self.impossible: dict[fx.Node, str] = {}
        self._num_inputs = 0
        self._readers = frozenset(filter(reads_layout, graph.nodes))
        needed = bool(self._readers) or any(map(walks_memory, graph.nodes))
        self.layouts: Layouts = {}
        if needed:
            self.layouts = find_layouts(table, graph, self.fakes)
        for node in graph.nodes:
            if node.op != "output":
                self._run(node)

    def value(self, node: fx.Node) -> int:
        """The value of a node, after all that has run so far."""
        root = self._root.get(node)
        if root not in self._written:
            return self._values[node]
        if node is root:
            return self._memory[root]
        version, value = self._shown[node]
        return value if version == self._version[root] else self._reload(node, root)

    def made(self, node: fx.Node) -> int:
        """The value that a node had when it ran."""
        return self._values[node]

    def _reload(self, node: fx.Node, root: fx.Node) -> int:
        """A view's elements after a write to the memory that it looks at."""
        call = read_call(node)
        if call.signature is not None and call.signature.written:
            now = self.value(call.arguments[call.signature.written[0]])
        else:
            now = self._compute(call)
        if call.name in _MAY_COPY:
            now = self._either(self._values[node], now)
        if not self._is_probing:
            self._shown[node] = self._version[root], now
        return now

    def _either(self, old: int, now: int) -> int:
        flat, atom = self.table[old], self.table.term("old or new", None, (old, now))
        return self.table.tensor(atom, flat.shape) if isinstance(flat, Flat) else atom

    def _run(self, node: fx.Node) -> None:
        root = self._root.get(node)
        if node.op == "placeholder":
            value = self._shaped(node, self.table.term(INPUT, self._num_inputs, ()))
            self._num_inputs += 1
        else:
            call = read_call(node)
            if call.signature is not None and call.signature.written:
                value = self._write_all(
                    call, self._compute(_kept_apart(self.fakes, call))
                )
            else:
                value = self._compute(call)
        self._values[node] = value
        if root in self._written:
            self._shown[node] = self._version[root], value
            self._memory.setdefault(root, value)

    def _compute(self, call: Call) -> int:
        known = self._by_rule(call)
        return self._unknown(call) if known is None else known

    def _by_rule(self, call: Call) -> int | None:
        try:
            return self._apply_rule(call)
        except Impossible as error:
            self.impossible.setdefault(call.node, str(error))
        except (ArithmeticError, LookupError):
            self.impossible.setdefault(call.node, "its arguments")
        return None

    def _apply_rule(self, call: Call) -> int | None:
        if call.signature is None:
            is_item = call.name == "call_function _operator.getitem"
            return getitem(self, call) if is_item else None
        rule = _RULES.get(call.name)
        if rule is not None:
            return rule(self, call)
        law = SUMS.get(call.name)
        if law is not None and (summed := law(self, call)) is not None:
            return summed
        made = on_lists(self, call)
        return elementwise(self, call) if made is None else made

    def _unknown(self, call: Call) -> int:
        """The value of a call about which only its name and arguments are known."""
        attributes, children = split_arguments(self, call.arguments)
        operands = commuted(call, children)
        draw = self._draws.get(call.node)
        if draw is not None:
            attributes = (draw, attributes)
        if call.node in self._readers:
            operands = [*operands, layout_read(self, call, self.layouts)]
        atom = self.table.term(call.head, attributes, operands)
        if call.signature is not None and len(call.signature.written) == 1:
            written = _argument(call, call.signature.written[0])
            if isinstance(written, fx.Node):
                return self._like(written, atom)
        return self._shaped(call.node, atom)

    def _shaped(self, node: fx.Node, atom: int) -> int:
        shape = shape_of(self.fakes.get(node))
        return atom if shape is None else self.table.tensor(atom, shape)

    def _write_all(self, call: Call, result: int) -> int:
        """Write what an in-place operator computes; return what the node itself holds."""
        assert call.signature is not None
        names = call.signature.written
        for number, name in enumerate(names):
            for place, (node, path) in enumerate(_targets(_argument(call, name))):
                at = (number, *path) if len(names) > 1 else path
                new = _at(self.table, result, at)
                if new is None:
                    atom = self.table.term("written", (number, place), (result,))
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


def _kept_apart(fakes: Fakes, call: Call) -> Call:
    """A call that writes; where that casts its result, it is like no functional one."""
    if call.name == "aten::copy" or call.name.startswith("aten::_fused_"):
        return call
    values: list[Any] = [fakes.get(node) for node in call.node.all_input_nodes]
    if len({each.dtype for each in values if getattr(each, "ndim", 0)}) < 2:
        return call
    return replace(call, name=f"{call.name}_", head=f"{call.head}_")


def written_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that a graph writes into."""
    return [each for node in graph.nodes for each in nodes_written_by(node)]


def nodes_written_by(node: fx.Node) -> list[fx.Node]:
    """The nodes that a call writes into."""
    target = operator_of(node)
    if target is None or not _torch.signature_of(target).written:
        return []
    call = read_call(node)
    assert call.signature is not None
    given = [_argument(call, name) for name in call.signature.written]
    return [written for argument in given for written, _ in _targets(argument)]


def _argument(call: Call, name: str) -> Any:
    return call.arguments.get(name, call.node.kwargs.get(name))


def _targets(argument: Any) -> list[tuple[fx.Node, tuple[int, ...]]]:
    """The nodes of an argument, and where each stands in it."""
    if isinstance(argument, fx.Node):
        return [(argument, ())]
    if isinstance(argument, (list, tuple)):
        items = enumerate(argument)
        return [(item, (i,)) for i, item in items if isinstance(item, fx.Node)]
    return []


def _at(table: ValueTable, value: int, path: tuple[int, ...]) -> int | None:
    """A value inside of lists of values; the value itself for an empty path."""
    for place in path:
        term = table[value]
        if not isinstance(term, Term) or term.head != TUPLE:
            return None
        value = term.children[place]
    return value if isinstance(table[value], Flat) else None
