"""Nodes that a pass adds: with a fake value and an owner, like those of capture."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from torch import fx

from torchspmd import _torch
from torchspmd.comm import GLOBAL
from torchspmd.step.graph.owners import META_KEY, Owner, owner_of


class NodeMaker:
    """Adds nodes to a graph that belong to one owner.

    Args:
        graph: The graph; the nodes go where its insertion point is.
        owner: Whom they belong to.
    """

    def __init__(self, graph: fx.Graph, owner: Owner) -> None:
        self._graph, self._owner = graph, owner

    def call(self, target: Any, *args: Any, **options: Any) -> fx.Node:
        """Add a call; its fake value is computed from those of its arguments."""
        node = self._graph.call_function(target, args, options)
        values: Any = fx.node.map_arg(args, lambda source: source.meta["val"])
        node.meta["val"] = _torch.fake_result(target, values, **options)
        node.meta[META_KEY] = self._owner
        return node


def common_owner(nodes: Sequence[fx.Node]) -> Owner:
    """The owner of a node made from others: the last one's phase, their common module.

    >>> graph = fx.Graph()
    >>> nodes = [graph.placeholder(name) for name in "ab"]
    >>> for node, name in zip(nodes, ("Net.blocks.0", "Net.blocks.1"), strict=True):
    ...     node.meta[META_KEY] = Owner(module=name)
    >>> common_owner(nodes).module
    'Net.blocks'
    """
    owners = [owner_of(node) for node in nodes]
    paths = [owner.module.split(".") for owner in owners]
    common = [names[0] for names in takewhile(_is_one, zip(*paths, strict=False))]
    return Owner(owners[-1].phase, ".".join(common) or GLOBAL)


def _is_one(names: tuple[str, ...]) -> bool:
    return len(set(names)) == 1
