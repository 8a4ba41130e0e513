"""What a graph communicates, read from its nodes without running it."""

from collections.abc import Iterator
from typing import Any

from torch import fx

from torchspmd import _torch
from torchspmd.comm import CommEvent, Ledger, Operator, Topology, find_operator, measure
from torchspmd.step.graph.options import check_module
from torchspmd.step.graph.owners import owner_of
from torchspmd.step.graph.reports import GraphSize


def build_ledger(graph: fx.GraphModule) -> Ledger:
    """One event for each collective of a graph, in order."""
    check_module("build_ledger", graph=graph)
    ledger = Ledger()
    for _, event in communications(graph):
        ledger.append(event)
    return ledger


def communications(graph: fx.GraphModule) -> Iterator[tuple[fx.Node, CommEvent]]:
    """Each node of a graph module that communicates, and its event."""
    return events_of(graph.graph)


def events_of(graph: fx.Graph) -> Iterator[tuple[fx.Node, CommEvent]]:
    """Each node that communicates, and its event."""
    topology = Topology()
    for node in graph.nodes:
        operator = _operator(node)
        if operator is not None:
            yield node, _event(node, operator, topology)


def peers_of(graph: fx.GraphModule) -> list[int]:
    """The ranks of all groups that a graph communicates over."""
    return sorted({r for _, event in communications(graph) for r in event.group.ranks})


def is_communication(node: fx.Node) -> bool:
    """Whether a node starts a communication."""
    return _operator(node) is not None


def graph_size(graph: fx.Graph) -> GraphSize:
    """Nodes, collectives and their payload, from the nodes' metadata."""
    found = list(events_of(graph))
    total = sum(event.payload_bytes for _, event in found)
    return GraphSize(len(graph.nodes), len(found), total)


def _operator(node: fx.Node) -> Operator | None:
    if node.op != "call_function" or not isinstance(node.target, _torch.OpOverload):
        return None
    return find_operator(_torch.packet_name(node.target))


def _event(node: fx.Node, operator: Operator, topology: Topology) -> CommEvent:
    assert isinstance(node.target, _torch.OpOverload)
    names = _torch.argument_names(node.target)
    values: Any = fx.node.map_arg((node.args, node.kwargs), _value)
    arguments = {**dict(zip(names, values[0], strict=False)), **values[1]}
    group = topology.group_of(arguments)
    sizes = measure(operator, arguments, group.size)
    owner = owner_of(node)
    return CommEvent(
        operator.kind,
        operator.counted_as,
        sizes.dtype,
        sizes.shape,
        sizes.payload_bytes,
        sizes.wire_bytes,
        group,
        phase=owner.phase,
        module=owner.module,
    )


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")
