"""A captured step: one functional graph, its guards, and how it is run."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import Ledger, format_count
from torchspmd.errors import UsageError
from torchspmd.step.capture.dynamic_shapes import Sizes
from torchspmd.step.capture.guards import Signature
from torchspmd.step.capture.host_values import Reads
from torchspmd.step.capture.inventory import Inventory
from torchspmd.step.capture.optimizer_rules import is_counter
from torchspmd.step.capture.outputs import (
    Destination,
    NewGradient,
    NewNumber,
    NewState,
    NewValue,
    Outputs,
    Result,
)
from torchspmd.step.capture.shared_memory import SharedMemory
from torchspmd.step.deferral.module import IterGraphModule
from torchspmd.step.deferral.state import State
from torchspmd.step.graph.memory import PeakMemory
from torchspmd.step.graph.metadata import output_values
from torchspmd.step.lower.backends import BackendChoice, Lowered
from torchspmd.step.lower.in_place import InPlaceReport
from torchspmd.step.rank_agreement import CommPlan
from torchspmd.step.virtual.certificate import Certificate

_MOST_CHECKED = 1000  # numbers and sizes that are known to fit


@dataclass(slots=True, repr=False)
class Program:
    """One captured step and what is known about it.

    Attributes:
        number: Its place among the programs of its compiled step.
        graph: The functional graph: tensors and numbers in, new values out.
        reason: Why it was captured: ``first call``, or what differed from an earlier one.
        agreed: Which program ranks have agreed on sends what this one sends.
        plan: What it sends.
        peers: The ranks that it communicates with, where they are processes.
        shapes: The shapes of tensor arguments that choices were made by.
        sizes: The sizes of tensor arguments that may be any; None for none.
        ledger: What the graph communicates.
        certificate: Which passes ran, what they claim, what was checked and what not.
        in_place: Which new values are computed in the memory of the old ones.
        memory: What no two tensors of a call may share.
        updated: The optimizer and the parameter's slot of each update that it makes.
        peak_memory: What is alive at the worst moment, read from the graph; None for a
            transformation that returns a callable of its own.
        released: Inputs that are given up before the run: gradients that the step
            replaces without reading them.
        notes: What else was done to the graph, a line each.
        backend: What runs the graph.
        choice: How that was chosen, with ``backend="auto"``.
        rival: The same program with the other backend, until one is chosen.
        loose: The outputs that are not in place already; None where that is not known.
        capture_seconds: Time to trace, transform and compile it.
        phase_seconds: The same by phase.
        first_run_seconds: Time of its first run, after capture.
        step_seconds: Times of the latest runs after the first.
        num_early: A score of calls that had other tensors than the call before.
    """

    number: int
    graph: fx.GraphModule
    signature: Signature
    outputs: Outputs
    symbols: tuple[Any, ...]
    assumptions: tuple[Any, ...]
    memory: SharedMemory
    updated: frozenset[tuple[int, int]]
    run: Callable[..., Any]
    reason: str
    ledger: Ledger
    certificate: Certificate
    capture_seconds: float
    agreed: int = 0
    plan: CommPlan = field(default_factory=CommPlan)
    peers: frozenset[int] = frozenset()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    sizes: Sizes | None = None
    size_symbols: tuple[tuple[Any, int, int], ...] = ()
    last_call: int = 0
    reads: Reads = field(default_factory=Reads)
    in_place: InPlaceReport = field(default_factory=InPlaceReport)
    peak_memory: PeakMemory | None = None
    released: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()
    backend: str = "graph"
    choice: BackendChoice | None = None
    rival: "Program | None" = None
    loose: tuple[int, ...] | None = None
    phase_seconds: dict[str, float] = field(default_factory=dict)
    first_run_seconds: float | None = None
    step_seconds: list[float] = field(default_factory=list)
    num_early: int = 0
    _checked: set[tuple[float, ...]] = field(default_factory=set)

    def __repr__(self) -> str:
        """One line; ``explain()`` of the compiled step says more."""
        nodes = len(self.graph.graph.nodes)
        return f"Program({self.number}: {nodes} nodes, {self.ledger!r})"

    @property
    def code(self) -> str:
        """The graph as readable Python."""
        text: str = self.graph.print_readable(print_output=False)
        return text

    @property
    def leaves_gradients(self) -> bool:
        """Whether the step puts new tensors into ``grad``."""
        return any(isinstance(d, NewGradient) for d in self.outputs.destinations)

    def accepts(self, inventory: Inventory) -> bool:
        """Whether the numbers of a call fit what the graph assumed about them."""
        return not self.broken_assumptions(inventory)

    def broken_assumptions(self, inventory: Inventory) -> list[str]:
        """Assumptions about numbers that do not hold for this call, as text."""
        values = tuple(number.value for number in inventory.numbers)
        sizes = {
            symbol: int(inventory.slots[slot].tensor.shape[dim])
            for symbol, slot, dim in self.size_symbols
        }
        checked = (*values, *sizes.values())
        if checked in self._checked and not self.reads.symbols:
            return []
        read = self.reads.again(inventory)
        if read is None:
            return [f"{each.name} equal everywhere" for each in self.reads.symbols]
        by_symbol = {**dict(zip(self.symbols, values, strict=True)), **read, **sizes}
        by_symbol.pop(None, None)
        broken = [
            assumption
            for assumption in self.assumptions
            if not _torch.holds(assumption, by_symbol)
        ]
        if not broken:
            if len(self._checked) >= _MOST_CHECKED:
                self._checked.clear()
            self._checked.add(checked)
            return []
        names = {
            str(symbol): number.name
            for symbol, number in zip(self.symbols, inventory.numbers, strict=True)
        }
        names |= {str(each.symbol): each.name for each in self.reads.symbols}
        names |= {
            str(symbol): f"{inventory.slots[slot].name}.shape[{dim}]"
            for symbol, slot, dim in self.size_symbols
        }
        return [_readable(str(assumption), names) for assumption in broken]

    def call(self, inventory: Inventory, *, last: bool) -> Any:
        """Run the graph once and write its results back into the user's tensors."""
        start = time.perf_counter()
        with torch.no_grad(), _torch.without_autocast():  # casts are nodes already
            flat = inventory.flat_inputs()
            self.memory.check(inventory, flat)
            for parameter, gradient in inventory.gradients.items():
                if gradient in self.released:
                    _release(inventory, flat, parameter, gradient)
            result = self._run_and_write(flat, inventory, last=last)
        seconds = time.perf_counter() - start
        if self.first_run_seconds is None:
            self.first_run_seconds = seconds
        else:
            self.step_seconds.append(seconds)
            del self.step_seconds[:-1000]
        return result

    def _run_and_write(
        self, flat: list[Any], inventory: Inventory, *, last: bool
    ) -> Any:
        def write(values: Any) -> Any:
            return write_back(self.outputs, inventory, values, self.loose)

        if isinstance(self.run, IterGraphModule):
            return self.run.run_and_write(flat, write, last_iter=last)
        return write(self.run(*flat))

    def stored_in(self, inventory: Inventory) -> dict[str, Any]:
        """What a call has stored in attributes, by name."""
        return {
            each.path: _torch.map_tree(lambda leaf: leaf, each.get(inventory))
            for each in self.outputs.stored
        }

    @property
    def is_deferring(self) -> bool:
        """Whether calls leave updates for the next one."""
        return isinstance(self.run, IterGraphModule) and self.run.is_deferring

    @property
    def state(self) -> State:
        """How far the updates are that an earlier step left."""
        return self.run.state if isinstance(self.run, IterGraphModule) else State.IDLE

    @property
    def is_pending(self) -> bool:
        """Whether an update of an earlier step is still to be made, or is lost."""
        return self.state is not State.IDLE

    def flush(self, inventory: Inventory) -> None:
        """Make the updates that an earlier step left for the next one.

        They belong to that step, whatever stands around whoever asks for them.
        """
        assert isinstance(self.run, IterGraphModule), type(self.run)
        # The call that left the updates has made those before: counters went on since.
        numbers = [
            each.reread(()) if each.is_state or each.is_counter else each
            for each in inventory.numbers
        ]
        inventory = replace(inventory, numbers=numbers)

        def write(values: list[Any]) -> None:
            outputs = self.outputs
            write_values(outputs.destinations, list(outputs.leaves), inventory, values)

        with (
            torch.inference_mode(False),
            _torch.numbers.real_tensors(),
            _torch.without_autocast(),
        ):
            self.run.flush(*inventory.flat_inputs(), write=write)

    @property
    def explanation(self) -> tuple[str, ...]:
        """The lines of ``explain()`` about it: why, what it sends, how long it takes."""
        total = self.ledger.total()
        return (
            f"  program {self.number}: {len(self.graph.graph.nodes)} nodes, "
            f"{format_count(total.count, 'collective')}, "
            f"{total.payload_bytes} payload bytes, "
            f"captured in {self.capture_seconds:.2f} s{self._times()}",
            *(f"    {line}" for line in self._details()),
        )

    def _details(self) -> Iterator[str]:
        yield from self.reason.splitlines()
        if self.sizes is not None:
            yield self.sizes.describe()
        if self.peak_memory is not None:
            yield f"memory: {self.peak_memory}"
        yield str(self.in_place)
        for name, why in self.in_place.left[:4]:
            yield f"  {name} after the run: {why}"
        if isinstance(self.run, IterGraphModule) and self.run.num_carried:
            yield (
                f"{len(self.run.graph.regions)} updates are made in the next step, "
                f"{self.run.num_carried} values go from one step to the next"
            )
        yield from self.notes
        if self.choice is not None:
            yield str(self.choice)
        yield self.certificate.summary()

    def _times(self) -> str:
        if self.first_run_seconds is None:
            return ""
        text = f", first run {self.first_run_seconds * 1e3:.1f} ms"
        if self.step_seconds:
            text += f", step {statistics.median(self.step_seconds) * 1e3:.1f} ms"
        return text


