"""The memory that one rank of a training script needs, while it is simulated.

Counted are tensors, by their local shards: what training holds, and what waits for
backward at the moment when that is most.
"""

import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchspmd import _torch
from torchspmd.trace.modules import follow, unfollow
from torchspmd.verify.lock.lockfile import Memory

ON_FSDP = "parameters that FSDP2 gathers for a while are not part of the memory"


class MemoryWatch:
    """Watches a training script; a context manager."""

    def __init__(self) -> None:
        self.notes: set[str] = set()
        self._most = dict.fromkeys(("parameters", "buffers", "gradients"), 0)
        self._optimizers: dict[int, int] = {}  # bytes of state, by the optimizer's id
        self._waiting = _Waiting()
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._held: frozenset[int] = frozenset()
        self._thread = _Calls()
        self._hooks: list[Any] = []
        self._saving = torch.autograd.graph.saved_tensors_hooks(
            self._pack, lambda saved: saved.tensor
        )

    def __enter__(self) -> Self:
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        follow(self)
        self._saving.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._saving.__exit__(*exception)
        unfollow(self)
        for hook in self._hooks:
            hook.remove()

    def memory(self) -> Memory:
        """What was seen so far."""
        optimizer = sum(self._optimizers.values())
        return Memory(**self._most, optimizer=optimizer, activations=self._waiting.most)

    # --- modules and optimizers -------------------------------------------------------

    def enter(self, module: nn.Module) -> None:
        """A module's call begins; the outermost one is looked at whole."""
        calls = self._thread.modules
        if not calls and module not in self._roots:
            self._roots.add(module)
            if _is_fully_sharded(module):
                self.notes.add(ON_FSDP)
        if not calls:
            self._measure()
        calls.append(module)

    def leave(self) -> None:
        """The call that began last ends."""
        if self._thread.modules:
            self._thread.modules.pop()

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._measure(
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        state = _torch.leaves_of(torch.Tensor, list(optimizer.state.values()))
        self._optimizers[id(optimizer)] = sum(map(_bytes, state))

    def _measure(self, more: Iterable[torch.Tensor] = ()) -> None:
        roots = list(self._roots)
        own = (p for root in roots for p in root.parameters())
        parameters = {id(p): p for p in (*own, *more)}
        buffers = {id(b): b for root in roots for b in root.buffers()}
        gradients = [p.grad for p in parameters.values() if p.grad is not None]
        for name, tensors in (
            ("parameters", parameters.values()),
            ("buffers", buffers.values()),
            ("gradients", gradients),
        ):
            self._most[name] = max(self._most[name], sum(map(_bytes, tensors)))
        held = (*parameters.values(), *buffers.values())
        self._held = frozenset(key for tensor in held for key in _storages(tensor))

    # --- what waits for backward ------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> "_Saved":
        return _Saved(tensor, self._waiting, self._held | self._running())

    def _running(self) -> set[int]:
        """Storages of the running module's parameters: FSDP2 changes them for the call."""
        if not self._thread.modules:
            return set()
        module = self._thread.modules[-1]
        near = (module, *module.children())
        return {
            key
            for each in near
            for parameter in each.parameters(recurse=False)
            for key in _storages(parameter)
        }


class _Calls(threading.local):
    """The modules that run in one thread, outermost first."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []


class _Waiting:
    """Bytes of storages that are kept for backward, each storage once."""

    def __init__(self) -> None:
        self.most = 0
        self._now = 0
        self._keepers: dict[int, int] = {}

    def add(self, storage: int, size: int) -> None:
        keepers = self._keepers.get(storage, 0)
        self._keepers[storage] = keepers + 1
        if not keepers:
            self._now += size
            self.most = max(self.most, self._now)

    def remove(self, storage: int, size: int) -> None:
        self._keepers[storage] -= 1
        if not self._keepers[storage]:
            del self._keepers[storage]
            self._now -= size


class _Saved:
    """One tensor that waits for backward; it counts for as long as autograd keeps it."""

    __slots__ = ("_counted", "_waiting", "tensor")

    def __init__(
        self, tensor: torch.Tensor, waiting: _Waiting, held: Iterable[int]
    ) -> None:
        self.tensor = tensor
        self._waiting = waiting
        sizes = _storages(tensor)
        self._counted = {key: size for key, size in sizes.items() if key not in held}
        for key, size in self._counted.items():
            waiting.add(key, size)

    def __del__(self) -> None:
        for key, size in self._counted.items():
            self._waiting.remove(key, size)


def _is_fully_sharded(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported by its users
    return fsdp is not None and any(
        isinstance(inner, fsdp.FSDPModule) for inner in module.modules()
    )


def _bytes(tensor: torch.Tensor) -> int:
    return sum(part.numel() * part.element_size() for part in _local_parts(tensor))


def _storages(tensor: torch.Tensor) -> dict[int, int]:
    """The storages behind a tensor, with their sizes."""
    parts = [part for part in _local_parts(tensor) if part.layout is torch.strided]
    return {_torch.storage_key(part): part.untyped_storage().nbytes() for part in parts}


def _local_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors on this rank that a tensor is made of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):  # newer versions list the mesh too
            yield from _local_parts(part)
