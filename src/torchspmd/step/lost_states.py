"""States that a failed update left undefined, until a checkpoint has replaced them."""

from collections.abc import Iterable

import torch

from torchspmd import _torch
from torchspmd.errors import LostStateError
from torchspmd.step.capture.inventory import Inventory


class LostStates:
    """What must get other values before training goes on.

    A tensor has another value once it was written, as by ``nn.Module.load_state_dict``,
    or once another tensor stands in its place, as after ``Optimizer.load_state_dict``. A
    counter that is a Python number has one once the optimizer keeps it somewhere else.

    Args:
        inventory: Where the tensors and numbers are.
        states: Their places among the graph's inputs: tensors, then numbers.
    """

    def __init__(self, inventory: Inventory, states: Iterable[int]) -> None:
        self._inventory = inventory
        places, count = list(states), len(inventory.slots)
        self._versions = {n: self._version(n) for n in places if n < count}
        self._numbers = [inventory.numbers[n - count] for n in places if n >= count]

    def check(self) -> None:
        """Raise unless all of them have got other values."""
        held = self._held()
        lost = [
            self._inventory.slots[slot].name
            for slot, version in self._versions.items()
            if slot in held and self._version(slot) == version
        ]
        holders = {
            id(entries)
            for _, optimizer in self._inventory.optimizers
            for entries in optimizer.state.values()
        }
        lost += [each.name for each in self._numbers if id(each.holder) in holders]
        if lost:
            raise LostStateError.of(lost)

    def _version(self, slot: int) -> int:
        tensor = self._inventory.slots[slot].tensor
        return _torch.version_of(_torch.plain_tensor(tensor))

    def _held(self) -> set[int]:
        """Tensors that still stand where they stood, or stand in no known place."""
        inventory = self._inventory
        places = [
            (place.slot, place.table.get(place.key)) for place in inventory.places
        ]
        for state in inventory.states:
            _, optimizer = inventory.optimizers[state.optimizer]
            owner = inventory.slots[state.parameter].tensor
            now = optimizer.state.get(owner, {}).get(state.key)
            places.append((state.slot, now))
        for parameter, slot in inventory.gradients.items():
            places.append((slot, inventory.slots[parameter].tensor.grad))
        gone = {slot for slot, now in places if not self._is(slot, now)}
        kept = {slot for slot, now in places if self._is(slot, now)}
        return set(self._versions) - (gone - kept)

    def _is(self, slot: int, now: torch.Tensor | None) -> bool:
        return now is self._inventory.slots[slot].tensor