@dataclass(frozen=True, slots=True, repr=False)
class ClosedProgram:
    """What is known about a program whose step was closed; it holds no graph or tensor.

    Attributes:
        number: Its place among the programs of its compiled step.
        num_nodes: How many nodes its graph had.
        reason: Why it was captured.
        ledger: What the graph communicated.
        certificate: Which passes ran, what they claim, what was checked and what not.
        in_place: Which new values were computed in the memory of the old ones.
        peak_memory: What was alive at the worst moment.
        notes: What else was done to the graph, a line each.
        backend: What ran the graph.
        choice: How that was chosen, with ``backend="auto"``.
        capture_seconds: Time to trace, transform and compile it.
        first_run_seconds: Time of its first run, after capture.
        step_seconds: Times of the latest runs after the first.
        explanation: The lines of ``explain()`` about it.
    """

    number: int
    num_nodes: int
    reason: str
    ledger: Ledger
    certificate: Certificate
    in_place: InPlaceReport
    peak_memory: PeakMemory | None
    notes: tuple[str, ...]
    backend: str
    choice: BackendChoice | None
    capture_seconds: float
    first_run_seconds: float | None
    step_seconds: tuple[float, ...]
    explanation: tuple[str, ...]

    @classmethod
    def of(cls, program: Program) -> "ClosedProgram":
        """What to keep of a program."""
        new: dict[str, Any] = {
            "num_nodes": len(program.graph.graph.nodes),
            "step_seconds": tuple(program.step_seconds),
        }
        names = [each.name for each in fields(cls) if each.name not in new]
        return cls(**new, **{name: getattr(program, name) for name in names})

    def __repr__(self) -> str:
        """One line, as of a program."""
        return f"ClosedProgram({self.number}: {self.num_nodes} nodes, {self.ledger!r})"

    @property
    def graph(self) -> NoReturn:
        """Gone with its step."""
        raise self._gone("graph")

    @property
    def code(self) -> NoReturn:
        """Gone with its step."""
        raise self._gone("code")

    def _gone(self, name: str) -> UsageError:
        return UsageError(
            f"program {self.number}: its step was closed, by close() or the end of `with`, "
            f"and no graph is kept then. Look at programs[{self.number}].{name} before "
            "that; what stays is certificate, ledger, peak_memory, in_place, reason, notes "
            "and times."
        )


