"""Autograd: which node of the backward graph is running.

These are asked for every operator that is listed, so they are torch's own functions where
they can be, without a Python function around them.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
import torch.autograd
from torch import nn

_module: Any = importlib.import_module("torch.nn.modules.module")
_optimizer: Any = importlib.import_module("torch.optim.optimizer")
_autograd: Any = torch.autograd  # its annotations do not export private names

# The number that the next autograd node created by this thread will get.
sequence_number: Callable[[], int] = _autograd._get_sequence_nr

# The id of the backward pass that this thread works on; -1 outside of one.
graph_task: Callable[[], int] = torch._C._current_graph_task_id

# The autograd node whose backward runs now in this thread; None outside of one.
current_node: Callable[[], Any] = torch._C._current_autograd_node

# Call something when the backward pass that runs now is done, in the order of the calls.
after_backward: Callable[[Callable[[], None]], None]
after_backward = torch.autograd.Variable._execution_engine.queue_callback

# The number of the nodes that add to a parameter's gradient: they run as soon as they can.
ACCUMULATE_SEQUENCE = 2**64 - 1


def node_sequence(node: Any) -> int:
    """The sequence number under which a node was created."""
    return int(node._sequence_nr())


# ----------------------------------------------------------------------------
# Backward: what is in force while autograd runs.


@contextlib.contextmanager
def backward_under(context: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter a context around autograd's engine, whenever it is run inside.

    ``Tensor.backward`` is itself handed to a function mode, which is off while it handles
    it, and autograd would recompute checkpointed regions without the mode.
    """
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    def run_under(*args: Any, **kwargs: Any) -> Any:
        with context:
            return run(*args, **kwargs)

    autograd._engine_run_backward = run_under
    try:
        yield
    finally:
        autograd._engine_run_backward = run


@contextlib.contextmanager
def after_each_backward(done: Callable[[], None]) -> Iterator[None]:
    """Call something whenever autograd's engine has run to its end."""
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    def run_and_tell(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        done()
        return result

    autograd._engine_run_backward = run_and_tell
    try:
        yield
    finally:
        autograd._engine_run_backward = run


# ----------------------------------------------------------------------------
# What modules, optimizers and gradients do besides what is written in the step.

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
# What every optimizer of torch has beside its groups and states.
OPTIMIZER_TABLES = frozenset(
    (
        *OPTIMIZER_BOOKKEEPING,
        *("defaults", "param_groups", "state", "_zero_grad_profile_name"),
        "_step_supports_amp_scaling",
        *(
            f"_optimizer_{what}_{when}_hooks"
            for what in ("step", "state_dict", "load_state_dict")
            for when in ("pre", "post")
        ),
    )
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


# Hooks of all modules and of all optimizers.
_GLOBAL_HOOKS: tuple[Mapping[int, Any], ...] = (
    _module._global_forward_pre_hooks,
    _module._global_forward_hooks,
    _module._global_backward_pre_hooks,
    _module._global_backward_hooks,
    _optimizer._global_optimizer_pre_hooks,
    _optimizer._global_optimizer_post_hooks,
)

_OWN_MODULES = ("torch.", "torchspmd.")


def global_hooks() -> dict[int, Any]:
    """The hooks of the user's own that all modules or all optimizers call, by key.

    Those of torch and of torchspmd watch, and change nothing.
    """
    return {
        key: hook
        for table in _GLOBAL_HOOKS
        for key, hook in table.items()
        if not str(getattr(hook, "__module__", "")).startswith(_OWN_MODULES)
    }


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
