"""Parameters that a layer computes anew in each call: weight norm, pruning and the like.

What it computes them from can be kept whole, but not cut: the norm of a shard is not that
of the weight.
"""

from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from torchspmd import _torch


def describe_computed(module: nn.Module) -> list[str]:
    """The problem of a module with computed parameters, as ``find_problems`` says it."""
    return [text for part in module.modules() for text in _parametrized(part)] + [
        text for part in module.modules() for text in describe_hooked(part)
    ]


def _parametrized(module: nn.Module) -> list[str]:
    if not parametrize.is_parametrized(module):
        return []
    tables: Any = module.parametrizations
    listed = ", ".join(
        f"{name} by {', '.join(type(step).__name__ for step in steps)}"
        for name, steps in tables.items()
    )
    text = (
        f"it computes parameters in each call ({listed}), which no shard can do; make "
        "them plain first, with torch.nn.utils.parametrize.remove_parametrizations, or "
        "keep the module whole with ReplicateParallel()"
    )
    return [text]


def describe_hooked(module: nn.Module) -> list[str]:
    """The same for the older way: a hook that writes the parameter before each call."""
    hooks = [
        type(hook).__name__
        for _, _, hook in _torch.hooks_of(module, _torch.HOOK_TABLES)
        if type(hook).__module__.startswith("torch.nn.utils.")
    ]
    if not hooks:
        return []
    text = (
        f"a hook computes parameters before each call ({', '.join(hooks)}), which no "
        "style knows; make them plain first, with torch.nn.utils.remove_weight_norm, "
        "remove_spectral_norm or prune.remove"
    )
    return [text]
