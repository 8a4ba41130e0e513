"""Collectives of a graph as blocks: start, wait, and the cheap nodes around them.

Blocks are found by operator and by who uses what, never by a node's name.
"""

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import CommEvent, Group, Kind
from torchspmd.step.graph.aliases import operator_of
from torchspmd.step.graph.ledger import events_of
from torchspmd.step.graph.queries import HasGraph

# Besides views: what costs about a copy and may travel with a collective.
_CHEAP = frozenset(
    {"aten::_to_copy", "aten::clone", "aten::div", "aten::mul", "aten::neg"}
)
_PACKING = frozenset({"aten::cat", "aten::constant_pad_nd"})


@dataclass(frozen=True, slots=True)
class CommBlock:
    """One collective, from what prepares its input to what takes its result apart.

    Attributes:
        start: The node that starts it.
        waits: The nodes that end it; one, or one for each tensor of a coalesced one.
        inputs: The nodes that the start takes.
        outputs: The nodes whose values the rest of the graph reads.
        event: What it communicates.
        head: Cheap nodes that feed nothing else (views, concatenation, casts).
        tail: Cheap nodes that only take the result apart, or scale it.
        problem: Why it must be left alone; empty where it is an ordinary pair.
    """

    start: fx.Node
    waits: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    event: CommEvent
    head: tuple[fx.Node, ...] = ()
    tail: tuple[fx.Node, ...] = ()
    problem: str = ""

    @property
    def wait(self) -> fx.Node:
        """The first wait."""
        return self.waits[0]

    @property
    def kind(self) -> Kind:
        """What it does."""
        return self.event.kind

    @property
    def group(self) -> Group:
        """Who takes part."""
        return self.event.group

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """All nodes of the block."""
        return (*self.head, self.start, *self.waits, *self.tail)

    def argument(self, name: str) -> Any:
        """An argument of the start by its name in the operator; None without it."""
        return node_arguments(self.start).get(name)

    def sources(self) -> list[fx.Node]:
        """The nodes outside of the block that its head and its start read."""
        own = {*self.head, self.start}
        found = dict.fromkeys(
            source
            for node in (*self.head, self.start)
            for source in node.all_input_nodes
            if source not in own
        )
        return list(found)

    def readers(self) -> list[fx.Node]:
        """The nodes outside of the block that read its results, the output included."""
        own = {self.start, *self.waits, *self.tail}
        found = dict.fromkeys(
            user
            for node in (*self.waits, *self.tail)
            for user in node.users
            if user not in own
        )
        return list(found)

    def gathers_inputs(self) -> bool:
        """Whether it gathers something that the step takes in, such as a parameter."""
        is_gather = self.kind is Kind.ALL_GATHER and not self.problem
        inputs = ("placeholder", "get_attr")
        return is_gather and all(source.op in inputs for source in self.sources())


def get_all_comm_blocks(
    gm: HasGraph, kinds: Iterable[Kind | str] | None = None
) -> list[CommBlock]:
    """The blocks of all collectives, or of these kinds, in the order of their starts.

    >>> graph = fx.Graph()
    >>> gm = fx.GraphModule({}, graph)
    >>> get_all_comm_blocks(gm)
    []
    """
    wanted = None if kinds is None else {Kind(kind) for kind in kinds}
    found = list(events_of(gm.graph))
    waits = {start: tuple(_find_waits(start)) for start, _ in found}
    tails = _tails(gm.graph, waits)
    heads = _heads(gm.graph, set(waits), set(tails))
    by_start = _grouped(tails), _grouped(heads)
    return [
        _block(start, event, waits[start], *(each.get(start, ()) for each in by_start))
        for start, event in found
        if wanted is None or event.kind in wanted
    ]


