"""Optimizer state that exists before the first step, so that one program serves all steps.

An optimizer makes its state in its first update. Captured like that, the first step is a
program of its own, and the second call is captured again. The optimizers of torch make
their state apart from the update: here that is done before the step is captured, with the
counters at zero, and undone where capture fails. Which parameters get a gradient is known
only from the trace; where some do not, their state is taken back, as eager makes none, and
the step is traced once more.
"""

from collections.abc import Collection, Iterator
from typing import Any, Self, final

import torch

from torchspmd import _torch
from torchspmd.step.capture.inventory import Inventory
from torchspmd.step.capture.optimizer_rules import ELEMENTWISE, initial_state
from torchspmd.step.capture.outputs import Outputs
from torchspmd.step.capture.parallel_mode import ParallelMode


class UnusedStatesError(Exception):
    """A traced step does not update all parameters for which state was made.

    Attributes:
        updated: The optimizer and the parameter's slot of each update that it makes.
    """

    def __init__(self, updated: Collection[tuple[int, int]]) -> None:
        super().__init__("the step is traced again")
        self.updated = updated


@final
class InitialStates:
    """State made for the optimizers of one call; taken back after a failure inside."""

    def __init__(self, inventory: Inventory, mode: ParallelMode) -> None:
        self._optimizers = [optimizer for _, optimizer in inventory.optimizers]
        self._made: list[tuple[int, torch.Tensor]] = []
        self._inventory, self._mode = inventory, mode
        self._is_traced_again = False

    def __enter__(self) -> Self:
        try:
            for index, parameter, state in self._initial():
                self._optimizers[index].state[parameter] = state
                self._made.append((index, parameter))
        except BaseException:
            self.take_back()
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            self.take_back()

    def take_back(self) -> None:
        """Leave no state that was made here."""
        self._keep(())

    def __bool__(self) -> bool:
        """Whether state was made, and is still there."""
        return bool(self._made)

    def mark(self, inventory: Inventory) -> Inventory:
        """Write on the inventory of the call for which of its parameters state was made."""
        inventory.initial.update(
            (index, inventory.by_id[id(parameter)]) for index, parameter in self._made
        )
        return inventory

    def keep_updated(self, inventory: Inventory, error: UnusedStatesError) -> None:
        """Keep only the state of parameters that the step updates.

        None at all where it then updates others: its first step is no step like others.
        """
        slots, self._is_traced_again = inventory.slots, not self._is_traced_again
        updated = error.updated if self._is_traced_again else ()
        self._keep({(index, id(slots[slot].tensor)) for index, slot in updated})

    def _keep(self, kept: Collection[tuple[int, int]]) -> None:
        for index, parameter in self._made:
            if (index, id(parameter)) not in kept:
                self._optimizers[index].state.pop(parameter, None)
        self._made = [(n, each) for n, each in self._made if (n, id(each)) in kept]

    def _initial(self) -> Iterator[tuple[int, torch.Tensor, dict[str, Any]]]:
        stand_in = self._mode.stand_in(self._inventory)
        for index, number, slots in self._inventory.groups:
            optimizer = self._optimizers[index]
            for slot in slots:
                parameter = self._inventory.slots[slot].tensor
                if not parameter.requires_grad or parameter in optimizer.state:
                    continue
                shown = stand_in(slot)
                is_laid_out = _torch.layout_of(shown) is not None
                if is_laid_out and type(optimizer) not in ELEMENTWISE:
                    continue  # refused where it would step
                group = optimizer.param_groups[number]
                state = initial_state(optimizer, group, shown)
                if state:
                    yield index, parameter, state


def check_initial(inventory: Inventory, updated: Collection[tuple[int, int]]) -> None:
    """Raise where state was made for a parameter that the step does not update."""
    if not inventory.initial.issubset(updated):
        raise UnusedStatesError(updated)


def describe_first_step(inventory: Inventory, outputs: Outputs) -> Iterator[str]:
    """Say which optimizers make state in this step, so that the next differs."""
    made = {address.optimizer for address in outputs.new_states}
    made.update(address.optimizer for address, _ in outputs.constant_states)
    for index in sorted(made):
        name, optimizer = inventory.optimizers[index]
        is_sgd = type(optimizer) is torch.optim.SGD
        why = "with dampening, which its first step leaves out" if is_sgd else ""
        why = why or "which may do something else in its first step"
        yield (
            f"{name} makes its state in this step: the next step is captured as a program "
            f"of its own ({type(optimizer).__name__}, {why})"
        )
