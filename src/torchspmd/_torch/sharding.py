"""Parameters and their shards: versions, hooks, views."""

from typing import Any

import torch
from torch._ops import OpOverload


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written in place; views and detached twins count too."""
    return int(tensor._version)


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether the user hung a hook on a tensor's gradient."""
    held: Any = tensor
    return bool(held._backward_hooks) or bool(held._post_accumulate_grad_hooks)


def is_view(operator: Any) -> bool:
    """Whether an operator looks at its argument's memory in another shape."""
    return isinstance(operator, OpOverload) and bool(operator.is_view)
