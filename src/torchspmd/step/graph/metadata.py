"""What each output of a captured graph is for, written on the graph itself.

A pass sees only a graph; whether an output is the next value of an input or something
that the user gets decides what may be done with it.
"""

import bisect
import contextlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from torchspmd import _torch
from torchspmd.comm import GLOBAL, OWNER_KEY, Owner, Phase

_META_KEY = "torchspmd_roles"
_GUARDED_KEY = "torchspmd_guarded"


class OutputKind(Enum):
    """Where an output goes."""

    STATE = "state"  # the next value of an input, written back into the user's tensor
    GRADIENT = "gradient"  # becomes a parameter's `grad`
    CREATED = "created"  # optimizer state that did not exist before
    RESULT = "result"  # returned to the user


@dataclass(frozen=True, slots=True)
class OutputRole:
    """What one output is for.

    Attributes:
        kind: Where it goes.
        placeholder: For state, the index of the input whose next value it is; for a
            gradient or a new state, that of its parameter.
        may_wait: For a gradient, whether the next step clears it unread.
    """

    kind: OutputKind
    placeholder: int = -1
    may_wait: bool = False

    @property
    def leaves(self) -> str:
        """How the caller or the next step gets it at the end of this one, if at all.

        >>> OutputRole(OutputKind.RESULT).leaves
        'is returned by the step'
        """
        if self.kind is OutputKind.RESULT:
            return "is returned by the step"
        if self.kind is OutputKind.GRADIENT and not self.may_wait:
            return (
                "becomes a gradient that the step leaves in .grad, where the next one adds "
                "to it unless the step clears it (optim.zero_grad(), first or last)"
            )
        return ""


def set_roles(graph: fx.Graph, roles: Sequence[OutputRole]) -> None:
    """Write the roles of all outputs on a graph."""
    output_node(graph).meta[_META_KEY] = tuple(roles)


def roles_of(graph: fx.Graph) -> tuple[OutputRole, ...]:
    """The role of each output; results, where nothing else was written on the graph."""
    output = output_node(graph)
    roles: tuple[OutputRole, ...] | None = output.meta.get(_META_KEY)
    if roles is None:
        return (OutputRole(OutputKind.RESULT),) * len(output_values(graph))
    return roles


def written_state(graph: fx.Graph) -> dict[int, fx.Node]:
    """The placeholder that each state output is the next value of, by output index."""
    placeholders = graph.find_nodes(op="placeholder")
    return {
        index: placeholders[role.placeholder]
        for index, role in enumerate(roles_of(graph))
        if role.kind is OutputKind.STATE
    }


def mark_guarded(graph: fx.Graph, places: Sequence[int]) -> None:
    """Write on inputs that their values decide, before each run, which graph is run."""
    placeholders = graph.find_nodes(op="placeholder")
    for place in places:
        placeholders[place].meta[_GUARDED_KEY] = True


def is_guarded(node: fx.Node) -> bool:
    """Whether the value of an input decides which graph is run."""
    return bool(node.meta.get(_GUARDED_KEY))


def output_node(graph: fx.Graph) -> fx.Node:
    """The node that ends a graph."""
    return graph.output_node()


def output_values(graph: fx.Graph) -> list[object]:
    """What a graph returns, one by one."""
    (values,) = output_node(graph).args
    return list(values) if isinstance(values, (list, tuple)) else [values]


def readable_name(node: fx.Node) -> str:
    """What a node is called in messages: an input by what it holds.

    >>> graph = fx.symbolic_trace(lambda x: x + 1).graph
    >>> [readable_name(node) for node in graph.nodes]
    ['x', 'add', 'output']
    """
    held = node.meta.get("torchspmd_name")
    return f"{node.name} ({held})" if held else node.name


def fake_value(node: fx.Node) -> Any:
    """What a node gives, without values; None where that is not known."""
    return node.meta.get("val")


