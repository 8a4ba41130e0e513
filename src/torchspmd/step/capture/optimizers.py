"""Optimizers and gradient scalers while a step is traced: they work on traced tensors."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchspmd import _torch
from torchspmd.comm import Phase
from torchspmd.errors import CaptureError, CaptureWarning
from torchspmd.step.capture.host_values import HostValues
from torchspmd.step.capture.inventory import Inventory
from torchspmd.step.capture.optimizer_rules import (
    check_first_step,
    check_skipped_start,
)
from torchspmd.step.capture.substitute import Substitution
from torchspmd.step.capture.trace_modes import replaced
from torchspmd.step.graph.metadata import OwnerLog


@contextlib.contextmanager
def watched_optimizers(
    substitution: Substitution,
    log: OwnerLog,
    world: _torch.FakeWorld,
    values: HostValues,
) -> Iterator[None]:
    """Inside, each step of an optimizer works on plain tensors, and may be skipped."""
    inventory = substitution.inventory
    around = _Surroundings(log, world, values, [])
    with contextlib.ExitStack() as stack:
        for index, (_, optimizer) in enumerate(inventory.optimizers):
            run = _OptimizerRun(substitution, index, around)
            for hook in (
                optimizer.register_step_pre_hook(run.begin),
                optimizer.register_step_post_hook(run.end),
            ):
                stack.callback(hook.remove)
            stack.callback(run.abort)
        guard = functools.partial(_refuse_unknown, inventory)
        stack.callback(register_optimizer_step_pre_hook(guard).remove)
        with _scaled_steps(substitution), _noting_cleared(substitution):
            yield


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """What all optimizers of a step share; ``running``: those in their step, inner last."""

    log: OwnerLog
    world: _torch.FakeWorld
    values: HostValues
    running: "list[_OptimizerRun]"


def _refuse_unknown(
    inventory: Inventory, optimizer: Optimizer, args: Any, kwargs: Any
) -> None:
    """Refuse the step of an optimizer that has the user's parameters, without gradients.

    A hook or a closure can hold one that is no argument; it would update nothing.
    """
    if any(optimizer is known for _, known in inventory.optimizers):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in inventory.by_id:
                name = inventory.slots[inventory.by_id[id(parameter)]].name
                raise CaptureError(
                    f"compile: the step, or a hook, calls step() of an optimizer "
                    f"({type(optimizer).__name__}) that is no argument of the step, "
                    f"so {name} would not be updated. "
                    "Pass every optimizer that steps as an argument."
                )


class _OptimizerRun:
    """Hands an optimizer the plain tensors while it steps, and lets it read counters."""

    def __init__(
        self, substitution: Substitution, index: int, around: "_Surroundings"
    ) -> None:
        self._substitution, self._index, self._around = substitution, index, around
        self._open: contextlib.ExitStack | None = None
        self._depth = 0

    def begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._depth += 1
        if self._depth > 1:  # a step that calls super().step() has hooks twice
            return None
        check_first_step(optimizer)
        self._enter()
        args = (*args[:1], *map(self._outside, args[1:]))
        return args, {key: self._outside(value) for key, value in kwargs.items()}

    def _outside(self, argument: Any) -> Any:
        """A closure that runs as if no optimizer were in its step."""
        if not callable(argument):
            return argument

        @functools.wraps(argument)
        def closure(*args: Any, **kwargs: Any) -> Any:
            paused = list(self._around.running)
            for run in reversed(paused):
                run._close()
            try:
                return argument(*args, **kwargs)
            finally:
                for run in paused:  # with the gradients that backward made
                    run._enter()

        return closure

    def _enter(self) -> None:
        stack = self._open = contextlib.ExitStack()
        stack.enter_context(self._around.log.owned(Phase.OPTIMIZER))
        stack.enter_context(self._around.world.reading_values())
        stack.enter_context(_torch.numbers.extremes_in_graph())
        stack.enter_context(_torch.numbers.math_in_graph())
        stack.enter_context(self._around.values)
        self._around.running.append(self)
        stack.callback(self._around.running.remove, self)
        for group, slots in self._substitution.groups_of(self._index):
            stack.callback(group.__setitem__, "params", group["params"])
            group["params"] = [self._substitution.steps_on(slot) for slot in slots]
            self._substitution.stepped.update(slots)
            for slot in slots:
                self._hand_over(slot, stack)

    def _hand_over(self, slot: int, stack: contextlib.ExitStack) -> None:
        shown, plain = self._substitution.shown[slot], self._substitution.steps_on(slot)
        # An optimizer that steps another one has the gradient, and may have changed it.
        if shown is plain or slot in self._substitution.handed:
            return
        self._substitution.handed.add(slot)
        stack.callback(self._substitution.handed.discard, slot)
        with torch.no_grad():
            plain.grad = self._substitution.mode.for_optimizer(shown)
        stack.callback(_take_back, shown, plain, plain.grad)

    def end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._note_updated()
            self.abort()

    def _note_updated(self) -> None:
        groups = self._substitution.groups_of(self._index)
        slots = [slot for _, some in groups for slot in some]
        updated = {
            (self._index, slot)
            for slot in slots
            if self._substitution.steps_on(slot).grad is not None
        }
        self._substitution.updated |= updated
        if slots and not updated:
            self._warn_of_no_update()

    def _warn_of_no_update(self) -> None:
        name, _ = self._substitution.inventory.optimizers[self._index]
        warnings.warn(
            f"compile: {name} updates nothing: none of its parameters has a gradient when "
            "it steps. Pass the optimizer that was made with the parameters of the model "
            "that the step trains, and call backward() before step().",
            CaptureWarning,
            stacklevel=2,
        )

    def abort(self) -> None:
        self._depth = 0
        self._close()

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def _take_back(
    shown: torch.Tensor, plain: torch.Tensor, handed: torch.Tensor | None
) -> None:
    """Give a parameter the gradient that its optimizer put in place of the one it had."""
    made = plain.grad
    if made is not handed:
        layout = _torch.layout_of(shown)
        shown.grad = None if made is None else _torch.wrap_local(made, layout)


# ----------------------------------------------------------------------------
# Parameters whose gradients a step clears before it makes its own.
#
# What such a step finds in ``grad`` decides nothing, so its own gradient may be put there
# later. Where ``grad`` is None to begin with, a graph does not show whether the step would
# have cleared it: the call of ``zero_grad()`` does.


@contextlib.contextmanager
def _noting_cleared(substitution: Substitution) -> Iterator[None]:
    """Note on the substitution whose gradients ``zero_grad()`` clears before backward."""
    places = {id(shown): place for place, shown in enumerate(substitution.shown)}

    def note(parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            place = places.get(id(parameter))
            if place is not None and place not in substitution.arrived:
                substitution.fresh.add(place)

    def of_optimizer(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        note(each for group in optimizer.param_groups for each in group["params"])
        optimizer_clears(optimizer, *args, **kwargs)

    def of_module(module: Any, *args: Any, **kwargs: Any) -> None:
        note(module.parameters())
        module_clears(module, *args, **kwargs)

    optimizer_clears, module_clears = Optimizer.zero_grad, nn.Module.zero_grad
    with replaced(
        (Optimizer, "zero_grad", of_optimizer), (nn.Module, "zero_grad", of_module)
    ):
        yield


# ----------------------------------------------------------------------------
# Loss scaling in a captured step: an update may be skipped, without a host read.


@contextlib.contextmanager
def _scaled_steps(substitution: Substitution) -> Iterator[None]:
    """While a step is traced, have its scalers choose by value inside the graph."""
    with contextlib.ExitStack() as stack:
        is_updated = [
            stack.enter_context(
                _torch.choosing_steps(
                    scaler, functools.partial(_step_or_skip, substitution)
                )
            )
            for _, scaler in substitution.inventory.scalers
        ]
        yield
        if not all(each() for each in is_updated):
            raise CaptureError(
                "compile: the step unscales gradients or steps through a GradScaler, but "
                "does not call its update(), so that what it found would be lost. Call "
                "scaler.update() inside the step, after scaler.step()."
            )


def _step_or_skip(
    substitution: Substitution,
    optimizer: Optimizer,
    found: torch.Tensor,
    make: Callable[[], Any],
) -> Any:
    """Make an optimizer's step, and take it back where infinities were found.

    Which of both it is, is chosen by value when the graph runs.
    """
    numbers = substitution.inventory.numbers
    names = [number.name for number in numbers if number.is_state or number.is_counter]
    if names:
        raise CaptureError(
            f"compile: {type(optimizer).__name__} counts its steps with a Python "
            f"number ({names[0]}), which cannot depend on whether GradScaler skips "
            "the step. Keep the counter in a tensor, or scale the loss by a constant."
        )
    with torch.no_grad():
        before = [(each, each.clone()) for each in _written_by(substitution, optimizer)]
    known = {id(each) for each, _ in before}
    result = make()
    created = [
        each for each in _written_by(substitution, optimizer) if id(each) not in known
    ]
    if created:
        check_skipped_start(optimizer)
    with torch.no_grad():
        is_skipped = found != 0
        for tensor, old in before:
            tensor.copy_(torch.where(is_skipped, old, tensor))
        for tensor in created:
            tensor.copy_(torch.where(is_skipped, torch.zeros_like(tensor), tensor))
    return result


def _written_by(substitution: Substitution, optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters and states that a step writes, this rank's part of each."""
    optimizers = [each for _, each in substitution.inventory.optimizers]
    found = [
        substitution.steps_on(slot)
        for _, slots in substitution.groups_of(optimizers.index(optimizer))
        for slot in slots
    ]
    found += [
        value
        for entries in optimizer.state.values()
        for value in entries.values()
        if isinstance(value, torch.Tensor)
    ]
    return [_torch.plain_tensor(tensor) for tensor in found]
