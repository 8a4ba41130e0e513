"""Which values of a graph lie in the same memory, and until when each is read."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from torchspmd import _torch
from torchspmd._torch import OpOverload
from torchspmd.comm import Operator, find_operator


@dataclass(frozen=True, slots=True)
class Aliases:
    """The memory of a graph's values.

    Attributes:
        position: Each node's place in the graph.
        root: For each node, the node that brought its memory into the graph: an input, or
            the operator that made it. Views have the root of what they view.
        last_read: For each root, the last place at which its memory is read.
        pinned: Roots that unknown calls or unfinished collectives may read or write at
            any time.
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
        graph: The graph; ``meta["val"]`` tells Python numbers from tensors.
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
        sharing = sources if node in same else memory_sources(node)
        root[node] = node
        if sharing:
            shared = list(dict.fromkeys(root[source] for source in sharing))
            root[node] = shared[0]
            if len(shared) > 1:
                pinned.update(shared)
        if _is_opaque(node):
            pinned |= {root[node], *(root[source] for source in sources)}
        for source in sources:
            last_read[root[source]] = place
        if is_wait(node):  # a collective reads until its wait
            for source in started_by(node).all_input_nodes:
                last_read[root[source]] = place
        elif communication_of(node) is not None and not find_waits(node):
            pinned |= {root[source] for source in node.all_input_nodes}
    return Aliases(position, root, last_read, frozenset(pinned))


def operator_of(node: fx.Node) -> _torch.OpOverload | None:
    """The operator that a node calls; None for anything else."""
    target = node.target  # of anything but a call, a string
    return target if isinstance(target, OpOverload) else None


