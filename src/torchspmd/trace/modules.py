"""Which module is running, in forward, recomputation and backward.

Module calls are kept on a stack for each thread. Backward needs no hooks: autograd numbers
the nodes it creates, so a list of "from this number on, this module was running" tells who
created the node that runs.
"""

import threading
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from torchspmd import _torch
from torchspmd.comm import GLOBAL, Phase, is_within
from torchspmd.layout.names import inner_module, plain_name
from torchspmd.trace.callsite import is_nested_backward

# ----------------------------------------------------------------------------
# Which module was running when an autograd node was created, in bounded memory.

# A module call makes at most two boundaries. Older ones are forgotten.
_FIRST_BOUNDARIES = 1 << 12
_MAX_BOUNDARIES = 1 << 16


class Boundaries:
    """From which autograd sequence number on which module was running; bounded."""

    def __init__(self) -> None:
        self._starts = array("q", bytes(8 * _FIRST_BOUNDARIES))
        self._paths = array("i", bytes(4 * _FIRST_BOUNDARIES))
        self._size = 0
        self._lost_below = 0

    def begin(self, start: int, path: int) -> None:
        """From this sequence number on, this path is running; -1 for none."""
        last = self._size - 1
        if last >= 0 and self._starts[last] == start:
            self._paths[last] = path  # no node was created since: it never mattered
            return
        if self._size == len(self._starts):
            self._make_room()
        self._starts[self._size] = start
        self._paths[self._size] = path
        self._size += 1

    def find(self, sequence: int) -> int | None:
        """The path that was running; -1 for none, None when it was forgotten."""
        if sequence < self._lost_below:
            return None
        place = bisect_right(self._starts, sequence, 0, self._size) - 1
        return self._paths[place] if place >= 0 else -1

    def _make_room(self) -> None:
        if self._size < _MAX_BOUNDARIES:
            self._starts.extend(self._starts)
            self._paths.extend(self._paths)
            return
        half = self._size // 2
        self._starts[:half] = self._starts[half:]
        self._paths[:half] = self._paths[half:]
        self._size = half
        self._lost_below = self._starts[0]


# ----------------------------------------------------------------------------
# One wrapper around every module call, for all followers.
#
# It is installed while there is a follower. Global forward hooks do not serve: they return
# before a module's own hooks run, and those often communicate.


class Follower(Protocol):
    """Gets the beginning and the end of every module call, in the thread that makes it."""

    def enter(self, module: nn.Module) -> None:
        """A call begins."""

    def leave(self) -> None:
        """The call that began last ends, one way or the other."""


_followers: tuple[Follower, ...] = ()
_lock = threading.Lock()
_plain_call = nn.Module.__call__


