"""How much memory a graph needs at its worst moment, read from the graph."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import Phase
from torchspmd.step.graph.aliases import Aliases, find_aliases
from torchspmd.step.graph.owners import owner_of

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
