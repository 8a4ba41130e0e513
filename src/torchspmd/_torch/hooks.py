"""What a module does besides its forward."""

from torch import nn

HOOK_TABLES = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks of its own may change what a module takes or hands on."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
