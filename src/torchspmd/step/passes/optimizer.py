"""One optimizer over many parameters becomes two over fewer."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from torchspmd.errors import UnsupportedPassError, UsageError
from torchspmd.step.graph.aliases import find_aliases, is_view
from torchspmd.step.graph.argument_checks import check_nodes
from torchspmd.step.graph.metadata import (
    OutputKind,
    output_values,
    roles_of,
    same_form,
    written_state,
)
from torchspmd.step.graph.nodes import replace_uses
from torchspmd.step.graph.optimizer_lists import (
    Chains,
    FusedOptimizerBlock,
    first_items,
    get_all_fused_optimizer_blocks,
    gradients_of,
    split_by_group,
)
from torchspmd.step.graph.reports import ORDERS, Outcome
from torchspmd.step.passes.runner import graph_optimization_pass


def split_fused_optimizer(
    gm: Any, optim_block: FusedOptimizerBlock, split_gradients: Collection[fx.Node]
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
    cut = split_by_group(graph, chosen.__contains__, chains)
    return Outcome(matched=len(chains.operators), changed=cut, keeps_bits=ORDERS)


# ----------------------------------------------------------------------------
# Copies after an optimizer that add nothing: its new values are the outputs themselves.

_COPIES = (torch.ops.aten.copy.default, torch.ops.aten.clone.default)


@graph_optimization_pass(prerequisites=[], apply_after=[], undoes_others=False)
def remove_copy_from_optimizer(gm: Any) -> Outcome:
    """Let each state's next value be what the optimizer made, not a copy of it.

    New values are written into the user's tensors when the step runs, in place where
    nothing reads the old value any more; a copy inside the graph only takes memory.
    A copy stays that keeps what the step returns, or leaves as a gradient, apart from
    the memory of a state.
    """
    graph: fx.Graph = gm.graph
    values = output_values(graph)
    memory = _OutputMemory(graph)
    matched = changed = 0
    refused = []
    dropped: dict[fx.Node, fx.Node] = {}
    for index, state in written_state(graph).items():
        copy = values[index]
        if not isinstance(copy, fx.Node) or copy.target not in _COPIES:
            continue
        matched += 1
        source = copy.args[-1] if copy.target is _COPIES[0] else copy.args[0]
        assert isinstance(source, fx.Node)
        if not same_form(copy, source):
            refused.append(f"{copy.name} of {source.name} for {state.name} converts it")
            continue
        if source.op == "placeholder" or is_view(source):
            refused.append(f"{source.name} for {state.name} is memory of another value")
            continue
        taken = memory.join(copy, source)
        if taken is not None:
            refused.append(
                f"{source.name} for {state.name} is handed out by the step ({taken}), "
                "which must not be the memory of a state"
            )
            continue
        dropped[copy] = source
        changed += 1
    replace_uses(dropped)
    return Outcome(matched, changed, tuple(refused), keeps_bits=ORDERS)


class _OutputMemory:
    """Which outputs lie in the memory of a node, while copies go away."""

    def __init__(self, graph: fx.Graph) -> None:
        self._root: Mapping[fx.Node, fx.Node] = find_aliases(graph).root
        self._joined: dict[fx.Node, fx.Node] = {}  # a copy -> the memory of its source
        self._states: set[fx.Node] = set()
        self._handed_out: dict[fx.Node, str] = {}  # to the caller, as they are
        pairs = zip(output_values(graph), roles_of(graph), strict=True)
        for place, (value, role) in enumerate(pairs):
            if not isinstance(value, fx.Node):
                continue
            if role.kind is OutputKind.STATE:
                self._states.add(self._root[value])
            else:
                name = f"output {place}, a {role.kind.value}"
                self._handed_out.setdefault(self._root[value], name)

    def join(self, copy: fx.Node, source: fx.Node) -> str | None:
        """Let a state's copy be its source; or say which output forbids it.

        What already was the memory of the same state may stay so, as in eager.
        """
        one, two = self._of(copy), self._of(source)
        taken = self._handed_out.get(two)
        if taken is None and two in self._states:
            taken = self._handed_out.get(one)
        if taken is None:
            self._joined[one] = two
            self._states.add(two)
            if one in self._handed_out:
                self._handed_out[two] = self._handed_out[one]
        return taken

    def _of(self, node: fx.Node) -> fx.Node:
        root = self._root[node]
        while root in self._joined:
            root = self._joined[root]
        return root