def observed_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``nn.Module.__call__`` while there is a follower."""
    if torch.compiler.is_compiling():
        # Traced into a graph: what counts is the call that runs the graph.
        return _plain_call(module, *args, **kwargs)
    followers = _followers
    for follower in followers:
        follower.enter(module)
    try:
        return _plain_call(module, *args, **kwargs)
    finally:
        for follower in followers:
            follower.leave()


def call_followers(module: nn.Module) -> None:
    """Report a call that happens without Python, as in a replayed CUDA graph."""
    followers = _followers
    for follower in followers:
        follower.enter(module)
    for follower in followers:
        follower.leave()


def follow(follower: Follower) -> None:
    """Tell a follower of every module call from now on."""
    global _followers, _plain_call  # noqa: PLW0603  # the class is process-wide too
    _torch.load_compiler()
    with _lock:
        if not _followers:
            _plain_call = nn.Module.__call__
            nn.Module.__call__ = observed_call  # type: ignore[method-assign]
        _followers = (*_followers, follower)


def unfollow(follower: Follower) -> None:
    """Stop telling it; the last one removes the wrapper."""
    global _followers  # noqa: PLW0603
    with _lock:
        _followers = tuple(other for other in _followers if other is not follower)
        if not _followers:
            nn.Module.__call__ = _plain_call  # type: ignore[method-assign]


# Backward of a forward that the boundaries have forgotten.
LOST = "(forward too long ago)"


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """One module that ran. It is not kept alive; its parameters are read when asked."""

    path: str
    type: type[nn.Module]
    depth: int
    reference: weakref.ref[nn.Module]

    @property
    def type_name(self) -> str:
        """The class with its Python module."""
        return f"{self.type.__module__}.{self.type.__qualname__}"

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The module's own parameters; none when it is gone."""
        module = self.reference()
        return {} if module is None else dict(module.named_parameters(recurse=False))

    @property
    def placements(self) -> dict[str, tuple[Placement, ...]]:
        """The layouts of those that are DTensors."""
        return {
            name: value.placements
            for name, value in self.parameters.items()
            if isinstance(value, DTensor)
        }


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a parameter is: a module that ran, and the name inside it."""

    module: ModuleInfo
    name: str

    def parameter(self) -> torch.Tensor | None:
        value: Any = self.module.reference()
        for part in self.name.split("."):
            value = getattr(value, part, None)
        return value if isinstance(value, torch.Tensor) else None

    @property
    def path(self) -> str:
        inside = self.name.rpartition(".")[0]
        return _without_wrappers(self.module.path, inside)


class _Thread(threading.local):
    """What one thread is running."""

    def __init__(self) -> None:
        self.stack: list[tuple[nn.Module, str]] = []
        self.boundaries: Boundaries | None = None


class ModuleTracker:
    """Knows the path of the module that is running; at work between start and stop."""

    def __init__(self) -> None:
        self.modules: dict[str, ModuleInfo] = {}
        self._thread = _Thread()
        self._forward_boundaries: Boundaries | None = None
        self._last_node: tuple[int, Boundaries | None, str] = (-1, None, GLOBAL)
        self._paths: list[str] = []
        self._path_ids: dict[str, int] = {}
        # module -> {path of the module it was called from: its own path}
        self._names: weakref.WeakKeyDictionary[nn.Module, dict[str, str]]
        self._names = weakref.WeakKeyDictionary()
        self._roots: dict[str, weakref.ref[nn.Module]] = {}
        self._places: dict[int, _Place] = {}  # by the id of a parameter
        self.compiled: set[str] = set()  # paths of modules that torch.compile wraps
        self.in_first_ddp_step = False

    def start(self) -> None:
        """Begin to follow module calls."""
        follow(self)

    def stop(self) -> None:
        """Stop; nothing is left on any module."""
        unfollow(self)

    def running(self) -> str | None:
        """The module that runs forward in this thread now."""
        stack = self._thread.stack
        return stack[-1][1] if stack else None

    def locate(self) -> tuple[str, Phase] | None:
        """Module and phase of what runs now; None outside of modules and backward."""
        stack = self._thread.stack
        if _torch.graph_task() == -1:
            return (stack[-1][1], Phase.FORWARD) if stack else None
        if stack:
            return stack[-1][1], Phase.RECOMPUTE
        return self._backward_path(), Phase.BACKWARD

    def path(self, phase: Phase, owner: nn.Module | None) -> str:
        """The module that a communication of this phase, done now, belongs to."""
        if owner is not None:
            return self._known_path(owner) or self._path_ahead(owner)
        if phase is Phase.BACKWARD:
            return self._backward_path()
        return self.running() or GLOBAL

    # --- forward ----------------------------------------------------------------------

    def enter(self, module: nn.Module) -> None:
        """A module's call begins."""
        stack = self._thread.stack
        if not stack:
            self.in_first_ddp_step = _torch.is_first_ddp_step(module)
        if stack:
            path = self._child_path(stack[-1][0], stack[-1][1], module)
        elif _torch.graph_task() != -1:
            path = self._known_path(module) or self._root_path(module)
        else:
            path = self._root_path(module)
        if path not in self.modules:
            self._describe(path, module, len(stack) + 1)
        stack.append((module, path))
        self._mark(path)

    def leave(self) -> None:
        """The call that began last ends, one way or the other."""
        stack = self._thread.stack
        if stack:  # empty when recording began in the middle of the call
            stack.pop()
        self._mark(stack[-1][1] if stack else "")

    def _mark(self, path: str) -> None:
        boundaries = self._thread.boundaries
        if boundaries is None:
            boundaries = self._thread.boundaries = Boundaries()
        if _torch.graph_task() == -1:
            self._forward_boundaries = boundaries
        boundaries.begin(_torch.sequence_number(), self._path_id(path) if path else -1)

    def _path_id(self, path: str) -> int:
        known = self._path_ids.get(path)
        if known is None:
            known = self._path_ids[path] = len(self._paths)
            self._paths.append(path)
        return known

    # --- names ------------------------------------------------------------------------

    def _child_path(
        self, parent: nn.Module, parent_path: str, module: nn.Module
    ) -> str:
        names = self._names.setdefault(module, {})
        path = names.get(parent_path)
        if path is None:
            name = _name_inside(parent, module)
            if name is None and isinstance(module, torch.fx.GraphModule):
                path = parent_path  # made by torch.compile: stands for its caller
            else:
                name = name or f"<{type(module).__name__}>"
                path = _without_wrappers(parent_path, name)
            names[parent_path] = path
        return path

    def _known_path(self, module: nn.Module) -> str | None:
        """Where the module ran before; of several places, the one backward is in."""
        places = list(self._names.get(module, {}).values())
        if len(places) < 2:
            return places[0] if places else None
        now = self._backward_path()
        return next((place for place in places if is_within(now, place)), places[-1])

    def _path_ahead(self, module: nn.Module) -> str:
        """The path of a module that has not run yet, from a running one around it."""
        for parent, parent_path in self._thread.stack:
            if name := _name_inside(parent, module):
                return _without_wrappers(parent_path, name)
        return self._root_path(module)

    def _root_path(self, module: nn.Module) -> str:
        names = self._names.setdefault(module, {})
        path = names.get("")
        if path is None:
            path = names[""] = self._free_root(module)
        return path

    def _free_root(self, module: nn.Module) -> str:
        """The class name; with a number when a living module has it already."""
        base = type(inner_module(module)).__name__
        number, path = 1, base
        while (taken := self._roots.get(path)) is not None and taken() is not None:
            number += 1
            path = f"{base}#{number}"
        self._roots[path] = weakref.ref(module)
        return path

    def _describe(self, path: str, module: nn.Module, depth: int) -> None:
        if _torch.is_compiled_module(module):
            self.compiled.add(path)
        self.modules[path] = ModuleInfo(path, type(module), depth, weakref.ref(module))

    # --- backward ---------------------------------------------------------------------

    def _backward_path(self) -> str:
        node = _torch.current_node()
        if node is None:
            return GLOBAL
        sequence = _torch.node_sequence(node)
        if sequence == _torch.ACCUMULATE_SEQUENCE:  # a parameter's gradient is complete
            return self._parameter_path(node.variable)
        boundaries = self._boundaries_of_node()
        if boundaries is None:
            return GLOBAL
        # One node runs several operators, one after the other.
        if self._last_node[:2] != (sequence, boundaries):
            place = boundaries.find(sequence)
            path = (
                LOST if place is None else self._paths[place] if place >= 0 else GLOBAL
            )
            self._last_node = (sequence, boundaries, path)
        return self._last_node[2]

    def _boundaries_of_node(self) -> Boundaries | None:
        """The marks of the thread that created the node that runs now.

        Sequence numbers count per thread. On GPUs backward runs in a thread of its own,
        which creates nodes when it recomputes, and runs them only in reentrant
        checkpointing: in a backward pass inside the one that recomputed.
        """
        own, forward = self._thread.boundaries, self._forward_boundaries
        if own is None or own is forward:
            return forward
        return own if is_nested_backward() else forward

    def _parameter_path(self, variable: torch.Tensor) -> str:
        """The module that owns a parameter, also when only one around it was called."""
        place = self._places.get(id(variable))
        # Checked by identity, not by a weak reference: torch refuses to swap a parameter
        # (``model.to(...)``) that has one.
        if place is None or place.parameter() is not variable:
            found = (
                place for place in self._parameters() if place.parameter() is variable
            )
            place = next(found, None)
        if place is None:
            return GLOBAL
        self._places[id(variable)] = place
        return place.path

    def _parameters(self) -> Iterator["_Place"]:
        for info in self.modules.values():
            module = info.reference()
            if module is not None:
                for name, _ in module.named_parameters():
                    yield _Place(info, name)


def _name_inside(parent: nn.Module, module: nn.Module) -> str | None:
    """The attribute path from a module to one inside it."""
    for name, child in parent._modules.items():  # most often it is a direct child
        if child is module:
            return name
    for name, child in parent.named_modules(remove_duplicate=False):
        if child is module and name:
            return str(name)
    return None


def _without_wrappers(parent_path: str, name: str) -> str:
    return ".".join(filter(None, [parent_path, plain_name(name)]))
