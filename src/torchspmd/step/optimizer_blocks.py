"""Fused optimizers in a graph: the operator, its step counters, its new values."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from torchspmd.errors import CaptureError
from torchspmd.step.graph_queries import HasGraph


@dataclass(frozen=True, slots=True)
class FusedOptimizer:
    """One fused optimizer operator and the nodes that take its new values apart."""

    optim_node: fx.Node
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class StepIncrement:
    """The operator that adds one to the step counters."""

    add_node: fx.Node


@dataclass(frozen=True, slots=True)
class FusedOptimizerBlock:
    """A fused optimizer and the increment of its counters."""

    step: StepIncrement
    optim: FusedOptimizer


def get_all_fused_optimizer_blocks(
    gm: HasGraph, optim_ops: str | Iterable[str]
) -> list[FusedOptimizerBlock]:
    """The blocks of every fused optimizer with one of these names (``_fused_adam``)."""
    names = (optim_ops,) if isinstance(optim_ops, str) else tuple(optim_ops)
    return [
        _block(node)
        for node in gm.graph.nodes
        if node.op == "call_function" and _name(node).startswith(names)
    ]


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target))


def _block(node: fx.Node) -> FusedOptimizerBlock:
    return FusedOptimizerBlock(
        StepIncrement(_find_increment(node)), FusedOptimizer(node, tuple(node.users))
    )


def _find_increment(optimizer: fx.Node) -> fx.Node:
    """The increment whose items are the optimizer's step counters."""
    counters = optimizer.args[5] if len(optimizer.args) > 5 else ()
    assert isinstance(counters, (list, tuple)), type(counters)
    for counter in counters:
        assert isinstance(counter, fx.Node), type(counter)
        for source in (counter, *counter.all_input_nodes):
            if _name(source).startswith("_foreach_add"):
                return source
    raise CaptureError(
        f"Cannot find step node (foreach_add) for the optimizer node {optimizer.name}."
    )
