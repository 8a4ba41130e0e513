"""Gradients that are differentiated again (``create_graph=True``): a gradient penalty.

Those of ``torch.autograd.grad`` stay what each rank computed, with their graph. What is
accumulated into ``grad`` is reduced over the ranks, and has no graph any more.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import get_gradient_edge

from torchspmd import _torch
from torchspmd.errors import CaptureError
from torchspmd.step.capture.equal_gradients import makes_equal, written_by
from torchspmd.step.capture.refusals import line_of_caller
from torchspmd.step.graph.aliases import find_aliases
from torchspmd.step.graph.owners import last_node

_INNER = "torchspmd_inner_gradient"


def keep_inner(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as this rank computed it, in a node that tells so."""
    kept = gradient.clone()
    node = last_node(_torch.current_graph())
    if node is not None:
        node.meta[_INNER] = True
    return kept


def refuse_graphs(parameter: torch.Tensor, name: str) -> Any:
    """Refuse ``backward(create_graph=True)``; gives what removes the hook again."""
    node = get_gradient_edge(
        parameter
    ).node  # a leaf's node lives only while it is held

    def check(gradients: Any) -> None:
        if torch.is_grad_enabled():
            raise CaptureError(
                f"compile: backward(create_graph=True) would leave a gradient in {name}"
                ".grad that is reduced over ranks and cannot be differentiated again\n\n"
                f"  * {line_of_caller()}\n\nTake gradients that a loss is made of with "
                "torch.autograd.grad(loss, parameters, create_graph=True): they stay those "
                "of this rank, and what the last backward() makes of them is reduced."
            )

    handle = node.register_prehook(check)

    def remove(held: Any = node) -> None:
        handle.remove()

    return remove


def check_inner_gradients(
    graph: fx.Graph, group: str, outputs: Mapping[int, str]
) -> None:
    """Refuse parameters that would be updated by inner gradients, on each rank by its own.

    Args:
        graph: The traced step.
        group: The ranks that gradients are reduced over.
        outputs: The names of outputs that must be equal on these ranks, by place.
    """
    if not any(_INNER in node.meta for node in graph.nodes):
        return
    root = find_aliases(graph).root
    own: set[fx.Node] = set()  # memory with values of this rank alone
    for node in graph.nodes:
        if makes_equal(node, group):
            own -= written_by(node, root)
        elif _INNER in node.meta or any(root[n] in own for n in node.all_input_nodes):
            own |= {root[node], *written_by(node, root)}
    (values,) = graph.output_node().args
    assert isinstance(values, (list, tuple))
    names = [
        name
        for place, name in outputs.items()
        if isinstance(value := values[place], fx.Node) and root[value] in own
    ]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise CaptureError(
            f"compile: {names[0]}{more} would be updated by gradients of "
            "torch.autograd.grad(..., create_graph=True), which each rank has of its own "
            "batch, so that ranks would train other models. Make a loss of them and call "
            "its backward(), which reduces; or leave create_graph out."
        )
