"""One forward as a graph with its children closed: which module's output goes where.

A forward that cannot be traced (control flow on values, shapes taken apart) has no graph.
"""

import copy
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import fx, nn

from torchspmd.parallel.plan_calls import random_numbers_kept

# What works element by element, so that a tensor keeps its layout through it.
_FUNCTIONS = frozenset(
    [
        F.dropout,
        F.elu,
        F.gelu,
        F.leaky_relu,
        F.mish,
        F.relu,
        F.silu,
        F.softplus,
        operator.mul,
        operator.neg,
        torch.clone,
        torch.exp,
        torch.mul,
        torch.relu,
        torch.sigmoid,
        torch.square,
        torch.tanh,
    ]
)
_METHODS = frozenset(
    ["clone", "contiguous", "exp", "mul", "neg", "relu", "sigmoid", "square", "tanh"]
)
_MODULES = (
    nn.Dropout,
    nn.ELU,
    nn.GELU,
    nn.Hardswish,
    nn.Identity,
    nn.LeakyReLU,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Tanh,
)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_SPLITS = ("chunk", "split", "tensor_split")
# The last dimension of what a Linear gets in a transformer: (batch, sequence, features).
_LAST_DIMS = (-1, 2)


@dataclass(frozen=True, slots=True)
class Reach:
    """Where the output of one call of a module goes, element by element.

    Attributes:
        source: Name of the module inside its parent.
        targets: Modules that get it as their first input.
        split: The function that takes its last dimension apart, if one does.
    """

    source: str
    targets: tuple[str, ...]
    split: str | None


def follow_outputs(parent: nn.Module) -> list[Reach]:
    """Where each module inside ``parent`` hands its output; empty if not traceable."""
    graph = _trace(parent)
    nodes = [] if graph is None else [n for n in graph.nodes if n.op == "call_module"]
    return [_reach(node, parent) for node in nodes]


class _ClosedChildren(fx.Tracer):
    """Traces one forward; every module inside it is one node."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _trace(module: nn.Module) -> fx.Graph | None:
    if isinstance(module, _CONTAINERS):
        return None
    # A forward may write to its module; a copy of the module's own namespace keeps
    # traces of this tracing out of the user's.
    try:
        stand_in = copy.copy(module)
        for name in ("_modules", "_buffers", "_parameters"):
            setattr(stand_in, name, dict(getattr(module, name)))
        with random_numbers_kept():
            return _ClosedChildren().trace(stand_in)
    except Exception:  # the user's code on stand-ins for tensors can raise anything
        return None


def _reach(node: fx.Node, parent: nn.Module) -> Reach:
    users = list(_users(node, parent))
    targets = [str(u.target) for u, _ in users if u.op == "call_module"]
    splits = (_split_name(user) for user, _ in users)
    return Reach(
        source=str(node.target),
        targets=tuple(dict.fromkeys(targets)),
        split=next((name for name in splits if name is not None), None),
    )


def _users(node: fx.Node, parent: nn.Module) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Nodes that take a node's output as first input, and what they take it from."""
    waiting, seen = [node], {node}
    while waiting:
        current = waiting.pop()
        for user in current.users:
            if user in seen:
                continue
            if _keeps_layout(user, parent):
                seen.add(user)
                waiting.append(user)
            elif user.args and user.args[0] is current:
                yield user, current


def _keeps_layout(node: fx.Node, parent: nn.Module) -> bool:
    if node.op == "call_function":
        return node.target in _FUNCTIONS
    if node.op == "call_method":
        return node.target in _METHODS
    if node.op != "call_module":
        return False
    module = parent.get_submodule(str(node.target))
    return isinstance(module, _MODULES)


def _split_name(node: fx.Node) -> str | None:
    if node.op not in ("call_method", "call_function"):
        return None
    target: str | Callable[..., object] = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0)
    return name if name in _SPLITS and dim in _LAST_DIMS else None
