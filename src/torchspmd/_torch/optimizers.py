"""What optimizers keep, and the gradient scaler of mixed precision."""

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler, _refresh_per_optimizer_state

_TENSORS = ("_scale", "_growth_tracker")

# (optimizer, number of infinities found, what makes the step) -> what the step returned
ChosenStep = Callable[[torch.optim.Optimizer, torch.Tensor, Callable[[], Any]], Any]


def initial_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> dict[str, Any]:
    """What an optimizer of torch keeps for a parameter before its first update.

    Empty for other optimizers, and for those that make their state in the update itself.
    """
    kind = type(optimizer)
    make: Any = getattr(kind, "_init_group", None)
    if make is None or not f"{kind.__module__}.".startswith("torch.optim."):
        return {}
    stand_in = parameter.detach()  # the user's keeps its own gradient
    stand_in.grad = torch.empty_like(stand_in)
    other: Any = object.__new__(kind)
    vars(other).update(vars(optimizer), state=defaultdict(dict))
    lists: list[list[Any]] = [[] for _ in inspect.signature(make).parameters][2:]
    # Options that contradict each other: the step itself raises when it is traced.
    with contextlib.suppress(RuntimeError):
        make(other, {**group, "params": [stand_in]}, *lists)
    return dict(other.state.get(stand_in, {}))


def scaler_tensors(scaler: GradScaler, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of a scaler by attribute; it makes them when it first scales a loss."""
    if not scaler.is_enabled():
        return {}
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)
    return {name: getattr(scaler, name) for name in _TENSORS}


def scaler_facts(scaler: GradScaler) -> tuple[Any, ...]:
    """What a program takes for granted about a scaler."""
    if not scaler.is_enabled():
        return (type(scaler).__name__, False)
    return (
        type(scaler).__name__,
        True,
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
    )


@contextlib.contextmanager
def choosing_steps(
    scaler: GradScaler, choose: ChosenStep
) -> Iterator[Callable[[], bool]]:
    """Let ``choose`` make the steps that a scaler would skip after reading a value.

    Gives a function that tells whether ``update`` has been called after the last step.
    """
    if not scaler.is_enabled():
        yield lambda: True
        return
    dynamic: Any = scaler
    before = scaler._per_optimizer_states

    def make(
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        found = torch.stack(list(state["found_inf_per_device"].values())).sum()
        return choose(optimizer, found, lambda: optimizer.step(*args, **kwargs))

    dynamic._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
    dynamic._maybe_opt_step = make
    try:
        yield lambda: not scaler._per_optimizer_states
    finally:
        del dynamic._maybe_opt_step
        dynamic._per_optimizer_states = before
