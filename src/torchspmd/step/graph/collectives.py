"""Collectives of a graph as blocks: start, wait, and the cheap nodes around them.

Blocks are found by operator and by who uses what, never by a node's name.
"""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import CommEvent, Group, Kind, Ledger, Operator, Topology, measure
from torchspmd.step.graph.aliases import (
    Aliases,
    communication_of,
    find_aliases,
    find_waits,
    is_view,
    is_wait,
    node_arguments,
    operator_of,
    written_nodes,
)
from torchspmd.step.graph.argument_checks import check_module
from torchspmd.step.graph.metadata import fake_value, output_node, owner_of
from torchspmd.step.graph.nodes import HasGraph, NodeMaker, tensor_value
from torchspmd.step.graph.reports import GraphSize

# ----------------------------------------------------------------------------
# What a graph communicates, read from its nodes without running it.


def build_ledger(graph: fx.GraphModule) -> Ledger:
    """One event for each collective of a graph, in order.

    >>> len(build_ledger(fx.symbolic_trace(lambda x: x + 1)))
    0
    """
    check_module("build_ledger", graph=graph)
    ledger = Ledger()
    for _, event in events_of(graph.graph):
        ledger.append(event)
    return ledger


def events_of(graph: fx.Graph) -> Iterator[tuple[fx.Node, CommEvent]]:
    """Each node that communicates, and its event."""
    topology = Topology()
    for node in graph.nodes:
        operator = communication_of(node)
        if operator is not None:
            yield node, _event(node, operator, topology)


def axes_of(graph: fx.Graph) -> dict[str, Group]:
    """The groups that a graph communicates in, by the name of their mesh axis."""
    groups = (event.group for _, event in events_of(graph))
    return {group.axis: group for group in groups if group.axis is not None}


def peers_of(graph: fx.GraphModule) -> list[int]:
    """The ranks of all groups that a graph communicates over."""
    return sorted({r for _, event in events_of(graph.graph) for r in event.group.ranks})


def is_communication(node: fx.Node) -> bool:
    """Whether a node starts a communication."""
    return communication_of(node) is not None


def graph_size(graph: fx.Graph) -> GraphSize:
    """Nodes, collectives and their payload, from the nodes' metadata."""
    found = list(events_of(graph))
    total = sum(event.payload_bytes for _, event in found)
    return GraphSize(len(graph.nodes), len(found), total)


def _event(node: fx.Node, operator: Operator, topology: Topology) -> CommEvent:
    arguments: Any = fx.node.map_arg(node_arguments(node), fake_value)
    group = topology.group_of(arguments)
    sizes = measure(operator, arguments, group.size)
    owner = owner_of(node)
    return CommEvent(
        operator.kind,
        operator.counted_as,
        sizes.dtype,
        sizes.shape,
        sizes.payload_bytes,
        sizes.wire_bytes,
        group,
        phase=owner.phase,
        module=owner.module,
    )


# Besides views: what costs about a copy and may move with a collective.
_CHEAP = frozenset(
    {"aten::_to_copy", "aten::clone", "aten::div", "aten::mul", "aten::neg"}
)
_PACKING = frozenset({"aten::cat", "aten::constant_pad_nd"})