def node_arguments(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by their names in its operator, in the operator's order."""
    target = operator_of(node)
    names = () if target is None else _torch.argument_names(target)
    found = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return {name: found[name] for name in names if name in found}


class Write(NamedTuple):
    """A value that a call writes into.

    Attributes:
        node: The node that gives the value.
        argument: Which of the arguments that the operator writes into.
        item: Which item of that argument, where it is a list.
    """

    node: fx.Node
    argument: int
    item: int | None = None


def find_writes(node: fx.Node) -> list[Write]:
    """What a node writes into, as its operator's schema says; nothing for other calls.

    >>> graph = fx.Graph()
    >>> x, y = graph.placeholder("x"), graph.placeholder("y")
    >>> added = graph.call_function(torch.ops.aten.add.out, (x, y), {"out": y})
    >>> find_writes(added) == [Write(y, 0)], find_writes(x)
    (True, [])
    """
    target = operator_of(node)
    if target is None:
        return []
    found: list[Write] = []
    values = _torch.written_values(target, node.args, node.kwargs)
    for argument, value in enumerate(values):
        if argument == 1 and _keeps_gradients(node):
            continue
        if isinstance(value, fx.Node):
            found.append(Write(value, argument))
        elif isinstance(value, (list, tuple)):
            items = enumerate(value)
            found += [Write(n, argument, i) for i, n in items if isinstance(n, fx.Node)]
    return found


def _keeps_gradients(node: fx.Node) -> bool:
    """Whether a node is a fused optimizer: it writes gradients only where it unscales."""
    is_fused = getattr(node.target, "__name__", "").startswith("_fused_")
    return is_fused and node.kwargs.get("grad_scale") is None


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """The nodes into whose values a node writes."""
    return [write.node for write in find_writes(node)]


class Written(NamedTuple):
    """The memory of a graph that writes; few do, and for others nothing need be known.

    Attributes:
        root: For each node, the node that brought its memory; empty without writes.
        roots: Those whose memory is written.
    """

    root: Mapping[fx.Node, fx.Node]
    roots: frozenset[fx.Node]


def find_written(graph: fx.Graph) -> Written:
    """The memory that a graph writes into."""
    written = [each for node in graph.nodes for each in written_nodes(node)]
    root = find_aliases(graph).root if written else {}
    return Written(root, frozenset(root[node] for node in written))


def memory_sources(node: fx.Node) -> list[fx.Node]:
    """The nodes in whose memory a node's value may lie; none where it has its own.

    Of methods, modules and Python functions that are not torch's nothing is known: what
    they give may lie in anything that they take.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> view = graph.call_function(torch.ops.aten.t.default, (), {"self": x})
    >>> memory_sources(view) == [x], memory_sources(x)
    (True, [])
    """
    known = _known_sources(node)
    return list(node.all_input_nodes) if known is None else known


def view_source(node: fx.Node) -> fx.Node | None:
    """The node in whose memory a node's value is known to lie, or may lie by its schema."""
    return next(iter(_known_sources(node) or ()), None)


def memory_root(node: fx.Node) -> fx.Node:
    """The node that made the memory in which a node's value is known to lie.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> parts = graph.call_function(torch.ops.aten.split.Tensor, (x, 2))
    >>> memory_root(graph.call_function(operator.getitem, (parts, 0))) is x
    True
    """
    while (source := view_source(node)) is not None:
        node = source
    return node


def root_of(node: fx.Node) -> fx.Node:
    """The root of one node, as ``find_aliases`` finds those of all nodes of a graph.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> view = graph.call_function(torch.ops.aten.t.default, (x,))
    >>> root_of(view) is x, find_aliases(graph).root[view] is x
    (True, True)
    """
    while sources := memory_sources(node):
        node = sources[0]
    return node


def is_view(node: fx.Node) -> bool:
    """Whether a node only gives another view of a value: it computes and writes nothing."""
    if view_source(node) is None or is_wait(node):
        return False
    target = operator_of(node)
    overloads = _overloads(node) if target is None else (target,)
    if any(torch.Tag.nondeterministic_seeded in each.tags for each in overloads):
        return False  # a dropout, which gives its input outside of training
    if target is not None:
        return not _torch.written_arguments(target)
    writes = any(0 in _torch.written_arguments(each) for each in overloads)
    return not writes and "out" not in node.kwargs


def _known_sources(node: fx.Node) -> list[fx.Node] | None:
    """What the schemas of operators tell; None where there are none that do."""
    if node.target is operator.getitem:
        return _item_sources(node)
    target = operator_of(node)
    if target is not None:
        return _shared(node, target)
    overloads = _overloads(node)
    if not overloads:
        return None if _is_opaque(node) else []
    if "out" in node.kwargs:
        return _nodes(node.kwargs["out"])
    is_shared = any(0 in _torch.shared_arguments(each) for each in overloads)
    return node.all_input_nodes[:1] if is_shared else []


def _item_sources(node: fx.Node) -> list[fx.Node] | None:
    """What an item of several results lies in, or a part of one tensor."""
    source, item = node.args[0], node.args[1]
    assert isinstance(source, fx.Node), type(source)
    target = operator_of(source)
    if target is None:
        is_several = isinstance(source.meta.get("val"), (list, tuple))
        return _known_sources(source) if is_several else [source]
    if _torch.gives_one_tensor(target):
        return [source]
    shared = _shared(source, target, item if isinstance(item, int) else None)
    return [source] if shared and shared == _shared(source, target) else shared


def _shared(
    node: fx.Node, target: _torch.OpOverload, item: int | None = None
) -> list[fx.Node]:
    places = _torch.shared_arguments(target, item)
    if not places:
        return []
    given, names = node_arguments(node), _torch.argument_names(target)
    values = [given.get(names[place]) for place in places]
    if item is not None:  # of a list that was written into
        values = [v[item] if isinstance(v, (list, tuple)) else v for v in values]
    return [source for value in values for source in _nodes(value)]


def _overloads(node: fx.Node) -> tuple[_torch.OpOverload, ...]:
    """The operators that a method, or a function of torch, may call."""
    if node.op == "call_method":
        return _torch.tensor_methods(str(node.target))
    name = getattr(node.target, "__name__", "")
    is_torch = node.op == "call_function" and getattr(torch, name, None) is node.target
    return _torch.tensor_methods(name) if is_torch else ()


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


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a collective."""
    target = operator_of(node)
    return target is not None and _torch.packet_name(target).endswith("::wait_tensor")


def started_by(wait: fx.Node) -> fx.Node:
    """The start that a wait is for, also of one tensor of a coalesced one."""
    source = wait.args[0]
    assert isinstance(source, fx.Node), type(source)
    return without_item(source)


def without_item(node: fx.Node) -> fx.Node:
    """A start, also where one of its several tensors is given."""
    source = node.args[0] if node.target is operator.getitem else node
    assert isinstance(source, fx.Node), type(source)
    return source


def find_waits(start: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes that wait for a collective; one for each tensor of a coalesced one."""
    users = [
        each
        for user in start.users
        for each in (user.users if user.target is operator.getitem else (user,))
    ]
    return tuple(filter(is_wait, users))


def communication_of(node: fx.Node) -> Operator | None:
    """The communication that a node starts; None for any other node."""
    target = operator_of(node)
    return None if target is None else find_operator(_torch.packet_name(target))
