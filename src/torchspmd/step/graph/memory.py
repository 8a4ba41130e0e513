"""How much memory a graph needs at its worst moment, read from the graph."""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import Kind, Phase
from torchspmd.step.graph.aliases import Aliases, find_aliases
from torchspmd.step.graph.collectives import CommBlock, get_all_comm_blocks
from torchspmd.step.graph.edit import HasGraph
from torchspmd.step.graph.metadata import owner_of

ROLE_KEY = "torchspmd_role"  # on an input: what the tensor is to the step

_MADE_IN = {
    Phase.FORWARD: "activation",
    Phase.RECOMPUTE: "activation",
    Phase.BACKWARD: "gradient",
    Phase.OPTIMIZER: "temporary of the optimizer",
}


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The worst moment of a graph.

    What a kernel takes for itself while it runs is not in it.

    Attributes:
        total_bytes: Bytes alive at that moment, the step's own tensors included.
        node: The node that runs then.
        where: The module and the phase that it belongs to.
        alive: The bytes by what they are.
    """

    total_bytes: int
    node: str
    where: str
    alive: Mapping[str, int]

    def __str__(self) -> str:
        """One line for people.

        >>> print(PeakMemory(3 << 20, "mm_2", "MLP.up (backward)", {"parameter": 1 << 20}))
        3.0 MiB at mm_2, MLP.up (backward): parameter 1.0
        """
        parts = sorted(self.alive.items(), key=lambda item: -item[1])
        text = ", ".join(f"{kind} {size / 2**20:.1f}" for kind, size in parts if size)
        total = f"{self.total_bytes / 2**20:.1f} MiB"
        return f"{total} at {self.node}, {self.where}: {text}"


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes that are alive from one node to another."""

    first: int
    last: int
    size: int
    kind: str


def predict_peak(graph: fx.Graph, released: frozenset[int] = frozenset()) -> PeakMemory:
    """The worst moment of a graph whose nodes have fake values in ``meta["val"]``.

    Args:
        graph: The graph that is run, in the order in which it is run.
        released: Inputs, by place, that are given up before the run.
    """
    nodes = list(graph.nodes)
    spans = _spans(graph, find_aliases(graph), released)
    changes = [0] * (len(nodes) + 1)
    for span in spans:
        changes[span.first] += span.size
        changes[span.last + 1] -= span.size
    totals = list(accumulate(changes))[:-1]
    worst = max(range(len(nodes)), key=totals.__getitem__)
    alive: dict[str, int] = {}
    for span in spans:
        if span.first <= worst <= span.last:
            alive[span.kind] = alive.get(span.kind, 0) + span.size
    owner = owner_of(nodes[worst])
    where = f"{owner.module} ({owner.phase.value})"
    return PeakMemory(totals[worst], nodes[worst].name, where, alive)


def _spans(graph: fx.Graph, aliases: Aliases, released: frozenset[int]) -> list[_Span]:
    end = len(aliases.position) - 1
    inputs = {node: n for n, node in enumerate(graph.find_nodes(op="placeholder"))}
    spans = []
    for node, place in aliases.position.items():
        if node.op == "placeholder":
            if inputs[node] not in released:
                kind = str(node.meta.get(ROLE_KEY, "input"))
                spans.append(_Span(0, end, _size(node), kind))
        elif node.op == "get_attr":
            spans.append(_Span(0, end, _size(node), "constant"))
        elif aliases.root[node] is node and node.op == "call_function":
            kind = _MADE_IN[owner_of(node).phase]
            last = aliases.last_read.get(node, place)
            spans.append(_Span(_birth(node, aliases), last, _size(node), kind))
            spans += _unused_items(node, aliases, kind)
    return spans


def _birth(node: fx.Node, aliases: Aliases) -> int:
    """An item of a tuple exists since the operator that made the tuple."""
    while node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return aliases.position[node]


def _unused_items(node: fx.Node, aliases: Aliases, kind: str) -> list[_Span]:
    """Results that nobody takes live until the last of the others was taken."""
    values = node.meta.get("val")
    if not isinstance(values, (list, tuple)) or node.target is operator.getitem:
        return []
    taken = {user.args[1] for user in node.users if user.target is operator.getitem}
    unused = [v for n, v in enumerate(values) if n not in taken]
    size = sum(_bytes(leaf) for leaf in _torch.flatten_tree(unused)[0])
    place = aliases.position[node]
    return [_Span(place, aliases.last_read.get(node, place), size, kind)]


def _size(node: fx.Node) -> int:
    return _bytes(node.meta.get("val"))


def _bytes(value: Any) -> int:
    return _torch.storage_bytes(value) if isinstance(value, torch.Tensor) else 0


# ----------------------------------------------------------------------------
# How many bytes are alive while each node of a graph runs.

_Value = tuple[fx.Node, int, list[fx.Node]]  # made by, bytes, needed by


def live_bytes(gm: HasGraph) -> dict[fx.Node, int]:
    """Bytes of what the graph itself made and still needs, at each node.

    Inputs of the graph are not counted. A collective holds its result from its start on,
    and its input until its wait, except for an all-reduce, which works on a copy.
    """
    return LiveBytes(gm).now()


class LiveBytes:
    """The same, again and again while nodes are moved; nothing else may be edited."""

    def __init__(self, gm: HasGraph) -> None:
        self._graph = gm.graph
        root = find_aliases(gm.graph).root
        needed: dict[fx.Node, dict[fx.Node, None]] = {node: {} for node in root}
        for node in root:
            for source in node.all_input_nodes:
                needed[root[source]][node] = None
        for block in get_all_comm_blocks(gm):
            for held in held_until_wait(block):
                needed[root[held]].update(dict.fromkeys(block.waits))
        self._values: list[_Value] = []
        for node in root:
            size = value_bytes(node.meta.get("val"))
            made_here = root[node] is node and not _is_item(node)
            if made_here and node.op == "call_function" and size:
                self._values.append((node, size, _ends(node, needed)))

    def now(self) -> dict[fx.Node, int]:
        """Bytes alive at each node, in graph order."""
        position = {node: place for place, node in enumerate(self._graph.nodes)}
        changes = [0] * (len(position) + 1)
        for node, size, ends in self._values:
            changes[position[node]] += size
            changes[max(map(position.__getitem__, ends)) + 1] -= size
        return dict(zip(position, accumulate(changes), strict=False))


def held_until_wait(block: CommBlock) -> Iterable[fx.Node]:
    """What a collective reads until it is waited for."""
    reads_copy = block.kind is Kind.ALL_REDUCE or not block.waits
    return () if reads_copy else block.inputs


def value_bytes(value: Any) -> int:
    """The bytes of a tensor, or of all tensors in lists."""
    if isinstance(value, (list, tuple)):
        return sum(map(value_bytes, value))
    return _torch.storage_bytes(value) if isinstance(value, torch.Tensor) else 0


def _is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _ends(node: fx.Node, needed: dict[fx.Node, dict[fx.Node, None]]) -> list[fx.Node]:
    """The nodes until which a value is needed; several results live together."""
    items = [user for user in node.users if _is_item(user)]
    return [
        node,
        *needed[node],
        *(end for each in items for end in _ends(each, needed)),
    ]
