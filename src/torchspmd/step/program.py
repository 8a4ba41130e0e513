"""A captured step: one functional graph, its guards, and how it is run."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import Ledger
from torchspmd.step.inventory import Inventory
from torchspmd.step.outputs import (
    NewGradient,
    NewNumber,
    NewState,
    NewValue,
    Outputs,
    Result,
)
from torchspmd.step.signature import Signature


@dataclass(slots=True)
class Program:
    """One captured step and what is known about it.

    Attributes:
        number: Its place among the programs of its compiled step.
        graph: The functional graph: tensors and numbers in, new values out.
        reason: Why it was captured: ``first call``, or what differed from an earlier one.
        ledger: What the graph communicates.
        capture_seconds: Time to trace, transform and compile it.
        first_run_seconds: Time of its first run, after capture.
        step_seconds: Times of the latest runs after the first.
    """

    number: int
    graph: fx.GraphModule
    signature: Signature
    outputs: Outputs
    symbols: tuple[Any, ...]
    assumptions: tuple[Any, ...]
    run: Callable[..., Any]
    reason: str
    ledger: Ledger
    capture_seconds: float
    first_run_seconds: float | None = None
    step_seconds: list[float] = field(default_factory=list)
    _checked: tuple[float, ...] | None = None

    @property
    def code(self) -> str:
        """The graph as readable Python."""
        text: str = self.graph.print_readable(print_output=False)
        return text

    def accepts(self, inventory: Inventory) -> bool:
        """Whether the numbers of a call fit what the graph assumed about them."""
        return not self.broken_assumptions(inventory)

    def broken_assumptions(self, inventory: Inventory) -> list[str]:
        """Assumptions about numbers that do not hold for this call, as text."""
        values = tuple(number.value for number in inventory.numbers)
        if values == self._checked:
            return []
        by_symbol = dict(zip(self.symbols, values, strict=True))
        by_symbol.pop(None, None)
        broken = [
            assumption
            for assumption in self.assumptions
            if not _torch.holds(assumption, by_symbol)
        ]
        if not broken:
            self._checked = values
            return []
        names = {
            str(symbol): number.name
            for symbol, number in zip(self.symbols, inventory.numbers, strict=True)
        }
        return [_readable(str(assumption), names) for assumption in broken]

    def call(self, inventory: Inventory, *, last: bool) -> Any:
        """Run the graph once and write its results back into the user's tensors."""
        start = time.perf_counter()
        with torch.no_grad():
            flat = inventory.flat_inputs()
            values = self.run(*flat, last_iter=True) if last else self.run(*flat)
            result = write_back(self.outputs, inventory, values)
        seconds = time.perf_counter() - start
        if self.first_run_seconds is None:
            self.first_run_seconds = seconds
        else:
            self.step_seconds.append(seconds)
            del self.step_seconds[:-1000]
        return result


def _readable(text: str, names: dict[str, str]) -> str:
    for symbol in sorted(names, key=len, reverse=True):
        text = text.replace(symbol, names[symbol])
    return text


def write_back(outputs: Outputs, inventory: Inventory, values: Any) -> Any:
    """Put each value where it belongs; return what the user's function returned."""
    leaves = list(outputs.leaves)
    for address in outputs.new_states:  # first, so that keys have the eager order
        _state(inventory, address)[address.key] = None
    for address, constant in outputs.constant_states:
        _state(inventory, address)[address.key] = constant
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for destination, value in zip(outputs.destinations, values, strict=True):
        match destination:
            case NewValue(slot):
                targets.append(_torch.plain_tensor(inventory.slots[slot].tensor))
                sources.append(value)
            case NewGradient(parameter):
                owner = inventory.slots[parameter].tensor
                owner.grad = _like(owner, value)
            case NewState(_, parameter, key):
                owner = inventory.slots[parameter].tensor
                _state(inventory, destination)[key] = _like_if_shaped(owner, value)
            case NewNumber(number):
                counter = inventory.numbers[number]
                assert counter.holder is not None
                counter.holder[counter.key] = value
            case Result(leaf):
                leaves[leaf] = value
    if targets:
        _torch.copy_all(targets, sources)
    for parameter in outputs.cleared:
        inventory.slots[parameter].tensor.grad = None
    return _torch.unflatten_tree(leaves, outputs.structure)


def _state(inventory: Inventory, address: NewState) -> Any:
    owner = inventory.slots[address.parameter].tensor
    return inventory.optimizers[address.optimizer][1].state[owner]


def _like(owner: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A value in the layout of the tensor that it belongs to."""
    layout = _torch.layout_of(owner)
    return value if layout is None else _torch.wrap_local(value, layout)


def _like_if_shaped(owner: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    # A counter is the same on every rank, whatever the layout of its parameter.
    if value.shape != _torch.plain_tensor(owner).shape:
        return value
    return _like(owner, value)
