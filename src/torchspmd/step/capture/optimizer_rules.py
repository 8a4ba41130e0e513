"""What is known about optimizers of torch: whether a graph can make their steps."""

from typing import Any

import torch
from torch.optim import Optimizer

from torchspmd import _torch
from torchspmd.errors import CaptureError

# Optimizers whose update of an element depends on that element's own values alone: on a
# shard they do what they would do on the whole tensor.
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.RAdam,
    torch.optim.ASGD,
)
# Optimizers whose state, made in a step that is skipped, is as good as none when it is
# zero: it decays to what the first real step would make.
_START_AT_ZERO = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.RAdam,
    torch.optim.Adafactor,
)

# ----------------------------------------------------------------------------
# Steps that are refused.

# Optimizers that need values on the host in the middle of a step: why, and the fix.
_NEED_VALUES: dict[type[Optimizer], tuple[str, str]] = {
    torch.optim.LBFGS: (
        "calls its closure as often as the values of the loss and the gradients ask for",
        "Compile the closure (loss and backward, without the optimizer) and call "
        "optim.step(closure) yourself, or use an optimizer that makes one update in each "
        "step, such as AdamW.",
    ),
    torch.optim.SparseAdam: (
        "works on sparse gradients, whose sizes depend on the values of the batch",
        "Make the embedding with sparse=False and use Adam.",
    ),
}


def check_optimizer(argument: str, optimizer: Optimizer) -> None:
    """Refuse an optimizer that cannot be captured, whatever its options are."""
    for kind, (reason, fix) in _NEED_VALUES.items():
        if isinstance(optimizer, kind):
            raise CaptureError(
                f"compile: argument {argument} is {type(optimizer).__name__}, which "
                f"{reason}.\nA graph has no values before it runs. {fix}"
            )


# They take norms, means and products of whole parameters.
_NEED_WHOLE = tuple(
    getattr(torch.optim, name)
    for name in ("Adafactor", "Muon")
    if hasattr(torch.optim, name)
)
_WHOLE_FIX = (
    "Use parallel_mode=DataParallel('replicate'), or an optimizer that treats each element "
    "by itself (SGD, Adam, AdamW, RAdam, ...)."
)


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether ranks hold different parts or terms of a tensor."""
    layout = _torch.layout_of(tensor)
    return layout is not None and not all(p.is_replicate() for p in layout.placements)


def check_whole(optimizer: Optimizer, sharded: list[str]) -> None:
    """Refuse an optimizer that needs whole parameters where ranks hold parts of them."""
    if sharded and isinstance(optimizer, _NEED_WHOLE):
        more = f" and {len(sharded) - 1} more" if len(sharded) > 1 else ""
        raise CaptureError(
            f"compile: {type(optimizer).__name__} works on whole parameters, and each rank "
            f"holds a part of {sharded[0]}{more}. {_WHOLE_FIX}"
        )


def refuse_read() -> CaptureError:
    """The error for a number that an optimizer reads where ranks hold parts of it."""
    return CaptureError(
        "compile: the optimizer reads a number (item()) from a tensor that is spread over "
        f"ranks, and each rank would read another one. {_WHOLE_FIX}"
    )


def check_first_step(optimizer: Optimizer) -> None:
    """Refuse a first step that may be skipped and then leaves state without values."""
    if not isinstance(optimizer, torch.optim.SGD) or optimizer.state:
        return
    may_skip = getattr(optimizer, "found_inf", None) is not None
    if may_skip and any(group["momentum"] != 0 for group in optimizer.param_groups):
        raise CaptureError(
            "compile: the first step of SGD(fused=True) makes its momentum, and GradScaler "
            "may skip that step; torch then leaves the momentum without values. Make one "
            "step without GradScaler first, or pass fused=False."
        )


def check_skipped_start(optimizer: Optimizer) -> None:
    """Refuse a first step that GradScaler may skip, where that leaves other state."""
    dampening = any(group.get("dampening") for group in optimizer.param_groups)
    if type(optimizer) not in _START_AT_ZERO or dampening:
        raise CaptureError(
            f"compile: the first step of {type(optimizer).__name__} makes its state, and "
            "GradScaler may skip that step. Make one step without compile first, so that "
            "the state exists, or pass fused=True where the optimizer has it."
        )


# ----------------------------------------------------------------------------
# States.


def initial_state(
    optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> dict[str, Any]:
    """The state of a parameter before its first update; empty where none is known."""
    with torch.no_grad():
        if type(optimizer) is not torch.optim.SGD:
            return _torch.initial_state(optimizer, group, parameter)
        if group["momentum"] == 0 or group["dampening"] != 0:
            return {}
        # Its first update takes the gradient itself; later ones add it to the decayed
        # buffer. Only to minus zero can any number be added, zeros too, and stay as it is.
        return {"momentum_buffer": torch.full_like(parameter, -0.0)}


# Which states are counters, and not values of their parameter.
_NAMES = frozenset({"step", "eta", "mu", "mu_product"})


def is_counter(key: str, tensor: torch.Tensor) -> bool:
    """Whether a state is a number that is the same on every rank, however sharded.

    Only the name tells it from the state of a parameter that is one number.

    >>> is_counter("step", torch.zeros(())), is_counter("exp_avg", torch.zeros(()))
    (True, False)
    """
    return key in _NAMES and tensor.ndim == 0
