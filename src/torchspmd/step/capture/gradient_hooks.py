"""Hooks that the user put on the gradients of parameters, run while a step is traced.

They work on the traced tensor that stands for a parameter, so that autograd calls them
where it would call them in eager, and what they compute becomes part of the graph.
"""

from collections.abc import Iterator
from typing import Any

import torch

from torchspmd import _torch
from torchspmd.comm import Phase
from torchspmd.errors import CaptureError
from torchspmd.step.capture.inventory import Inventory, Role
from torchspmd.step.capture.signature import name_of_hook
from torchspmd.step.graph.owners import OwnerLog


def install_gradient_hooks(
    inventory: Inventory, shown: list[torch.Tensor], log: OwnerLog
) -> Iterator[Any]:
    """Give the traced parameters the hooks of the user's; gives the handles.

    Behind all hooks of ours: a hook gets the gradient that ``grad`` gets.
    """
    _check(inventory)
    for slot, traced in zip(inventory.slots, shown, strict=True):
        if slot.role is not Role.PARAMETER or not traced.requires_grad:
            continue
        owner = slot.name.rpartition(".")[0]
        for table, _, hook in _hooks_of(slot.tensor):
            yield _torch.add_gradient_hook(traced, table, _Owned(hook, log, owner))


def _hooks_of(tensor: torch.Tensor) -> Iterator[tuple[str, int, Any]]:
    return _torch.hooks_of(tensor, _torch.GRADIENT_HOOK_TABLES)


def _check(inventory: Inventory) -> None:
    """Refuse hooks that would never be called on other tensors than their own."""
    lines = [
        f"  * {slot.name}: {name_of_hook(hook)}"
        for slot in inventory.slots
        if slot.role is Role.PARAMETER
        for _, _, hook in _hooks_of(slot.tensor)
        if _torch.waits_for_nodes(hook)
    ]
    if lines:
        raise CaptureError(
            "compile: parameters have gradient hooks of register_multi_grad_hook("
            'mode="all"), which wait for all gradients of one backward and cannot be '
            "captured:\n\n" + "\n".join(lines) + "\n\nRemove them, and do what they do "
            "in the step, after backward."
        )


class _Owned:
    """A hook whose operators belong to the module of its parameter."""

    def __init__(self, hook: Any, log: OwnerLog, owner: str) -> None:
        self._hook, self._log, self._owner = hook, log, owner

    def __call__(self, tensor: torch.Tensor) -> Any:
        with self._log.owned(Phase.BACKWARD, self._owner):
            return self._hook(tensor)