def describe_type(value: object) -> str:
    """Dtype and shape of a tensor for messages, as in ``float32[2, 3]``."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def same_form(one: fx.Node, other: fx.Node) -> bool:
    """Whether two values have the same shape, dtype, device and strides."""
    a, b = one.meta.get("val"), other.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    same_type = a.dtype == b.dtype and a.device == b.device
    return same_type and a.shape == b.shape and a.stride() == b.stride()


# ----------------------------------------------------------------------------
# Whose work a graph node is: the module and the phase that made it.

META_KEY = OWNER_KEY


class OwnerLog:
    """Follows a step while it is traced and writes an ``Owner`` on each node."""

    def __init__(self, modules: list[tuple[str, nn.Module]]) -> None:
        self._paths = {
            id(child): f"{root}.{prefix}" if prefix else root
            for root, module in modules
            for prefix, child in module.named_modules()
        }
        self._stack: list[str] = []
        self.calls = 0  # of modules that the step itself called
        self._fixed: list[Owner] = []
        self._creators: list[tuple[int, str]] = []  # (sequence number, module), rising
        self._has_run_backward = False
        self._graph: fx.Graph | None = None
        self._last: fx.Node | None = None
        self._pending = Owner()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Follow the calls of modules inside; ``note`` tells of those of operators."""
        self._graph = _torch.current_graph()
        self._last = last_node(self._graph)
        with (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ):
            yield
        self._settle()

    @contextlib.contextmanager
    def owned(self, phase: Phase, module: str = GLOBAL) -> Iterator[None]:
        """What is traced inside belongs to this phase and module."""
        self._settle()
        self._fixed.append(Owner(phase, module))
        self._pending = self.current()
        try:
            yield
        finally:
            self._settle()
            self._fixed.pop()

    def current(self) -> Owner:
        """Whose work is traced now."""
        if self._fixed:
            return self._fixed[-1]
        in_backward = _torch.graph_task() >= 0
        if self._stack:
            return Owner(
                Phase.RECOMPUTE if in_backward else Phase.FORWARD, self._stack[-1]
            )
        if in_backward:
            self._has_run_backward = True
            return Owner(Phase.BACKWARD, self._creator())
        # Between backward and the end: clipping, scaling, whatever feeds the optimizer.
        return Owner(Phase.OPTIMIZER if self._has_run_backward else Phase.FORWARD)

    @property
    def is_in_module(self) -> bool:
        """Whether the forward of a module runs now."""
        return bool(self._stack)

    def latest(self) -> Owner:
        """Whose operator was called last; when tracing fails, the one that failed."""
        return self._pending

    def note(self) -> None:
        """Tell that an operator is called now."""
        self._settle()
        self._pending = self.current()
        if _torch.graph_task() < 0 and self._stack:
            self._creators.append((_torch.sequence_number(), self._stack[-1]))

    def _settle(self) -> None:
        """Write the owner on the nodes made since the last call."""
        self._last = annotate_after(self._graph, self._last, self._pending)

    def _creator(self) -> str:
        """The module whose forward made the autograd node that runs now."""
        node = _torch.current_node()
        if node is None:
            return GLOBAL
        number = _torch.node_sequence(node)
        # The last call noted before the node got its number.
        place = bisect.bisect(self._creators, number, key=operator.itemgetter(0))
        return self._creators[place - 1][1] if place else GLOBAL

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self.calls += not self._stack
        self._stack.append(self._paths.get(id(module), type(module).__name__))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()


def last_node(graph: fx.Graph | None) -> fx.Node | None:
    """The newest node of a graph."""
    return None if graph is None else next(iter(reversed(graph.nodes)), None)


def annotate_after(
    graph: fx.Graph | None, start: fx.Node | None, owner: object
) -> fx.Node | None:
    """Write an owner on every node after ``start``; return the newest node."""
    if graph is None:
        return None
    newest = last_node(graph)
    node = newest
    while node is not None and node is not start and node.op != "root":
        node.meta[META_KEY] = owner
        node = node.prev
    return newest


def owner_of(node: fx.Node) -> Owner:
    """The owner that was written on a node."""
    owner = node.meta.get(META_KEY)
    return owner if isinstance(owner, Owner) else Owner()
