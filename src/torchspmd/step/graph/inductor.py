"""A graph as code that Inductor makes."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.errors import CaptureError
from torchspmd.step.graph.collectives import gather_into_memory, is_communication
from torchspmd.step.graph.metadata import output_node, output_values
from torchspmd.step.progress import phase

_CLONE = torch.ops.aten.clone.default
_ADD, _MUL = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor


def check_compilable(graph: fx.GraphModule) -> None:
    """Refuse a graph that Inductor cannot compile."""
    if _torch.has_symbols(graph):
        raise CaptureError(
            "the Inductor backend cannot compile a graph that reads numbers from tensors: "
            "the optimizer reads its step counter on the host. Use an optimizer with "
            "fused=True or capturable=True, or backend='graph'."
        )


def lower(graph: fx.GraphModule) -> tuple[Callable[..., Any], str]:
    """A graph compiled by Inductor, and where the compiled code comes from."""
    check_compilable(graph)
    graph = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    copied = _drop_host_copies(graph.graph)
    _multiply_before_adding(graph.graph)
    gather_into_memory(graph.graph)
    graph.recompile()
    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    with phase("compiling"):
        keep_order = any(map(is_communication, graph.graph.nodes))
        made, from_cache = _torch.compile_with_inductor(
            graph, inputs, keep_order=keep_order
        )
    return _Copying(made, copied) if copied else made, f"Inductor: {from_cache}"


def _multiply_before_adding(graph: fx.Graph) -> None:
    """Write ``add(x, y, alpha=a)`` as ``add(x, a * y)``.

    Inductor makes one ``addmm`` of an ``add`` and a matrix product, and drops ``alpha``:
    an update ``p.add_(grad, alpha=-lr)`` would add the gradient itself.
    """
    for node in graph.find_nodes(op="call_function", target=_ADD):
        alpha = node.kwargs.get("alpha", 1)
        if isinstance(alpha, (int, float)) and alpha == 1:
            continue
        with graph.inserting_before(node):
            product = graph.call_function(_MUL, (node.args[1], alpha))
        if isinstance(node.args[1], fx.Node):
            product.meta = dict(node.args[1].meta)
        node.args = (node.args[0], product)
        node.kwargs = {}


def _drop_host_copies(graph: fx.Graph) -> dict[int, int]:
    """Remove outputs that copy a host scalar; which input each of them copies.

    A learning rate that is kept for the next step is copied. In a graph for a GPU that is
    the only kernel for the host, and compiling it takes longer than all others.
    """
    placeholders, values = graph.find_nodes(op="placeholder"), output_values(graph)
    copies = {
        place: value
        for place, value in enumerate(values)
        if isinstance(value, fx.Node) and _is_host_copy(value)
    }
    copied = {
        place: placeholders.index(value.all_input_nodes[0])
        for place, value in copies.items()
    }
    kept: list[Any] = [
        value for place, value in enumerate(values) if place not in copies
    ]
    output_node(graph).args = (kept,)
    for value in set(copies.values()):
        graph.erase_node(value)
    return copied


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
    """Compiled code, with copies of some inputs among its outputs."""

    def __init__(self, run: Callable[..., Any], copied: dict[int, int]) -> None:
        self._run, self._copied = run, copied

    def __call__(self, *flat: Any) -> list[Any]:
        # Before the run: the step may write into the input itself.
        copies = {place: flat[source].clone() for place, source in self._copied.items()}
        outputs = list(self._run(*flat))
        for place in sorted(copies):
            outputs.insert(place, copies[place])
        return outputs
