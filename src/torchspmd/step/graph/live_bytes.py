"""How many bytes are alive while each node of a graph runs."""

import operator
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import Kind
from torchspmd.step.graph.aliases import find_aliases
from torchspmd.step.graph.comm_blocks import CommBlock, get_all_comm_blocks
from torchspmd.step.graph.queries import HasGraph

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
