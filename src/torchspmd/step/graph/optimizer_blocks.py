"""Fused and foreach optimizers in a graph: operator, step counters, new values."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from torchspmd.errors import CaptureError, UsageError
from torchspmd.step.graph.list_items import item_of
from torchspmd.step.graph.options import check_module
from torchspmd.step.graph.queries import HasGraph

# Which argument of each fused optimizer holds the gradients, and which the step counters.
_GRADIENTS = {
    "_fused_adam": 1,
    "_fused_adamw": 1,
    "_fused_sgd": 1,
    "_fused_adagrad": 1,
}
_COUNTERS = {"_fused_adam": 5, "_fused_adamw": 5, "_fused_adagrad": 3}


@dataclass(frozen=True, slots=True)
class FusedOptimizer:
    """One fused optimizer operator and the nodes that take its new values apart."""

    optim_node: fx.Node
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class StepIncrement:
    """The operator that adds one to the step counters; None for an optimizer without."""

    add_node: fx.Node | None


@dataclass(frozen=True, slots=True)
class FusedOptimizerBlock:
    """A fused optimizer and the increment of its counters."""

    step: StepIncrement
    optim: FusedOptimizer


def get_all_fused_optimizer_blocks(
    gm: HasGraph, optim_ops: str | Iterable[str]
) -> list[FusedOptimizerBlock]:
    """The blocks of every optimizer operator whose name begins with one of these.

    ``_fused_adam`` also finds ``_fused_adamw``. A foreach optimizer is found by the
    operator that makes the new parameters (``_foreach_addcdiv`` for Adam).
    """
    check_module("get_all_fused_optimizer_blocks", gm=gm)
    names = tuple(optim_ops) if isinstance(optim_ops, (list, tuple)) else (optim_ops,)
    if not all(isinstance(name, str) for name in names):
        raise UsageError(
            f"get_all_fused_optimizer_blocks(optim_ops={optim_ops!r}): pass the name of an "
            "operator, such as '_fused_adam', or a list of names."
        )
    return [
        FusedOptimizerBlock(
            StepIncrement(_find_increment(node)),
            FusedOptimizer(node, tuple(node.users)),
        )
        for node in gm.graph.nodes
        if node.op == "call_function" and _name(node).startswith(names)
    ]


def gradients_of(node: fx.Node) -> tuple[fx.Node, ...] | None:
    """The gradients that a fused optimizer takes; None for any other operator."""
    place = _GRADIENTS.get(_name(node).partition(".")[0].removesuffix("_"))
    if place is None:
        return None
    found = node.args[place]
    assert isinstance(found, (list, tuple)), type(found)
    return tuple(each for each in found if isinstance(each, fx.Node))


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target))


def _find_increment(optimizer: fx.Node) -> fx.Node | None:
    """The increment whose items are the optimizer's step counters."""
    place = _COUNTERS.get(_name(optimizer).partition(".")[0].removesuffix("_"))
    if place is None:
        return None
    counters = optimizer.args[place]
    assert isinstance(counters, (list, tuple)), type(counters)
    for counter in counters:
        assert isinstance(counter, fx.Node), type(counter)
        source = item_of(counter)
        node = counter if source is None else source[0]
        if _name(node).startswith(("_foreach_add", "add")):
            return node
    raise CaptureError(
        f"Cannot find step node (foreach_add) for the optimizer node {optimizer.name}."
    )
