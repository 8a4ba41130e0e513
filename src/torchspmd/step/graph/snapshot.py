"""A graph as it was, to compare with and to go back to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import fx

from torchspmd.step.graph.attributes import Attributes
from torchspmd.step.graph.constants import Constants


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a graph and which of its nodes was copied from which.

    Attributes:
        graph: The copy; nodes keep their names and metadata.
        twins: The node of the copy for each node of the original.
        deferred: The deferred regions of an ``IterGraphModule``, by node name.
        constants: The tensors and modules that the graph reads by name.
        attributes: All that the module holds by name, read or not.
    """

    graph: fx.Graph
    twins: Mapping[fx.Node, fx.Node]
    deferred: tuple[Any, ...]
    constants: Constants
    attributes: Attributes

    @classmethod
    def of(cls, gm: Any) -> Self:
        """Copy the graph of a graph module, or of an ``IterGraphModule``."""
        copy, twins = copy_graph(gm.graph)
        deferred = tuple(getattr(gm.graph, "regions", ()))
        attributes = Attributes.of(getattr(gm, "main_gm", gm))
        return cls(copy, twins, deferred, Constants.of(gm), attributes)

    def restore(self, gm: Any) -> None:
        """Give a module back the graph that it had, and what it held by name."""
        self.attributes.put_back()
        self.constants.put_back()
        copy, _ = copy_graph(self.graph)
        gm.graph = copy
        if hasattr(gm.graph, "regions"):  # marks that the failed edit set are gone too
            gm.graph.regions[:] = self.deferred
        gm.recompile()

    def num_changes(self, graph: fx.Graph) -> int:
        """Nodes that are new, gone, moved, or take other arguments."""
        before = [_facts(node) for node in self.graph.nodes]
        after = [_facts(node) for node in graph.nodes]
        if before == after:
            return 0
        moved = before != after and sorted(before) == sorted(after)
        return max(1, len(set(before) ^ set(after))) if not moved else 1


def copy_graph(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy with the same names and metadata, and its node for each original one."""
    copy = fx.Graph()
    twins: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        twins[node] = copy.node_copy(node, lambda old: twins[old])
    return copy, twins


def _facts(node: fx.Node) -> tuple[str, str, str, str]:
    return node.name, str(node.target), str(node.args), str(node.kwargs)