def node_arguments(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by their names in its operator, in the operator's order."""
    target = operator_of(node)
    names = () if target is None else _torch.argument_names(target)
    found = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return {name: found[name] for name in names if name in found}


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a collective."""
    return node.op == "call_function" and node.target is _torch.WAIT


def writes_in_place(graph: fx.Graph) -> fx.Node | None:
    """The first node that writes into memory, over which nothing may be moved."""
    return next(filter(_writes, graph.nodes), None)


def _writes(node: fx.Node) -> bool:
    target = operator_of(node)
    return target is not None and bool(_torch.written_arguments(target))


def _block(
    start: fx.Node,
    event: CommEvent,
    waits: tuple[fx.Node, ...],
    tail: tuple[fx.Node, ...],
    head: tuple[fx.Node, ...],
) -> CommBlock:
    results = (*waits, *tail)
    own = set(results)
    outputs = tuple(node for node in results if any(u not in own for u in node.users))
    inputs = tuple(start.all_input_nodes)
    problem = _problem(start, event, waits)
    return CommBlock(start, waits, inputs, outputs, event, head, tail, problem)


def _problem(start: fx.Node, event: CommEvent, waits: tuple[fx.Node, ...]) -> str:
    if _writes(start):
        return f"{start.name}: it writes into its input"
    if not waits:
        return f"{start.name}: nothing waits for it"
    if not event.group.size:
        return f"{start.name}: its group is not known"
    early = next((n for n in start.users if not is_wait(n) and not _items(n)), None)
    if early is not None:
        return f"{start.name}: {early.name} reads it without a wait"
    return ""


def _items(node: fx.Node) -> bool:
    """Whether a node takes one tensor of a coalesced collective, to wait for it."""
    return node.target is operator.getitem and all(is_wait(n) for n in node.users)


def _find_waits(start: fx.Node) -> Iterator[fx.Node]:
    for user in start.users:
        if is_wait(user):
            yield user
        elif user.target is operator.getitem:
            yield from (each for each in user.users if is_wait(each))


def _tails(
    graph: fx.Graph, waits: dict[fx.Node, tuple[fx.Node, ...]]
) -> dict[fx.Node, fx.Node]:
    """The start that each node of a tail belongs to; a node of two belongs to none."""
    owner = {wait: start for start, found in waits.items() for wait in found}
    tails: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node in owner:
            continue
        starts = {owner[source] for source in node.all_input_nodes if source in owner}
        if len(starts) == 1 and _is_cheap(node):
            owner[node] = tails[node] = starts.pop()
    return tails


def _heads(
    graph: fx.Graph, starts: set[fx.Node], taken: set[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """The start that each node of a head belongs to: all that uses it is in the block."""
    owner: dict[fx.Node, fx.Node] = {start: start for start in starts}
    heads: dict[fx.Node, fx.Node] = {}
    for node in reversed(graph.nodes):
        if node in owner or node in taken or not node.users:
            continue
        fed = {owner.get(user) for user in node.users}
        if len(fed) == 1 and None not in fed and _is_cheap(node, _PACKING):
            (start,) = fed
            assert start is not None
            owner[node] = heads[node] = start
    return dict(reversed(heads.items()))


def _grouped(owner: dict[fx.Node, fx.Node]) -> dict[fx.Node, tuple[fx.Node, ...]]:
    grouped: dict[fx.Node, list[fx.Node]] = {}
    for node, start in owner.items():
        grouped.setdefault(start, []).append(node)
    return {start: tuple(nodes) for start, nodes in grouped.items()}


def _is_cheap(node: fx.Node, more: frozenset[str] = frozenset()) -> bool:
    """Whether a node is a view, or costs about a copy, and depends on nothing hidden."""
    if node.op == "call_function" and node.target is operator.getitem:
        return True
    target = operator_of(node)
    if target is None or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    name = _torch.packet_name(target)
    if name in more:
        return True
    if name in ("aten::div", "aten::mul"):
        return _is_scaling(node)
    if name in _CHEAP:
        return True
    is_view = bool(_torch.shared_arguments(target)) and name.startswith("aten::")
    return is_view and not _torch.written_arguments(target)


def _is_scaling(node: fx.Node) -> bool:
    """Whether a product or quotient has one factor that is a number."""
    factor = node.args[1] if len(node.args) > 1 else None
    value = factor.meta.get("val") if isinstance(factor, fx.Node) else factor
    return not isinstance(value, torch.Tensor) or value.ndim == 0
