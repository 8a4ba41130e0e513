"""Loss scaling in a captured step: an update may be skipped, without a host read."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from torchspmd import _torch
from torchspmd.errors import CaptureError
from torchspmd.step.capture.inventory import Inventory
from torchspmd.step.capture.stage import Stage

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


@contextlib.contextmanager
def scaled_steps(stage: Stage) -> Iterator[None]:
    """While a step is traced, have its scalers choose by value inside the graph."""
    with contextlib.ExitStack() as stack:
        is_updated = [
            stack.enter_context(
                _torch.choosing_steps(scaler, _Choice(stage, stage.inventory).step)
            )
            for _, scaler in stage.inventory.scalers
        ]
        yield
        if not all(each() for each in is_updated):
            raise CaptureError(
                "compile: the step unscales gradients or steps through a GradScaler, but "
                "does not call its update(), so that what it found would be lost. Call "
                "scaler.update() inside the step, after scaler.step()."
            )


class _Choice:
    """Makes an optimizer's step and takes it back where infinities were found."""

    def __init__(self, stage: Stage, inventory: Inventory) -> None:
        self._stage, self._inventory = stage, inventory

    def step(
        self, optimizer: Optimizer, found: torch.Tensor, make: Callable[[], Any]
    ) -> Any:
        """What ``optimizer.step`` would do, or nothing, chosen when the graph runs."""
        self._check(optimizer)
        with torch.no_grad():
            before = [(each, each.clone()) for each in self._tensors(optimizer)]
        known = {id(each) for each, _ in before}
        result = make()
        created = [each for each in self._tensors(optimizer) if id(each) not in known]
        if created:
            _check_start(optimizer)
        with torch.no_grad():
            is_skipped = found != 0
            for tensor, old in before:
                tensor.copy_(torch.where(is_skipped, old, tensor))
            for tensor in created:
                tensor.copy_(torch.where(is_skipped, torch.zeros_like(tensor), tensor))
        return result

    def _tensors(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """The parameters and states that a step writes, this rank's part of each."""
        index = [each for _, each in self._inventory.optimizers].index(optimizer)
        found = [
            self._stage.steps_on(slot)
            for owner, _, slots in self._inventory.groups
            if owner == index
            for slot in slots
        ]
        found += [
            value
            for entries in optimizer.state.values()
            for value in entries.values()
            if isinstance(value, torch.Tensor)
        ]
        return [_torch.plain_tensor(tensor) for tensor in found]

    def _check(self, optimizer: Optimizer) -> None:
        names = [number.name for number in self._inventory.numbers if number.is_state]
        if names:
            raise CaptureError(
                f"compile: {type(optimizer).__name__} counts its steps with a Python "
                f"number ({names[0]}), which cannot depend on whether GradScaler skips "
                "the step. Keep the counter in a tensor, or scale the loss by a constant."
            )


def _check_start(optimizer: Optimizer) -> None:
    dampening = any(group.get("dampening") for group in optimizer.param_groups)
    if type(optimizer) not in _START_AT_ZERO or dampening:
        raise CaptureError(
            f"compile: the first step of {type(optimizer).__name__} makes its state, and "
            "GradScaler may skip that step. Make one step without compile first, so that "
            "the state exists, or pass fused=True where the optimizer has it."
        )