def find_released(
    outputs: Outputs, inventory: Inventory, lowered: Lowered
) -> frozenset[int]:
    """Gradients that a step replaces or clears without reading them, as in eager."""
    if lowered.running is None or not lowered.can_release:
        return frozenset()
    replaced = {
        where.parameter
        for where in outputs.destinations
        if isinstance(where, NewGradient)
    }
    inputs = lowered.running.graph.find_nodes(op="placeholder")
    return frozenset(
        gradient
        for parameter, gradient in inventory.gradients.items()
        if parameter in replaced.union(outputs.cleared) and not inputs[gradient].users
    )


def find_loose(outputs: Outputs, lowered: Lowered) -> tuple[int, ...] | None:
    """The outputs that a run does not leave in the tensors where they belong."""
    if lowered.running is None or not lowered.can_release:
        return None
    inputs = lowered.running.graph.find_nodes(op="placeholder")
    values = output_values(lowered.running.graph)
    return tuple(
        place
        for place, where in enumerate(outputs.destinations)
        if not (isinstance(where, NewValue) and values[place] is inputs[where.slot])
    )


def _release(
    inventory: Inventory, flat: list[Any], parameter: int, gradient: int
) -> None:
    slot = inventory.slots[gradient]
    empty = slot.tensor.new_empty(0)
    inventory.slots[gradient] = replace(slot, tensor=empty)
    flat[gradient] = empty
    inventory.slots[parameter].tensor.grad = None


