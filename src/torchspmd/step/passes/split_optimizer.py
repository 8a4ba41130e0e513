"""One optimizer over many parameters becomes two over fewer."""

from collections.abc import Collection
from typing import Any

from torch import fx

from torchspmd.errors import UnsupportedPassError, UsageError
from torchspmd.step.graph.list_items import Chains, first_items, split_by_chain
from torchspmd.step.graph.optimizer_blocks import (
    FusedOptimizerBlock,
    get_all_fused_optimizer_blocks,
    gradients_of,
)
from torchspmd.step.graph.options import check_nodes
from torchspmd.step.graph.reports import ORDERS, Outcome
from torchspmd.step.passes.ordering import graph_optimization_pass


def split_fused_optimizer(
    gm: Any,
    optim_block: FusedOptimizerBlock,
    split_gradients: Collection[fx.Node],
) -> tuple[FusedOptimizerBlock, FusedOptimizerBlock]:
    """Split a fused optimizer by gradients; use it again for more parts.

    Args:
        gm: The graph.
        optim_block: The optimizer, from ``get_all_fused_optimizer_blocks``.
        split_gradients: The gradients that the first part gets.

    Returns:
        The part with these gradients, and the rest.
    """
    if not isinstance(optim_block, FusedOptimizerBlock):
        raise UsageError(
            f"split_fused_optimizer(optim_block={type(optim_block).__name__}): pass a "
            "block that get_all_fused_optimizer_blocks gives."
        )
    check_nodes("split_fused_optimizer", split_gradients=split_gradients)
    wanted = set(split_gradients)
    if not wanted:
        raise UsageError("split_fused_optimizer: The given split_gradients is empty.")
    node = optim_block.optim.optim_node
    known = gradients_of(node)
    if known is None:
        raise UnsupportedPassError(
            f"split_fused_optimizer: {node.name} is no fused optimizer that is known. "
            "Only fused_adam, fused_adamw, fused_sgd and fused_adagrad are supported now."
        )
    strange = sorted(each.name for each in wanted - set(known))
    if strange:
        raise UsageError(
            f"split_fused_optimizer: {', '.join(strange)} are no gradients of {node.name}."
        )
    if wanted == set(known):
        raise UsageError(
            "split_fused_optimizer: At least one split optimizer does not have input: "
            f"all {len(known)} gradients of {node.name} are in split_gradients."
        )
    split_optimizer(gm, wanted)
    name = str(getattr(node.target, "__name__", "")).partition(".")[0]
    blocks = get_all_fused_optimizer_blocks(gm, name)
    halves = {
        side: next(
            block
            for block in blocks
            if (set(gradients_of(block.optim.optim_node) or ()) & set(known))
            and (set(gradients_of(block.optim.optim_node) or ()) <= wanted) is side
        )
        for side in (True, False)
    }
    return halves[True], halves[False]


@graph_optimization_pass(prerequisites=[], apply_after=[], undoes_others=False)
def split_optimizer(gm: Any, gradients: Collection[fx.Node]) -> Outcome:
    """Split every fused or foreach operator that works on some of these gradients."""
    if isinstance(gradients, fx.Node):
        raise UsageError(
            f"split_optimizer(gradients={gradients.name}): one node where nodes are taken. "
            f"Pass a list of nodes of the graph: [{gradients.name}]."
        )
    check_nodes("split_optimizer", gradients=gradients)
    graph = gm.graph
    chains = Chains(graph)
    chosen = {
        chains.chain_of(item)
        for gradient in gradients
        for item in first_items(gradient)
    }
    cut = split_by_chain(graph, chosen, chains)
    return Outcome(matched=len(chains.operators), changed=cut, keeps_bits=ORDERS)
