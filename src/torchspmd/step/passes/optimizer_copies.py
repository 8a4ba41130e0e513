"""Copies after an optimizer that add nothing: its new values are the outputs themselves."""

from typing import Any

import torch
from torch import fx

from torchspmd.step.graph.reports import ORDERS, Outcome
from torchspmd.step.graph.roles import output_values, written_state
from torchspmd.step.iterate.deferral import is_view
from torchspmd.step.passes.ordering import graph_optimization_pass

_COPIES = (torch.ops.aten.copy.default, torch.ops.aten.clone.default)


@graph_optimization_pass(prerequisites=[], apply_after=[], undoes_others=False)
def remove_copy_from_optimizer(gm: Any) -> Outcome:
    """Let each state's next value be what the optimizer made, not a copy of it.

    New values are written into the user's tensors when the step runs, in place where
    nothing reads the old value any more; a copy inside the graph only takes memory.
    """
    graph: fx.Graph = gm.graph
    values = output_values(graph)
    matched = changed = 0
    refused = []
    for index, state in written_state(graph).items():
        copy = values[index]
        if not isinstance(copy, fx.Node) or copy.target not in _COPIES:
            continue
        matched += 1
        source = copy.args[-1] if copy.target is _COPIES[0] else copy.args[0]
        assert isinstance(source, fx.Node)
        if not _same_form(copy, source):
            refused.append(f"{copy.name} of {source.name} for {state.name} converts it")
            continue
        if source.op == "placeholder" or is_view(source):
            refused.append(f"{source.name} for {state.name} is memory of another value")
            continue
        copy.replace_all_uses_with(source)
        changed += 1
    return Outcome(matched, changed, tuple(refused), keeps_bits=ORDERS)


def _same_form(copy: fx.Node, source: fx.Node) -> bool:
    """Whether a copy has the shape, the dtype and the strides of what it copies."""
    made, given = copy.meta.get("val"), source.meta.get("val")
    if not isinstance(made, torch.Tensor) or not isinstance(given, torch.Tensor):
        return False
    return (made.shape, made.dtype, made.stride()) == (
        given.shape,
        given.dtype,
        given.stride(),
    )
