"""How many bytes are alive while each node of a graph runs, read from the graph."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import Kind, Phase
from torchspmd.step.graph.aliases import communication_of, find_aliases, find_waits
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
class _Value:
    """Memory that the graph itself takes: alive from one node to the last of others."""

    made: fx.Node
    size: int
    ends: tuple[fx.Node, ...]

    def is_alive(self, place: int, position: Mapping[fx.Node, int]) -> bool:
        last = max(map(position.__getitem__, self.ends))
        return position[self.made] <= place <= last


def predict_peak(graph: fx.Graph, released: frozenset[int] = frozenset()) -> PeakMemory:
    """The worst moment of a graph whose nodes have fake values in ``meta["val"]``.

    Args:
        graph: The graph that is run, in the order in which it is run.
        released: Inputs, by place, that are given up before the run.
    """
    memory = LiveBytes(graph)
    live = memory.now()
    worst = max(live, key=live.__getitem__)
    alive = _held_throughout(graph, released)
    for value in memory.alive_at(worst):
        kind = _MADE_IN[owner_of(value.made).phase]
        alive[kind] = alive.get(kind, 0) + value.size
    owner = owner_of(worst)
    where = f"{owner.module} ({owner.phase.value})"
    return PeakMemory(sum(alive.values()), worst.name, where, alive)


def _held_throughout(graph: fx.Graph, released: frozenset[int]) -> dict[str, int]:
    """Bytes of inputs and constants, by what they are: the caller holds them."""
    kept = [
        (node, str(node.meta.get(ROLE_KEY, "input")))
        for place, node in enumerate(graph.find_nodes(op="placeholder"))
        if place not in released
    ]
    kept += [(node, "constant") for node in graph.find_nodes(op="get_attr")]
    sizes: dict[str, int] = {}
    for node, kind in kept:
        sizes[kind] = sizes.get(kind, 0) + value_bytes(node.meta.get("val"))
    return sizes


class LiveBytes:
    """Bytes of what a graph itself made and still needs, at each node.

    Inputs of the graph are not counted. A collective holds its result from its start on,
    and its input until its wait, except for an all-reduce, which works on a copy. Nodes may
    be moved meanwhile; nothing else may be edited.

    Args:
        graph: The graph.
        with_updates: Whether what optimizers make counts. Where rows do not divide, ranks
            have other shards, and so other updates: what all of them must choose alike
            cannot depend on it.
    """

    def __init__(self, graph: fx.Graph, *, with_updates: bool = True) -> None:
        self._graph = graph
        self._values = [
            value
            for value in _values(graph)
            if with_updates or owner_of(value.made).phase is not Phase.OPTIMIZER
        ]

    def now(self) -> dict[fx.Node, int]:
        """Bytes alive at each node, in graph order."""
        position = {node: place for place, node in enumerate(self._graph.nodes)}
        changes = [0] * (len(position) + 1)
        for value in self._values:
            changes[position[value.made]] += value.size
            changes[max(map(position.__getitem__, value.ends)) + 1] -= value.size
        return dict(zip(position, accumulate(changes), strict=False))

    def alive_at(self, node: fx.Node) -> list[_Value]:
        """What is alive while a node runs."""
        position = {each: place for place, each in enumerate(self._graph.nodes)}
        place = position[node]
        return [each for each in self._values if each.is_alive(place, position)]


def _values(graph: fx.Graph) -> list[_Value]:
    root = find_aliases(graph).root
    needed: dict[fx.Node, dict[fx.Node, None]] = {node: {node: None} for node in root}
    for node in root:
        for source in node.all_input_nodes:
            needed[root[source]][node] = None
        for held in held_until_wait(node):
            needed[root[held]].update(dict.fromkeys(find_waits(node)))
    values = []
    for node in root:
        if root[node] is not node or node.op != "call_function":
            continue
        size, made, ends = _untaken_bytes(node), node, needed[node]
        while made.target is operator.getitem:
            # An item is there from its tuple's node on, and at least as long as that.
            (made,) = made.all_input_nodes
            ends = {**ends, **needed[made]}
        if size:
            values.append(_Value(made, size, tuple(ends)))
    return values


def _untaken_bytes(node: fx.Node) -> int:
    """The bytes of a node's result, without those items that have nodes of their own."""
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        taken = {user.args[1] for user in node.users if user.target is operator.getitem}
        value = [item for place, item in enumerate(value) if place not in taken]
    return value_bytes(value)


def held_until_wait(start: fx.Node) -> list[fx.Node]:
    """What a collective reads until it is waited for; nothing for other nodes.

    An all-reduce works on a copy of its input, or in place, where its result is the input.
    """
    found = communication_of(start)
    if found is None or found.kind is Kind.ALL_REDUCE or not find_waits(start):
        return []
    return list(start.all_input_nodes)


def value_bytes(value: Any) -> int:
    """The bytes of a tensor, or of all tensors in lists."""
    if isinstance(value, (list, tuple)):
        return sum(map(value_bytes, value))
    return _torch.storage_bytes(value) if isinstance(value, torch.Tensor) else 0
