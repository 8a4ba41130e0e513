"""A bucket's reduction and its update of the parameters run in the next iteration."""

import difflib
from collections.abc import Sequence

from torch import fx

from torchspmd.errors import DeferralError, UsageError
from torchspmd.step.graph.list_items import Chains, first_items, split_by_group
from torchspmd.step.graph.options import check_names
from torchspmd.step.graph.queries import find_all_descendants
from torchspmd.step.graph.reports import ORDERS, Outcome
from torchspmd.step.iterate.deferral import complete_region, written_by
from torchspmd.step.iterate.iteration import IterGraphModule
from torchspmd.step.passes.optimizer_copies import remove_copy_from_optimizer
from torchspmd.step.passes.ordering import graph_optimization_pass
from torchspmd.step.passes.schedule import schedule_comm_wait


@graph_optimization_pass(
    prerequisites=[remove_copy_from_optimizer],
    apply_after=[schedule_comm_wait],
    undoes_others=False,
)
def iter_move_grads_and_optimizers(
    gm: IterGraphModule, target_comm_node: str, target_dest_node: str
) -> Outcome:
    """Move a collective and the updates that need it before a node of the next iteration.

    Args:
        gm: The step.
        target_comm_node: The name of the collective. Give the name of its wait to start
            it in this iteration and wait for it in the next.
        target_dest_node: The name of the node before which the work runs.

    Raises:
        DeferralError: When the destination reads a state that the work changes, or
            something needs the result in this iteration.
    """
    what = "iter_move_grads_and_optimizers"
    if not isinstance(gm, IterGraphModule):
        raise UsageError(
            f"{what}: pass an IterGraphModule, not {type(gm).__name__}: only that can "
            "leave work for the next iteration."
        )
    check_names(
        what, target_comm_node=target_comm_node, target_dest_node=target_dest_node
    )
    moving = find_by_name(gm.graph, target_comm_node)
    destination = find_by_name(gm.graph, target_dest_node)
    region = isolate_update(gm.graph, moving)
    place = gm.graph.move_to_next_iter_before(region, destination, strict=True)
    return moved(1, [(moving.name, region, place)])


def moved(
    matched: int, regions: Sequence[tuple[str, list[fx.Node], fx.Node]]
) -> Outcome:
    """What a pass says that moved regions to the next iteration."""
    lines = tuple(
        f"{name}: {len(region)} nodes run before {place.name} of the next iteration"
        for name, region, place in regions
    )
    return Outcome(matched, len(regions), detail=lines, keeps_bits=ORDERS)


def isolate_update(graph: fx.Graph, moving: fx.Node) -> list[fx.Node]:
    """All that needs a node's result, with optimizers split so that it is no more."""
    isolate_updates(graph, [moving])
    return update_region(graph, [moving])


def isolate_updates(graph: fx.Graph, movings: Sequence[fx.Node]) -> None:
    """Split optimizers so that what needs one of these nodes needs no other."""
    chains = Chains(graph)
    needed: dict[object, tuple[int, ...]] = {}
    for number, moving in enumerate(movings):
        for chain in {chains.chain_of(node) for node in first_items(moving)}:
            needed[chain] = (*needed.get(chain, ()), number)
    split_by_group(graph, lambda chain: needed.get(chain, ()), chains)


def update_region(graph: fx.Graph, moving: Sequence[fx.Node]) -> list[fx.Node]:
    """All that needs the result of nodes; raises where that updates no state."""
    region = complete_region(graph, find_all_descendants(_Holder(graph), moving))
    if not written_by(graph, region):
        raise UsageError(
            f"{moving[0].name} is not used by any fused optimizer, nor by another update "
            "of a state: there is nothing to move to the next iteration with it."
        )
    return region


class _Holder:
    """A graph by itself, for queries that take a module."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph


def find_by_name(graph: fx.Graph, name: str) -> fx.Node:
    """The node with this name; an error that names similar ones."""
    names: dict[str, fx.Node] = {node.name: node for node in graph.nodes}
    if name in names:
        return names[name]
    similar = difflib.get_close_matches(name, names, n=4, cutoff=0.3)
    raise DeferralError(
        f"Cannot find {name}: the graph has no node of this name. Did you mean "
        f"{', '.join(similar) or 'one of another graph'}?"
    )
