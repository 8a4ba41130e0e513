"""What the result of a call depends on besides its code: forms of tensors, modes, hooks."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; of a DTensor, this rank's shard."""
    if type(tensor) in _PLAIN:  # asked for every tensor at every step
        return tensor
    local = getattr(tensor, "_local_tensor", None)
    return tensor if local is None else local


def layout_of(tensor: torch.Tensor) -> Any:
    """The spec of a DTensor; None for a plain tensor."""
    return None if type(tensor) in _PLAIN else getattr(tensor, "_spec", None)


def form_check(
    tensors: Sequence[torch.Tensor],
) -> Callable[[Sequence[torch.Tensor]], bool]:
    """A quick check whether plain tensors have the types and forms that these have now.

    Shapes, strides, dtypes, devices and whether they require gradients. It never says yes
    where one of them differs; under another autocast or in inference mode it says no.
    """
    kind: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
    if kind is None:
        return lambda now: False
    guards = kind(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )
    return lambda now: bool(guards.check(*now))


def without_autocast() -> contextlib.AbstractContextManager[Any]:
    """Inside, operators compute in the dtypes that they are given."""
    return torch._C._DisableAutocast()


def autocast_state() -> tuple[Any, ...]:
    """Which device types have autocast on, and in which dtype."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    return tuple(
        (device, torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    )


def attention_kernels() -> tuple[bool, ...]:
    """Which kernels ``scaled_dot_product_attention`` may choose when it is called."""
    allowed: Any = torch.backends.cuda
    return (
        allowed.flash_sdp_enabled(),
        allowed.mem_efficient_sdp_enabled(),
        allowed.math_sdp_enabled(),
        allowed.cudnn_sdp_enabled(),
    )


def function_modes() -> tuple[Any, ...]:
    """The modes that see functions of torch: their classes, and plain data in them.

    ``torch.set_default_device`` and ``with torch.device(...)`` are such modes.
    """
    count = torch._C._len_torch_function_stack()
    return tuple(_mode_fact(torch._C._get_function_stack_at(n)) for n in range(count))


def saved_tensor_hooks() -> tuple[Any, ...]:
    """The code of the innermost hooks on tensors that are saved for backward."""
    found: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return tuple(getattr(each, "__code__", type(each)) for each in found or ())


def _mode_fact(mode: Any) -> tuple[Any, ...]:
    plain = (bool, int, float, str, torch.device, torch.dtype)
    own = sorted(vars(mode).items())
    return (
        type(mode),
        *((key, str(value)) for key, value in own if isinstance(value, plain)),
    )
