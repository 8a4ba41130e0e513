"""A graph as code that Inductor makes."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.errors import CaptureError
from torchspmd.step.capture.progress import note, phase
from torchspmd.step.graph.ledger import is_communication
from torchspmd.step.graph.roles import output_values

_CLONE = torch.ops.aten.clone.default


def check_compilable(graph: fx.GraphModule) -> None:
    """Refuse a graph that Inductor cannot compile."""
    if _torch.has_symbols(graph):
        raise CaptureError(
            "the Inductor backend cannot compile a graph that reads numbers from tensors: "
            "the optimizer reads its step counter on the host. Use an optimizer with "
            "fused=True or capturable=True, or backend='graph'."
        )


def lower(graph: fx.GraphModule) -> Callable[..., Any]:
    """A graph compiled by Inductor."""
    check_compilable(graph)
    graph, copied = _without_host_copies(graph)
    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    with phase("compiling"):
        keep_order = any(map(is_communication, graph.graph.nodes))
        made, from_cache = _torch.compile_with_inductor(
            graph, inputs, keep_order=keep_order
        )
    note(f"Inductor: {from_cache}")
    return _Copying(made, copied) if copied else made


def _without_host_copies(
    graph: fx.GraphModule,
) -> tuple[fx.GraphModule, frozenset[int]]:
    """A graph that gives numbers of the host as they came, and the places to copy.

    A learning rate that is kept for the next step is copied. In a graph for a GPU it would
    be the one kernel for the host: compiling it takes longer than all others.
    """
    edited = copy.deepcopy(graph.graph)
    copies = [node for node in edited.nodes if _is_host_copy(node)]
    places = frozenset(
        place for place, value in enumerate(output_values(edited)) if value in copies
    )
    for node in copies:
        node.replace_all_uses_with(node.all_input_nodes[0])
        edited.erase_node(node)
    return fx.GraphModule(graph, edited), places


def _is_host_copy(node: fx.Node) -> bool:
    """Whether a number that came in is copied and given back, and no more."""
    if node.target is not _CLONE or any(user.op != "output" for user in node.users):
        return False
    source = node.args[0]
    if not isinstance(source, fx.Node) or source.op != "placeholder":
        return False
    value = source.meta.get("val")
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and value.ndim == 0
    )


class _Copying:
    """Compiled code that gives some inputs back, of which the caller gets copies."""

    def __init__(self, run: Callable[..., Any], places: frozenset[int]) -> None:
        self._run, self._places = run, places

    def __call__(self, *flat: Any) -> list[Any]:
        return [
            value.clone() if place in self._places else value
            for place, value in enumerate(self._run(*flat))
        ]
