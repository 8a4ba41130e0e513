"""One reduction for gradients that are added up over micro-batches.

Backward reduces each gradient where it is made. Where the next one is only added to it,
the sum over ranks is taken once, of the sum over micro-batches, as DDP does under
``no_sync``. Whatever reads a gradient in between (clipping, an optimizer, a returned
value) still finds it reduced.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.step.graph.aliases import operator_of

_ADD = torch.ops.aten.add.Tensor
_SLICE = torch.ops.aten.slice.Tensor
_CAST = torch.ops.aten._to_copy.default
_SCALES = (torch.ops.aten.div.Tensor, torch.ops.aten.mul.Tensor)


@dataclass(frozen=True, slots=True)
class _Reduced:
    """A sum over ranks: what was reduced, over whom, and by what it was scaled."""

    start: fx.Node
    payload: fx.Node
    how: tuple[Any, ...]


def join_reductions(graph: fx.Graph) -> int:
    """Add before reducing where both sums are used for nothing else; how many went."""
    return _join_all(graph, _is_sum)


def join_scatters(graph: fx.Graph, group: str) -> int:
    """The same for sums of which each rank of a group keeps its rows; how many went.

    What was reduced is then kept whole until the last of them is made.
    """

    def is_scatter(node: fx.Node, name: str) -> bool:
        is_one = name.endswith("_c10d_functional::reduce_scatter_tensor")
        return is_one and node.args[1] == "sum" and node.args[3] == group

    return _join_all(graph, is_scatter)


def _is_sum(node: fx.Node, name: str) -> bool:
    return name.endswith("_c10d_functional::all_reduce") and node.args[1] == "sum"


_IsStart = Callable[[fx.Node, str], bool]


def _join_all(graph: fx.Graph, is_start: _IsStart) -> int:
    joined = 0
    for node in list(graph.nodes):
        if node.target is not _ADD or len(node.args) != 2 or node.kwargs:
            continue
        first, second = (_reduced(argument, is_start) for argument in node.args)
        if first is None or second is None or first.how != second.how:
            continue
        if not _have_same_form(first.payload, second.payload):
            continue
        _join(graph, node, first, second)
        joined += 1
    graph.lint()
    return joined


def _join(graph: fx.Graph, add: fx.Node, first: _Reduced, second: _Reduced) -> None:
    """Reduce the sum where the later of both payloads is reduced."""
    dead, kept = add.args
    if second.start < first.start:  # written as new + old
        first, second, dead, kept = second, first, kept, dead
    with graph.inserting_before(second.start):
        total = graph.call_function(_ADD, (first.payload, second.payload))
    total.meta = {**add.meta, "val": second.payload.meta.get("val")}
    second.start.replace_input_with(second.payload, total)
    assert isinstance(dead, fx.Node) and isinstance(kept, fx.Node)
    add.replace_all_uses_with(kept)
    graph.erase_node(add)
    while dead is not first.start:  # by hand: a wait counts as an effect
        source = dead.args[0]
        assert isinstance(source, fx.Node)
        graph.erase_node(dead)
        dead = source
    graph.erase_node(first.start)


def _reduced(value: Any, is_start: _IsStart) -> _Reduced | None:
    """The sum over ranks that a value is, if it is used once at every point."""
    how: list[Any] = []
    node = value
    while isinstance(node, fx.Node) and len(node.users) == 1:
        target = operator_of(node)
        name = "" if target is None else _torch.packet_name(target)
        if node.target in _SCALES and isinstance(node.args[1], (int, float)):
            how.append((node.target, node.args[1]))
            node = node.args[0]
        elif node.target is _CAST:  # from the dtype that it was reduced in
            how.append((node.target, tuple(node.kwargs.items())))
            node = node.args[0]
        elif node.target is _SLICE:  # without the rows that were added for evenness
            how.append((node.target, *node.args[1:]))
            node = node.args[0]
        elif name.endswith("::wait_tensor"):
            node = node.args[0]
        elif is_start(node, name):
            payload = node.args[0]
            assert isinstance(payload, fx.Node)
            return _Reduced(node, payload, (*how, node.target, *node.args[1:]))
        elif _is_sum(node, name):  # of rows, over the ranks that have replicas of them
            how.append((node.target, *node.args[1:]))
            node = node.args[0]
        else:
            return None
    return None


def _have_same_form(one: fx.Node, other: fx.Node) -> bool:
    a, b = one.meta.get("val"), other.meta.get("val")
    form = operator.attrgetter("shape", "dtype", "device")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return bool(form(a) == form(b) and a.stride() == b.stride())
