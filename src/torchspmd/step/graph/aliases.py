"""Which values of a graph lie in the same memory, and until when each is read."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import find_operator


@dataclass(frozen=True, slots=True)
class Aliases:
    """The memory of a graph's values.

    Attributes:
        position: Each node's place in the graph.
        root: For each node, the node that brought its memory into the graph: an input, or
            the operator that made it. Views have the root of what they look at.
        last_read: For each root, the last place at which its memory is read.
        pinned: Roots about which nothing certain is known.
    """

    position: Mapping[fx.Node, int]
    root: Mapping[fx.Node, fx.Node]
    last_read: Mapping[fx.Node, int]
    pinned: frozenset[fx.Node]


def find_aliases(
    graph: fx.Graph, same: Mapping[fx.Node, fx.Node] | None = None
) -> Aliases:
    """Follow memory through a graph.

    Args:
        graph: The graph; Python numbers are told from tensors by ``meta["val"]``.
        same: Nodes that will be replaced by another node, and read nothing else.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> view = graph.call_function(torch.ops.aten.t.default, (x,))
    >>> made = graph.call_function(torch.ops.aten.relu.default, (view,))
    >>> aliases = find_aliases(graph)
    >>> aliases.root[view] is x, aliases.root[made] is made, aliases.last_read[x]
    (True, True, 2)
    """
    same = same or {}
    position = {node: place for place, node in enumerate(graph.nodes)}
    root: dict[fx.Node, fx.Node] = {}
    last_read: dict[fx.Node, int] = {}
    pinned: set[fx.Node] = set()
    for node, place in position.items():
        sources = [same[node]] if node in same else node.all_input_nodes
        sharing = sources if node in same else _shares_memory_with(node)
        shared = {root[source] for source in sharing}
        root[node] = next(iter(shared)) if shared else node
        if len(shared) > 1 or _is_opaque(node):
            pinned |= shared | {root[node]}
        for source in (*sources, *_read_until(node)):
            last_read[root[source]] = place
        if _is_unfinished(node):
            pinned |= {root[source] for source in node.all_input_nodes}
    return Aliases(position, root, last_read, frozenset(pinned))


def operator_of(node: fx.Node) -> _torch.OpOverload | None:
    """The operator that a node calls; None for anything else."""
    is_call = node.op == "call_function"
    return (
        node.target if is_call and isinstance(node.target, _torch.OpOverload) else None
    )


def _shares_memory_with(node: fx.Node) -> list[fx.Node]:
    if node.op in ("call_method", "call_module"):
        return list(node.all_input_nodes)  # of which nothing is known
    if node.op != "call_function":
        return []
    target = operator_of(node)
    if target is not None:
        places = _torch.shared_arguments(target)
        arguments = _arguments(node, target)
        return [n for place in places for n in _nodes(arguments.get(place))]
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return [source] if _shares_memory_with(source) else []
    return list(node.all_input_nodes) if _is_opaque(node) else []


def _arguments(node: fx.Node, target: _torch.OpOverload) -> dict[int, Any]:
    names = {name: place for place, name in enumerate(_torch.argument_names(target))}
    return {
        **dict(enumerate(node.args)),
        **{names[name]: value for name, value in node.kwargs.items() if name in names},
    }


def _nodes(value: Any) -> list[fx.Node]:
    if isinstance(value, fx.Node):
        return [value]
    if isinstance(value, (list, tuple)):
        return [item for item in value if isinstance(item, fx.Node)]
    return []


def _is_opaque(node: fx.Node) -> bool:
    """Whether a node is a Python function that may do anything to a tensor."""
    if node.op in ("call_module", "call_method"):
        return True
    if node.op != "call_function" or operator_of(node) is not None:
        return False
    return node.target is not operator.getitem and not isinstance(
        node.meta.get("val"), _NUMBERS
    )


_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


def _read_until(node: fx.Node) -> list[fx.Node]:
    """What a wait ends the reading of: the payload of a collective under way."""
    if not _is_wait(node):
        return []
    start = node.args[0]
    if isinstance(start, fx.Node) and start.target is operator.getitem:
        start = start.args[0]
    return list(start.all_input_nodes) if isinstance(start, fx.Node) else []


def _is_wait(node: fx.Node) -> bool:
    target = operator_of(node)
    return target is not None and _torch.packet_name(target).endswith("::wait_tensor")


def _is_unfinished(node: fx.Node) -> bool:
    """Whether a node starts a collective that the graph does not wait for."""
    target = operator_of(node)
    if target is None or _is_wait(node):
        return False
    if find_operator(_torch.packet_name(target)) is None:
        return False
    waiting = [*node.users, *(user for item in node.users for user in item.users)]
    return not any(_is_wait(user) for user in waiting)