def _readable(text: str, names: dict[str, str]) -> str:
    for symbol in sorted(names, key=len, reverse=True):
        text = text.replace(symbol, names[symbol])
    return text


def write_back(
    outputs: Outputs,
    inventory: Inventory,
    values: Any,
    loose: tuple[int, ...] | None = None,
) -> Any:
    """Put each value where it belongs; return what the user's function returned.

    ``loose`` names the values that are not there already; all by default.
    """
    for address in outputs.new_states:  # first, so that keys have the eager order
        _state(inventory, address)[address.key] = None
    for address, constant in outputs.constant_states:
        _state(inventory, address)[address.key] = constant
    for index, number, key, value in outputs.group_values:
        inventory.optimizers[index][1].param_groups[number][key] = value
    destinations: Sequence[Destination] = outputs.destinations
    if loose is not None:
        destinations = [destinations[place] for place in loose]
        values = [values[place] for place in loose]
    leaves = list(outputs.leaves)
    write_values(destinations, leaves, inventory, values)
    for parameter in outputs.cleared:
        inventory.slots[parameter].tensor.grad = None
    made = _torch.unflatten_tree(leaves, outputs.structure)
    if not outputs.stored:
        return made
    returned, stored = made
    for attribute, value in zip(outputs.stored, stored, strict=True):
        attribute.put(inventory, value)
    return returned


def write_values(
    destinations: Sequence[Destination],
    leaves: list[Any],
    inventory: Inventory,
    values: Any,
) -> None:
    """Put each value where it belongs, results among the leaves of what is returned.

    A value that is None belongs to work that was left for the next step.
    """
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for destination, value in zip(destinations, values, strict=True):
        if value is None:
            continue
        match destination:
            case NewValue(slot):
                target = _torch.plain_tensor(inventory.slots[slot].tensor)
                if value is not target:  # otherwise it was computed there
                    targets.append(target)
                    sources.append(value)
            case NewGradient(parameter):
                owner = inventory.slots[parameter].tensor
                owner.grad = _like(owner, value)
            case NewState(_, parameter, key):
                owner = inventory.slots[parameter].tensor
                _state(inventory, destination)[key] = _like_if_shaped(owner, key, value)
            case NewNumber(number):
                counter = inventory.numbers[number]
                assert counter.holder is not None
                counter.holder[counter.key] = value
            case Result(leaf):
                # A parameter that the step returns: its memory, without its history.
                is_leaf = isinstance(value, torch.Tensor) and value.requires_grad
                leaves[leaf] = value.detach() if is_leaf else value
    if targets:
        _torch.copy_all(targets, _apart(targets, sources))


def _apart(
    targets: list[torch.Tensor], sources: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Sources of their own: one that is itself written would be read too late."""
    written = {target.untyped_storage().data_ptr() for target in targets}
    return [
        source.clone() if source.untyped_storage().data_ptr() in written else source
        for source in sources
    ]


def _state(inventory: Inventory, address: NewState) -> Any:
    owner = inventory.slots[address.parameter].tensor
    return inventory.optimizers[address.optimizer][1].state[owner]


def _like(owner: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A value in the layout of the tensor that it belongs to."""
    layout = _torch.layout_of(owner)
    return value if layout is None else _torch.wrap_local(value, layout)


def _like_if_shaped(owner: torch.Tensor, key: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    # A counter is the same on every rank, whatever the layout of its parameter.
    if is_counter(key, value) or value.shape != _torch.plain_tensor(owner).shape:
        return value
    return _like(owner, value)
