"""How long gathered parameters live: gathered again in backward, or once for all."""

import operator

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import Owner, Phase
from torchspmd.step.graph.metadata import META_KEY, owner_of

_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_PREPARES = (torch.ops.aten._to_copy.default, torch.ops.aten.constant_pad_nd.default)
# Besides views: what is quicker to do again than to keep.
_CHEAP = (
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
    operator.getitem,
)
_LATER = (Phase.BACKWARD, Phase.RECOMPUTE)


def drop_unused_gathers(graph: fx.Graph) -> None:
    """Remove gathers whose result is not read."""
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


def gather_again_in_backward(graph: fx.Graph, group: str) -> None:
    """Give backward gathers of its own, so that forward need not keep its own for it.

    The graph is functional, and its nodes have owners. ``group`` is that of the data axis:
    other axes gather activations.
    """
    for wait in graph.find_nodes(op="call_function", target=_WAIT):
        if _is_parameter_gather(wait.args[0], group) and _phase(wait) not in _LATER:
            _split(graph, wait)


def gather_once(graph: fx.Graph, group: str) -> None:
    """Let every use of a parameter read its first gather.

    Where the step changed the parameter in between, that is another value.
    """
    first: dict[object, fx.Node] = {}
    for wait in graph.find_nodes(op="call_function", target=_WAIT):
        start = wait.args[0]
        if not _is_parameter_gather(start, group):
            continue
        kept = first.setdefault((_source(start), wait.meta["val"].dtype), wait)
        if kept is not wait:
            wait.replace_all_uses_with(kept)
            graph.erase_node(wait)
            graph.erase_node(start)
    graph.eliminate_dead_code()


def _is_parameter_gather(start: fx.Node, group: str) -> bool:
    if start.target is not _GATHER or start.args[2] != group:
        return False
    source = _source(start)
    # Also a parameter that the step itself has updated already.
    return source.op == "placeholder" or _phase(source) is Phase.OPTIMIZER


def _source(start: fx.Node) -> fx.Node:
    """The shard that is gathered, before it is cast and padded."""
    source = (start, *_preparation(start))[-1].args[0]
    assert isinstance(source, fx.Node)
    return source


def _preparation(start: fx.Node) -> list[fx.Node]:
    """What casts and pads a shard before it is gathered, the last of it first."""
    found: list[fx.Node] = []
    source = start.args[0]
    while isinstance(source, fx.Node) and source.target in _PREPARES:
        found.append(source)
        source = source.args[0]
    return found


def _split(graph: fx.Graph, wait: fx.Node) -> None:
    """Copy a gather, and what follows from it cheaply, for those who read it later."""
    derived = _derived(wait)
    readers = {
        user
        for node in derived
        for user in node.users
        if user not in derived and _phase(user) in _LATER
    }
    start = wait.args[0]
    assert isinstance(start, fx.Node)
    copied = {*derived, start, *_preparation(start)}
    owner = Owner(Phase.BACKWARD, owner_of(wait).module)
    copies: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node) -> fx.Node:
        if node not in copied:
            return node
        if node not in copies:
            copies[node] = graph.node_copy(node, copy)  # its arguments first
            copies[node].meta[META_KEY] = owner
        return copies[node]

    for reader in [node for node in graph.nodes if node in readers]:
        with graph.inserting_before(reader):
            reader.args = fx.node.map_arg(reader.args, copy)
            reader.kwargs = fx.node.map_arg(reader.kwargs, copy)
    for node in reversed(list(derived)):
        if not node.users and node is not wait:
            graph.erase_node(node)


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


def _is_cheap(node: fx.Node) -> bool:
    return node.op == "call_function" and (
        node.target in _CHEAP or _torch.is_view(node.target)
    )


def _phase(node: fx.Node) -> Phase:
    return owner_of(node).phase
