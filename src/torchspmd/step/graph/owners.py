"""Whose work a graph node is: the module and the phase that made it."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import fx, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from torchspmd import _torch
from torchspmd.comm import GLOBAL, Phase

META_KEY = "torchspmd_owner"


class Owner(NamedTuple):
    """The phase of the step and the module that a node belongs to."""

    phase: Phase = Phase.FORWARD
    module: str = GLOBAL


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
        """Watch everything that is traced inside."""
        self._graph = _torch.current_graph()
        self._last = last_node(self._graph)
        with contextlib.ExitStack() as stack:
            before = register_module_forward_pre_hook(self._enter_module)
            stack.callback(before.remove)
            after = register_module_forward_hook(self._leave_module, always_call=True)
            stack.callback(after.remove)
            stack.enter_context(_torch.observe_calls(self._note))
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

    def _note(self, operator: Any, args: Any, kwargs: Any) -> None:
        self._settle()
        self._pending = self.current()
        if _torch.graph_task() < 0 and self._stack:
            self._creators.append((_torch.sequence_number(), self._stack[-1]))

    def _settle(self) -> None:
        """Write the owner on the nodes made since the last look."""
        self._last = annotate_after(self._graph, self._last, self._pending)

    def _creator(self) -> str:
        """The module whose forward made the autograd node that runs now."""
        node = _torch.current_node()
        if node is None:
            return GLOBAL
        number = _torch.node_sequence(node)
        low, high = 0, len(self._creators)
        while low < high:  # the last call noted before the node got its number
            middle = (low + high) // 2
            if self._creators[middle][0] <= number:
                low = middle + 1
            else:
                high = middle
        return self._creators[low - 1][1] if low else GLOBAL

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
