"""What modules, optimizers and gradients do besides what is written in the step."""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

HOOK_TABLES = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
OPTIMIZER_HOOK_TABLES = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
GRADIENT_HOOK_TABLES = ("_backward_hooks", "_post_accumulate_grad_hooks")
# What torch itself notes on an optimizer when it steps.
OPTIMIZER_BOOKKEEPING = (
    "_need_device_dtype_check_for_fused",
    "_opt_called",
    "_warned_capturable_if_run_uncaptured",
    "found_inf",
    "grad_scale",
)
_gradient_tables = attrgetter(*GRADIENT_HOOK_TABLES)


class LaysOutGradient:
    """Mark of a hook that gives a gradient its parameter's layout, and no other value."""

    __slots__ = ()


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks of its own may change what a module takes or hands on."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def hooks_of(holder: Any, tables: tuple[str, ...]) -> Iterator[tuple[str, int, Any]]:
    """Every hook of a module, optimizer or tensor: its table, its key there, itself."""
    for table in tables:
        # A tensor that never had a hook has no table.
        for key, hook in (getattr(holder, table) or {}).items():
            yield table, key, hook


def add_gradient_hook(tensor: torch.Tensor, table: str, hook: Any) -> Any:
    """Put a hook that was in such a table on another tensor; gives the handle."""
    if table == GRADIENT_HOOK_TABLES[0]:
        return tensor.register_hook(hook)
    return tensor.register_post_accumulate_grad_hook(hook)


def gradient_hook_keys(tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    """Which tensors have hooks on their gradients, and the keys of these hooks."""
    return [
        (place, tuple(before or ()), tuple(after or ()))
        for place, (before, after) in enumerate(map(_gradient_tables, tensors))
        if before or after
    ]


def waits_for_nodes(hook: Any) -> bool:
    """Whether a hook counts the autograd nodes of the tensors that it was put on.

    ``register_multi_grad_hook(mode="all")`` does; on other tensors it never calls.
    """
    name = getattr(hook, "__qualname__", "")
    is_of_torch = getattr(hook, "__module__", "") == "torch.autograd.graph"
    return is_of_torch and name.startswith("register_multi_grad_hook.")
