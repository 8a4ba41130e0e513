"""A graph of one iteration with marks on what runs in the next one."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Self

from torch import fx

from torchspmd.errors import DeferralError, PassWarning, UsageError
from torchspmd.step.deferral.regions import DeferredRegion, Iteration, Move, check_moves
from torchspmd.step.graph.argument_checks import check_node, check_nodes
from torchspmd.step.graph.metadata import readable_name
from torchspmd.step.graph.nodes import copy_nodes


class IterGraph(fx.Graph):
    """An ``fx.Graph`` whose nodes can be marked to run in the next iteration.

    The graph stays one functional iteration: every edit and every check works on it as on
    any other graph. What runs first, always, last and at a flush is derived from the
    marks when the module is finished.

    Attributes:
        regions: The marked work, in the order of the moves.
        is_frozen: Whether no more work can be marked.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.regions: list[DeferredRegion] = []
        self.is_frozen = False

    @classmethod
    def copy_of(cls, graph: fx.Graph, regions: Sequence[DeferredRegion] = ()) -> Self:
        """A copy of a graph, with the same names and metadata."""
        copy = cls()
        copy_nodes(graph, copy)
        copy.regions = list(regions)
        return copy

    def move_to_next_iter_before(
        self, subgraph: Sequence[fx.Node], target_node: fx.Node, *, strict: bool = False
    ) -> fx.Node:
        """Run these nodes in the next iteration, before a node of it.

        Args:
            subgraph: The nodes; what uses one of them is among them, or is the output.
            target_node: Where in the next iteration they run.
            strict: Refuse a place after something reads a state that the nodes write.
                Otherwise the latest place before that reader is taken, with a warning:
                at the place asked for, training would go on with stale weights.

        Returns:
            The node before which they will run.

        Raises:
            DeferralError: When the nodes cannot wait for the next iteration at all.
        """
        check_nodes("move_to_next_iter_before", subgraph=subgraph)
        check_node("move_to_next_iter_before", target_node=target_node)
        (place,) = self.move_all([(subgraph, target_node)], strict=strict)
        return place

    def move_all(self, moves: Sequence[Move], *, strict: bool = False) -> list[fx.Node]:
        """The same for many at once, which are checked together: all of them or none."""
        if self.is_frozen:
            raise DeferralError(
                "The cross-iteration movement has been frozen for the given IterGraph. "
                "Move nodes before finalize_setup()."
            )
        iteration = Iteration.of(self)
        regions = check_moves(iteration, moves, self.regions)
        places = [iteration.by_name[region.before] for region in regions]
        for (nodes, target), place in zip(moves, places, strict=True):
            if place is not target:
                text = _stale(nodes, target, place)
                if strict:
                    raise DeferralError(text)
                warnings.warn(
                    f"{text} They are moved there.", PassWarning, stacklevel=3
                )
        self.regions += regions
        return places

    def freeze_cross_iter_movement(self) -> None:
        """End moving; edits inside the iteration stay possible."""
        self.is_frozen = True

    def move_before(self, nodes: Sequence[fx.Node], target_node: fx.Node) -> None:
        """Place nodes just before another one, in the order given."""
        self._check_move("move_before", nodes, target_node)
        for node in nodes:
            target_node.prepend(node)

    def move_after(self, nodes: Sequence[fx.Node], target_node: fx.Node) -> None:
        """Place nodes just after another one, in the order given."""
        self._check_move("move_after", nodes, target_node)
        for node in nodes:
            target_node.append(node)
            target_node = node

    def _check_move(self, what: str, nodes: Sequence[fx.Node], target: fx.Node) -> None:
        check_nodes(what, nodes=nodes)
        check_node(what, target_node=target)
        foreign = [node.name for node in (*nodes, target) if node.graph is not self]
        if foreign:
            raise UsageError(
                f"{what}: {', '.join(foreign)}: not of this graph. Pass nodes of the graph "
                "that they are moved in."
            )

    def node_prepend(self, target_node: fx.Node, node: fx.Node) -> None:
        """Place one node just before another."""
        target_node.prepend(node)

    def node_append(self, target_node: fx.Node, node: fx.Node) -> None:
        """Place one node just after another."""
        target_node.append(node)

    def node_set_args(self, node: fx.Node, args: tuple[Any, ...]) -> None:
        """Give a node other arguments."""
        node.args = args

    def node_set_kwargs(self, node: fx.Node, kwargs: dict[str, Any]) -> None:
        """Give a node other keyword arguments."""
        node.kwargs = kwargs

    def node_replace_all_uses_with(
        self,
        node: fx.Node,
        replace_with: fx.Node,
        delete_user_cb: Callable[[fx.Node], bool] = lambda user: True,
        *,
        propagate_meta: bool = False,
    ) -> list[fx.Node]:
        """Let the users of one node use another; the users that were changed."""
        return node.replace_all_uses_with(
            replace_with, delete_user_cb, propagate_meta=propagate_meta
        )


def _stale(nodes: Sequence[fx.Node], target: fx.Node, place: fx.Node) -> str:
    first = readable_name(nodes[0])
    return (
        f"move_to_next_iter_before: {len(nodes)} nodes from {first} on cannot run before "
        f"{readable_name(target)} of the next iteration: {readable_name(place)} reads a "
        "state that they write, and would see its old value. The latest legal place is "
        f"before {readable_name(place)}."
    )


def deferral_facts(graph: fx.Graph) -> tuple[str, ...]:
    """What a graph leaves for the next iteration, a line for each region.

    Without names of nodes, which count all nodes of a graph, also those that compute sizes.
    """
    regions = graph.regions if isinstance(graph, IterGraph) else ()
    targets = {node.name: str(node.target) for node in graph.nodes}
    return tuple(
        f"{len(region.nodes)} nodes from {targets.get(str(region.nodes[0]))} on run in the "
        f"next step, before {targets.get(str(region.before))}"
        for region in regions
    )
