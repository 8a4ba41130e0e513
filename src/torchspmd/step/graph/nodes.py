"""Nodes that a pass adds: with a fake value and an owner, like those of capture."""

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Protocol

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import GLOBAL, Owner, find_operator
from torchspmd.errors import UsageError
from torchspmd.step.graph.argument_checks import check_graph, check_module, check_nodes
from torchspmd.step.graph.metadata import META_KEY, owner_of

# Other functions of Python may do anything, and are not called to see what they give.
_FUNCTIONS = frozenset(
    {
        operator.add,
        operator.floordiv,
        operator.getitem,
        operator.mod,
        operator.mul,
        operator.neg,
        operator.sub,
        operator.truediv,
    }
)


def fake_result(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """What a node gives on fake tensors, without values; None where that is not known.

    Args:
        node: A call; it raises what the operator raises on these operands.
        values: What the nodes that it takes give.

    >>> import torch
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> product = graph.call_function(torch.ops.aten.mm.default, (x, x))
    >>> fake_result(product, {x: torch.empty(3, 3, device="meta")}).shape
    torch.Size([3, 3])
    """
    target: Any = node.target
    if isinstance(target, _torch.OpOverload):
        name = _torch.packet_name(target)
        if find_operator(name) and not name.startswith("_c10d_functional::"):
            return None  # to call it would count it as communication
    elif target not in _FUNCTIONS:
        return None
    if any(values.get(each) is None for each in node.all_input_nodes):
        return None
    args, options = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    # Operators that only make tensors run in the fake mode of the graph's inputs.
    near = (each.meta.get("val") for each in node.graph.nodes)
    return _torch.fake_result(target, args, options, near=near)


def copy_node(
    graph: fx.Graph, node: fx.Node, find: Callable[[fx.Node], fx.Node]
) -> fx.Node:
    """Add a copy of a node of another graph, with its name and metadata.

    The same as ``graph.node_copy``, which looks for symbols in all arguments once more.
    """
    taken: Any = fx.node.map_arg((node.args, node.kwargs), find)
    copy = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    _torch.set_arguments(copy, *taken)
    copy.meta = node.meta.copy()
    return copy


def copy_nodes(graph: fx.Graph, into: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Copy all nodes into an empty graph; the copy of each."""
    copies: dict[fx.Node, fx.Node] = {}
    with _torch.keeping_names(into):
        for node in graph.nodes:
            copies[node] = copy_node(into, node, copies.__getitem__)
    return copies


def replace_uses(replacements: Mapping[fx.Node, fx.Node]) -> None:
    """Let whatever uses these nodes use others instead.

    The same as ``replace_all_uses_with`` for each, in their order, which writes all
    arguments of a user once for each of them: a list operator or the output takes hundreds.

    Args:
        replacements: What to use for each node. One that is itself replaced is followed.

    >>> graph = fx.Graph()
    >>> x, y, z = (graph.placeholder(name) for name in "xyz")
    >>> output = graph.output([x, y, z])
    >>> replace_uses({x: y, y: z})
    >>> output.args
    ([z, z, z],)
    """
    users = {user for node in replacements for user in node.users}

    def find(node: fx.Node) -> fx.Node:
        while node in replacements:
            node = replacements[node]
        return node

    for user in sorted(users):
        taken: Any = fx.node.map_arg((user.args, user.kwargs), find)
        _torch.set_arguments(user, *taken)


def drop_dead_code(graph: fx.Graph) -> None:
    """Remove nodes that are not used and have no effect.

    The same as ``graph.eliminate_dead_code``, which checks all of the graph first. Calls
    of modules stay: they may do anything.
    """
    for node in reversed(graph.nodes):
        is_used = bool(node.users) or node.op in ("call_module", "output")
        if not is_used and not node.is_impure():
            graph.erase_node(node)


_TRANSPOSING = (torch.ops.aten.t.default, torch.ops.aten.transpose.int)


def drop_undone_transposes(graph: fx.Graph) -> None:
    """Let readers of a value that is transposed twice read it itself: it is the same view.

    Backward transposes what forward has, and the gradient of each weight twice: calls that
    small models feel. An output stays a tensor of its own.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> there = graph.call_function(torch.ops.aten.t.default, (x,))
    >>> back = graph.call_function(torch.ops.aten.t.default, (there,))
    >>> output = graph.output(graph.call_function(torch.ops.aten.relu.default, (back,)))
    >>> drop_undone_transposes(graph)
    >>> [node.name for node in graph.nodes]
    ['x', 'relu_default', 'output']
    """
    same: dict[fx.Node, fx.Node] = {}
    for target in _TRANSPOSING:
        for node in graph.find_nodes(op="call_function", target=target):
            source = node.all_input_nodes[0]
            if any(user.op == "output" for user in node.users):
                continue
            if source.target is target and _dims(node) == _dims(source) is not None:
                same[node] = source.all_input_nodes[0]
    idle = {*same, *(source for node in same for source in node.all_input_nodes)}
    replace_uses(same)
    for node in sorted(idle, reverse=True):
        if not node.users and node.target in _TRANSPOSING:
            graph.erase_node(node)


def _dims(node: fx.Node) -> frozenset[Any] | None:
    """The dims that a node transposes; None where they are not given in order."""
    return None if node.kwargs else frozenset(node.args[1:])


class NodeMaker:
    """Adds nodes to a graph that belong to one owner.

    Args:
        graph: The graph; the nodes go where its insertion point is.
        owner: Whom they belong to.
    """

    def __init__(self, graph: fx.Graph, owner: Owner) -> None:
        self._graph, self._owner = graph, owner

    def call(self, target: Any, *args: Any, **options: Any) -> fx.Node:
        """Add a call; its fake value is computed from those of its arguments."""
        node = self._graph.call_function(target, args, options)
        values = {source: source.meta["val"] for source in node.all_input_nodes}
        node.meta["val"] = fake_result(node, values)
        node.meta[META_KEY] = self._owner
        return node


def tensor_value(node: fx.Node) -> torch.Tensor:
    """The fake tensor of a node that gives one."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor), f"{node.name}: {type(value).__name__}"
    return value


def common_owner(nodes: Sequence[fx.Node]) -> Owner:
    """The owner of a node made from others: the last one's phase, their common module.

    >>> graph = fx.Graph()
    >>> nodes = [graph.placeholder(name) for name in "ab"]
    >>> for node, name in zip(nodes, ("Net.blocks.0", "Net.blocks.1"), strict=True):
    ...     node.meta[META_KEY] = Owner(module=name)
    >>> common_owner(nodes).module
    'Net.blocks'
    """
    owners = [owner_of(node) for node in nodes]
    paths = [owner.module.split(".") for owner in owners]
    levels = takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
    common = [names[0] for names in levels]
    return Owner(owners[-1].phase, ".".join(common) or GLOBAL)


# ----------------------------------------------------------------------------
# Questions that passes ask of a graph.


class HasGraph(Protocol):
    """A graph module, or an ``IterGraphModule``."""

    @property
    def graph(self) -> fx.Graph:
        """The graph itself."""


def find_node(
    graph: fx.Graph, predicate: Callable[[fx.Node], bool], reverse_order: bool = False
) -> list[fx.Node]:
    """All nodes for which a predicate holds, in (reverse) graph order.

    >>> graph = fx.symbolic_trace(lambda x: abs(x) + 1).graph
    >>> [node.name for node in find_node(graph, lambda node: node.op == "call_function")]
    ['abs_1', 'add']
    """
    check_graph("find_node", graph=graph)
    if not callable(predicate):
        raise UsageError(
            f"find_node(predicate={predicate!r}): pass a function that takes a node and "
            "says whether to find it, such as lambda node: node.name == 'mm'."
        )
    nodes = reversed(graph.nodes) if reverse_order else graph.nodes
    return [node for node in nodes if predicate(node)]


def find_all_descendants(
    gm: HasGraph, parent_nodes: Sequence[fx.Node]
) -> list[fx.Node]:
    """The given nodes and all that use them, except the output, in graph order.

    >>> gm = fx.symbolic_trace(lambda x, y: abs(x) + y)
    >>> start = find_node(gm.graph, lambda node: node.name == "abs_1")
    >>> [node.name for node in find_all_descendants(gm, start)]
    ['abs_1', 'add']
    """
    check_module("find_all_descendants", gm=gm)
    check_nodes("find_all_descendants", parent_nodes=parent_nodes)
    if not parent_nodes:
        raise UsageError("find_all_descendants: No parent nodes are given.")
    return descendants(parent_nodes)


def descendants(parents: Sequence[fx.Node]) -> list[fx.Node]:
    """The same, of nodes of one graph."""
    found = set(parents)
    waiting = list(parents)
    while waiting:
        for user in waiting.pop().users:
            if user.op != "output" and user not in found:
                found.add(user)
                waiting.append(user)
    return sorted(found)
