"""A graph as it was, to compare with and to go back to."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import fx

from torchspmd.step.graph.attributes import Attributes
from torchspmd.step.graph.constants import Constants
from torchspmd.step.graph.roles import OutputKind, OutputRole, roles_of, set_roles


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a graph and which of its nodes was copied from which.

    Attributes:
        graph: The copy; nodes keep their names and metadata.
        twins: The node of the copy for each node of the original.
        holder: What an ``IterGraphModule`` keeps its graph in; else the module itself.
        deferred: The deferred regions of an ``IterGraphModule``, by node name.
        is_frozen: Whether no more regions could be moved.
        constants: The tensors and modules that the graph reads by name.
        attributes: All that the module holds by name, read or not.
    """

    graph: fx.Graph
    twins: Mapping[fx.Node, fx.Node]
    holder: Any
    deferred: tuple[Any, ...]
    is_frozen: bool
    constants: Constants
    attributes: Attributes

    @classmethod
    def of(cls, gm: Any) -> Self:
        """Copy the graph of a graph module, or of an ``IterGraphModule``."""
        copy, twins = copy_graph(gm.graph)
        deferred = tuple(getattr(gm.graph, "regions", ()))
        is_frozen = getattr(gm.graph, "is_frozen", False)
        holder = getattr(gm, "main_gm", gm)
        kept = Constants.of(gm), Attributes.of(holder)
        return cls(copy, twins, holder, deferred, is_frozen, *kept)

    def restore(self, gm: Any) -> None:
        """Give a module back the graph that it had, and what it held by name."""
        if gm is not self.holder:
            gm.main_gm = self.holder
        self.attributes.put_back()
        self.constants.put_back()
        copy, _ = copy_graph(self.graph)
        gm.graph = copy
        if hasattr(gm.graph, "regions"):  # marks that the failed edit set are gone too
            gm.graph.regions[:] = self.deferred
            gm.graph.is_frozen = self.is_frozen
        gm.recompile()

    def find_twins(self, graph: fx.Graph) -> tuple[fx.Graph, Mapping[fx.Node, fx.Node]]:
        """A graph that was made of the one before, and the twin of each of its nodes.

        It may be a copy: then nodes are known by their names, or by their places where
        they got other names. One that was traced again has lost what was written on its
        nodes: it comes back as a copy that has this again, as far as nodes are the same.
        """
        twins = self._twins_in(graph)
        had, has = roles_of(self.graph), roles_of(graph)
        is_without = had != has and len(had) == len(has) and _is_plain(has)
        if not is_without and not any(map(_has_lost, twins, twins.values())):
            return graph, twins
        copy, made_from = copy_graph(graph)
        twins = {made_from[node]: twin for node, twin in twins.items()}
        _fill_in(twins)
        if is_without:
            set_roles(copy, had)
        return copy, twins

    def _twins_in(self, graph: fx.Graph) -> dict[fx.Node, fx.Node]:
        nodes, before = list(graph.nodes), list(self.graph.nodes)
        if list(map(_kind, nodes)) == list(map(_kind, before)) and not (
            {node.name for node in nodes} >= {node.name for node in before}
        ):
            return dict(zip(nodes, before, strict=True))
        by_name = {(node.name, _kind(node)): node for node in before}
        found = {node: by_name.get((node.name, _kind(node))) for node in nodes}
        found |= {node: self.twins[node] for node in nodes if node in self.twins}
        known = {node: twin for node, twin in found.items() if twin is not None}
        taken = set(known.values())
        old = _by_kind(node for node in before if node not in taken)
        new = _by_kind(node for node in nodes if node not in known)
        for kind, alike in new.items():  # such as the draws of a graph traced again
            if len(alike) == len(old.get(kind, ())):
                known |= zip(alike, old[kind], strict=True)
        return {node: known[node] for node in nodes if node in known}


def num_changes(before: fx.Graph, after: fx.Graph) -> int:
    """Nodes that are new, gone, moved, or take other arguments.

    >>> before = fx.symbolic_trace(lambda x: x + 1).graph
    >>> after = fx.symbolic_trace(lambda x: x + 2).graph
    >>> num_changes(before, before), num_changes(before, after)
    (0, 2)
    """
    old = [_facts(node) for node in before.nodes]
    new = [_facts(node) for node in after.nodes]
    if old == new:
        return 0
    is_moved = sorted(old) == sorted(new)
    return 1 if is_moved else max(1, len(set(old) ^ set(new)))


def copy_graph(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy with the same names and metadata, and its node for each original one."""
    copy = fx.Graph()
    twins: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        twins[node] = copy.node_copy(node, lambda old: twins[old])
    return copy, twins


def _facts(node: fx.Node) -> tuple[str, str, str, str]:
    return node.name, str(node.target), str(node.args), str(node.kwargs)


def _kind(node: fx.Node) -> tuple[str, Any]:
    return node.op, node.target


def _by_kind(nodes: Iterable[fx.Node]) -> dict[Any, list[fx.Node]]:
    found: dict[Any, list[fx.Node]] = {}
    for node in nodes:
        found.setdefault(_kind(node), []).append(node)
    return found


def _is_plain(roles: tuple[OutputRole, ...]) -> bool:
    return all(role.kind is OutputKind.RESULT for role in roles)


def _has_lost(node: fx.Node, twin: fx.Node) -> bool:
    return "val" in twin.meta and "val" not in node.meta


def _fill_in(twins: Mapping[fx.Node, fx.Node]) -> None:
    """Write on nodes what they lost, where they and all that they take are as before."""
    same: set[fx.Node] = set()
    for node, twin in twins.items():
        taken = fx.node.map_arg((node.args, node.kwargs), twins.get)
        is_same = same.issuperset(node.all_input_nodes)
        if is_same and repr(taken) == repr((twin.args, twin.kwargs)):
            same.add(node)
            if _has_lost(node, twin):
                node.meta = {**twin.meta, **node.meta}
