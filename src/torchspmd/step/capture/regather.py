"""How long gathered parameters live: gathered again in backward, or once for all."""

import operator
from collections.abc import Callable

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import Phase
from torchspmd.step.graph.owners import META_KEY, Owner, owner_of

_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_PAD = torch.ops.aten.constant_pad_nd.default
# Besides views: what is quicker to do again than to keep.
_CHEAP = (
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
    operator.getitem,
)
_LATER = (Phase.BACKWARD, Phase.RECOMPUTE)


def drop_unused_gathers(graph: fx.Graph) -> int:
    """Remove gathers whose result nobody reads; return how many."""
    dropped = 0
    for wait in reversed(graph.find_nodes(op="call_function", target=_WAIT)):
        start = wait.args[0]
        if start.target is not _GATHER:
            continue
        for reader in [user for user in wait.users if not user.users]:
            if _is_cheap(reader):
                graph.erase_node(reader)
        if not wait.users:
            graph.erase_node(wait)
            graph.erase_node(start)
            dropped += 1
    return dropped


def gather_again_in_backward(graph: fx.Graph, group: str) -> int:
    """Give backward gathers of its own; return how many were added.

    The graph is functional, and its nodes have owners. ``group`` is that of the data axis:
    other axes gather activations.
    """
    added = 0
    for wait in graph.find_nodes(op="call_function", target=_WAIT):
        start = wait.args[0]
        if _is_parameter_gather(start, group) and _phase(wait) not in _LATER:
            added += _split(graph, wait)
    return added


def gather_once(graph: fx.Graph, group: str) -> int:
    """Let every use of a parameter read its first gather; return how many went.

    Where the step changed the parameter in between, that is another value.
    """
    first: dict[object, fx.Node] = {}
    dropped = 0
    for wait in graph.find_nodes(op="call_function", target=_WAIT):
        start = wait.args[0]
        if not _is_parameter_gather(start, group):
            continue
        kept = first.setdefault(_source(start), wait)
        if kept is not wait:
            wait.replace_all_uses_with(kept)
            graph.erase_node(wait)
            graph.erase_node(start)
            dropped += 1
    graph.eliminate_dead_code()
    return dropped


def _is_parameter_gather(start: fx.Node, group: str) -> bool:
    if start.target is not _GATHER or start.args[2] != group:
        return False
    source = _source(start)
    # Also a parameter that the step itself has updated already.
    return source.op == "placeholder" or _phase(source) is Phase.OPTIMIZER


def _source(start: fx.Node) -> fx.Node:
    """The shard that is gathered, without its padding."""
    source = start.args[0]
    if isinstance(source, fx.Node) and source.target is _PAD:
        source = source.args[0]
    assert isinstance(source, fx.Node)
    return source


def _split(graph: fx.Graph, wait: fx.Node) -> int:
    derived = _derived(wait)
    readers = {
        user
        for node in derived
        for user in node.users
        if user not in derived and _phase(user) in _LATER
    }
    if not readers:
        return 0
    copies: dict[fx.Node, fx.Node] = {}
    for reader in [node for node in graph.nodes if node in readers]:
        with graph.inserting_before(reader):
            copy = _copier(graph, derived, copies, owner_of(wait).module)
            reader.args = fx.node.map_arg(reader.args, copy)
            reader.kwargs = fx.node.map_arg(reader.kwargs, copy)
    for node in reversed(list(derived)):
        if not node.users and node is not wait:
            graph.erase_node(node)
    return 1


def _derived(wait: fx.Node) -> dict[fx.Node, None]:
    """The gathered value and its views and casts, in order."""
    found: dict[fx.Node, None] = {wait: None}
    queue = [wait]
    while queue:
        for user in queue.pop().users:
            if user not in found and _is_cheap(user):
                if all(source in found for source in user.all_input_nodes):
                    found[user] = None
                    queue.append(user)
    return found


def _copier(
    graph: fx.Graph,
    derived: dict[fx.Node, None],
    copies: dict[fx.Node, fx.Node],
    module: str,
) -> Callable[[fx.Node], fx.Node]:
    """Copies a gathered value, with what leads to it, at the graph's insertion point."""

    def copy(node: fx.Node) -> fx.Node:
        is_lead = node.target is _GATHER or node.target is _PAD
        if node not in derived and not (is_lead and node in leads):
            return node
        if node not in copies:
            # The arguments first: they must stand before their reader.
            args = fx.node.map_arg((node.args, node.kwargs), copy)
            made = graph.create_node(node.op, node.target, *args)
            made.meta.update(node.meta)
            made.meta[META_KEY] = Owner(Phase.BACKWARD, module)
            copies[node] = made
        return copies[node]

    leads = _leads(next(iter(derived)))
    return copy


def _leads(wait: fx.Node) -> set[fx.Node]:
    start = wait.args[0]
    assert isinstance(start, fx.Node)
    return {start, *start.all_input_nodes}


def _is_cheap(node: fx.Node) -> bool:
    return node.op == "call_function" and (
        node.target in _CHEAP or _torch.is_view(node.target)
    )


def _phase(node: fx.Node) -> Phase:
    return owner_of(node).phase
