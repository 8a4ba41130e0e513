"""Questions that passes ask of a graph."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import fx

from torchspmd.errors import UsageError
from torchspmd.step.graph.options import check_graph, check_module, check_nodes


class HasGraph(Protocol):
    """A graph module, or an ``IterGraphModule``."""

    @property
    def graph(self) -> fx.Graph:
        """The graph itself."""


def find_node(
    graph: fx.Graph,
    predicate: Callable[[fx.Node], bool],
    reverse_order: bool = False,
) -> list[fx.Node]:
    """All nodes for which a predicate holds, in (reverse) graph order.

    >>> graph = fx.symbolic_trace(lambda x: abs(x) + 1).graph
    >>> [node.name for node in find_node(graph, lambda node: node.op == "call_function")]
    ['abs_1', 'add']
    """
    check_graph("find_node", graph=graph)
    if not callable(predicate):
        raise UsageError(
            f"find_node(predicate={predicate!r}): pass a function that takes a node and "
            "says whether to find it, such as lambda node: node.name == 'mm'."
        )
    nodes = reversed(graph.nodes) if reverse_order else graph.nodes
    return [node for node in nodes if predicate(node)]


def find_all_descendants(
    gm: HasGraph, parent_nodes: Sequence[fx.Node]
) -> list[fx.Node]:
    """The given nodes and all that use them, except the output, in graph order.

    >>> gm = fx.symbolic_trace(lambda x, y: abs(x) + y)
    >>> start = find_node(gm.graph, lambda node: node.name == "abs_1")
    >>> [node.name for node in find_all_descendants(gm, start)]
    ['abs_1', 'add']
    """
    check_module("find_all_descendants", gm=gm)
    check_nodes("find_all_descendants", parent_nodes=parent_nodes)
    if not parent_nodes:
        raise UsageError("find_all_descendants: No parent nodes are given.")
    found = set(parent_nodes)
    waiting = list(parent_nodes)
    while waiting:
        for user in waiting.pop().users:
            if user.op != "output" and user not in found:
                found.add(user)
                waiting.append(user)
    return [node for node in gm.graph.nodes if node in found]