@dataclass(frozen=True, slots=True)
class CommBlock:
    """One collective, from what prepares its input to what unpacks its result.

    Attributes:
        start: The node that starts it.
        waits: The nodes that end it; one, or one for each tensor of a coalesced one.
        inputs: The nodes that the start takes.
        outputs: The nodes whose values the rest of the graph reads.
        event: What it communicates.
        head: Cheap nodes that feed nothing else (views, concatenation, casts).
        tail: Cheap nodes that only unpack the result, or scale it.
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
    waits = {start: find_waits(start) for start, _ in found}
    tails = _tails(gm.graph, waits)
    heads = _heads(gm.graph, set(waits), set(tails))
    by_start = _grouped(tails), _grouped(heads)
    return [
        _block(start, event, waits[start], *(each.get(start, ()) for each in by_start))
        for start, event in found
        if wanted is None or event.kind in wanted
    ]


def writes_in_place(graph: fx.Graph) -> fx.Node | None:
    """The first node that writes into memory, over which nothing may be moved."""
    return next(filter(written_nodes, graph.nodes), None)


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
    if written_nodes(start):
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
        if len(starts) == 1 and is_cheap(node):
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
        if len(fed) == 1 and None not in fed and is_cheap(node, _PACKING):
            (start,) = fed
            assert start is not None
            owner[node] = heads[node] = start
    return dict(reversed(heads.items()))


def _grouped(owner: dict[fx.Node, fx.Node]) -> dict[fx.Node, tuple[fx.Node, ...]]:
    grouped: dict[fx.Node, list[fx.Node]] = {}
    for node, start in owner.items():
        grouped.setdefault(start, []).append(node)
    return {start: tuple(nodes) for start, nodes in grouped.items()}


def is_cheap(node: fx.Node, more: frozenset[str] = frozenset()) -> bool:
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
    return name.startswith("aten::") and is_view(node)


def _is_scaling(node: fx.Node) -> bool:
    """Whether a product or quotient has one factor that is a number."""
    factor = node.args[1] if len(node.args) > 1 else None
    value = factor.meta.get("val") if isinstance(factor, fx.Node) else factor
    return not isinstance(value, torch.Tensor) or value.ndim == 0


# ----------------------------------------------------------------------------
# Moving collectives in a graph without moving anything else.


def earliest_place(block: CommBlock, after: fx.Node | None = None) -> fx.Node:
    """The node directly after which a block's head and start can be placed.

    Args:
        block: The block.
        after: A node that the start must not overtake, usually the start before it on
            the same group.
    """
    last_input = _last_input(block.start.graph)
    places = [source for source in block.sources() if source.op != "placeholder"]
    places += [node for node in (last_input, after) if node is not None]
    return max(places) if places else block.start.prev


def hoist(block: CommBlock, place: fx.Node) -> None:
    """Put a block's head and start directly after a node, where they come later."""
    floor = place
    for node in (*block.head, block.start):
        if floor < node:
            place.append(node)
            place = node


def latest_place(block: CommBlock) -> fx.Node:
    """The node directly before which a block's waits and tail can be placed."""
    return min(block.readers(), default=output_node(block.start.graph))


def sink(block: CommBlock, place: fx.Node) -> None:
    """Put what follows a block's start directly before a node, if it is earlier."""
    for node in after_start(block):
        if node < place:
            place.prepend(node)


def after_start(block: CommBlock) -> list[fx.Node]:
    """What follows a block's start: items, waits and tail, in order."""
    items = [node for node in block.start.users if node not in block.waits]
    return [*items, *block.waits, *block.tail]


def remember(nodes: Sequence[fx.Node]) -> Callable[[], None]:
    """What puts nodes, given in graph order, back to where they are now."""
    places = [(node, node.prev) for node in nodes]

    def restore() -> None:
        for node, before in places:
            before.append(node)

    return restore


def _last_input(graph: fx.Graph) -> fx.Node | None:
    nodes = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
    return nodes[-1] if nodes else None


# ----------------------------------------------------------------------------
# Collectives as they run: all-reduces in place, and what gloo does better in another way.
#
# The functional all-reduce works on a copy: for gradients of many megabytes that is time,
# and memory twice. Only the graph that is run is changed.


def reduce_in_place(graph: fx.Graph) -> int:
    """Change the reductions of a graph that need no copy; how many there are."""
    aliases = find_aliases(graph)
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            readers.setdefault(aliases.root[source], []).append(node)
    changed = 0
    for start in graph.nodes:
        form = _torch.reduction_in_place(operator_of(start))
        if form is None:
            continue
        source = start.args[0]
        assert isinstance(source, fx.Node), type(source)
        memory = aliases.root[source]
        if _is_own(source, memory) and _ends_with(start, readers[memory], aliases):
            start.target = form
            changed += 1
    return changed


def fit_to_gloo(graph: fx.Graph) -> None:
    """Replace collectives that gloo does badly by ones that it does well."""
    gather_into_memory(graph)
    scatter_by_exchange(graph)


def gather_into_memory(graph: fx.Graph) -> int:
    """Make gathers on gloo write into memory that is given to them; how many there are.

    The functional gather is made by gloo's coalesced one, which corrupts the heap when
    several are in flight (torch 2.11 to 2.13). The operator with an ``out`` takes another
    path and holds.
    """
    gathers = [
        node
        for node in graph.find_nodes(op="call_function", target=_torch.ALL_GATHER)
        if _torch.uses_gloo(str(node.args[2]), node.meta["val"].device)
    ]
    for node in gathers:
        with graph.inserting_before(node):
            value = node.meta["val"]
            memory = graph.call_function(
                torch.ops.aten.new_empty.default, (node.args[0], list(value.shape))
            )
        memory.meta = {**node.meta, "val": value}
        node.target = _torch.ALL_GATHER_OUT
        node.kwargs = {"out": memory}
    return len(gathers)


def scatter_by_exchange(graph: fx.Graph) -> int:
    """Let two ranks on gloo exchange halves and add; how many scatters that replaces.

    Gloo reduces the whole tensor on every rank and keeps a part of it, which sends twice as
    much. A sum of two numbers has the same bits in any order; with more ranks it has not.
    One that the next iteration waits for stays: what it leaves has the scatter's shape.
    """
    changed = 0
    for start in graph.find_nodes(op="call_function", target=_torch.REDUCE_SCATTER):
        whole, operation, num_ranks, group = start.args
        waits = find_waits(start)
        if (num_ranks, operation) != (2, "sum") or set(start.users) != set(waits):
            continue
        assert isinstance(whole, fx.Node), type(whole)
        if not _torch.uses_gloo(str(group), tensor_value(whole).device):
            continue
        half = tensor_value(start).shape[0]
        start.target, start.args = (
            _torch.ALL_TO_ALL,
            (whole, [half] * 2, [half] * 2, group),
        )
        for node in (start, *waits):
            node.meta["val"] = tensor_value(whole)
        for wait in waits:
            make = NodeMaker(graph, owner_of(wait))
            readers = [*wait.users]
            with graph.inserting_before(wait.next):
                parts = [
                    make.call(torch.ops.aten.slice.Tensor, wait, 0, at, at + half)
                    for at in (0, half)
                ]
                total = make.call(torch.ops.aten.add.Tensor, *parts)
            for reader in readers:
                reader.replace_input_with(wait, total)
        changed += 1
    return changed


def _is_own(source: fx.Node, memory: fx.Node) -> bool:
    """Whether the graph made the memory, and all of it is reduced."""
    value, base = source.meta.get("val"), memory.meta.get("val")
    return (
        memory.op == "call_function"
        and isinstance(value, torch.Tensor)
        and isinstance(base, torch.Tensor)
        and value.is_contiguous()
        and value.numel() == base.numel()
    )


def _ends_with(start: fx.Node, readers: list[fx.Node], aliases: Aliases) -> bool:
    """Whether nothing else reads the memory once the reduction has started."""
    return all(
        _reads_until(reader, aliases) < aliases.position[start]
        and (operator_of(reader) is not None or reader.target is operator.getitem)
        for reader in readers
        if reader is not start
    )


def _reads_until(reader: fx.Node, aliases: Aliases) -> float:
    """The last place at which a node reads: a collective does so until its waits."""
    if not is_communication(reader):
        return aliases.position[reader]
    return max((aliases.position[n] for n in find_waits(reader)), default=math.inf)
