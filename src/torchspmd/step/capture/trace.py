"""From a step and its inventory to one functional graph."""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import Phase
from torchspmd.errors import CaptureError
from torchspmd.step.capture.dynamic_shapes import Sizes
from torchspmd.step.capture.functionalize import clean, make_functional
from torchspmd.step.capture.guards import check_reached
from torchspmd.step.capture.host_values import HostValues, Reads
from torchspmd.step.capture.initial_states import check_initial, describe_first_step
from torchspmd.step.capture.inventory import (
    Inventory,
    Number,
    Role,
    Slot,
    TakeMoreError,
    Taken,
)
from torchspmd.step.capture.micro_batches import join_reductions
from torchspmd.step.capture.optimizers import watched_optimizers
from torchspmd.step.capture.outputs import (
    NewValue,
    Outputs,
    collect,
    drop_unchanged,
    find_roles,
    trained_outputs,
)
from torchspmd.step.capture.parallel_mode import (
    ParallelMode,
    Relayout,
    check_layouts,
)
from torchspmd.step.capture.rank_divergence import (
    check_gradients,
    check_inner_gradients,
    checksum_parameters,
    find_other_axes,
)
from torchspmd.step.capture.refusals import (
    RefusalError,
    is_ours,
    needs_values,
    refuse,
    uses_other_tensors,
)
from torchspmd.step.capture.rng import RandomReplay, check_recomputation
from torchspmd.step.capture.shared_memory import SharedMemory, check_memory
from torchspmd.step.capture.side_effects import (
    Change,
    PythonState,
    check_leaks,
    closed_arguments,
    refuse_changes,
    refusing_schedulers,
    state_of_torch,
    torch_changes,
)
from torchspmd.step.capture.substitute import Substitution
from torchspmd.step.capture.trace_modes import (
    StepFunctions,
    StepOperators,
    fake_for_transformers,
    noting_clocks,
    warn_of_clocks,
)
from torchspmd.step.capture.user_code import raises_itself, runs_for_user
from torchspmd.step.graph.collectives import events_of
from torchspmd.step.graph.memory import ROLE_KEY
from torchspmd.step.graph.metadata import OwnerLog, mark_guarded, set_roles
from torchspmd.step.progress import phase


@dataclass(frozen=True, slots=True)
class Captured:
    """A functional graph, where its outputs go, and what it assumes about numbers.

    Attributes:
        graph: Tensors and numbers in, new values out.
        outputs: Where each output goes.
        symbols: The symbol of each number that goes in.
        assumptions: What must hold for these numbers, and for those that were read.
        reads: What optimizers read from their states.
        relayout: Shards that are to take the place of the step's tensors.
        values: A checksum of each tensor that must be equal along the data axis.
        memory: What no two tensors of a call may share.
        updated: The optimizer and the parameter's slot of each update that it makes.
        notes: What else there is to say about it, a line each.
        sizes: The symbol of each size that may change, with the slot and the dim.
    """

    graph: fx.GraphModule
    outputs: Outputs
    symbols: tuple[Any, ...]
    assumptions: tuple[Any, ...]
    reads: Reads
    relayout: Relayout | None
    values: tuple[str, ...]
    memory: SharedMemory
    updated: frozenset[tuple[int, int]]
    notes: tuple[str, ...]
    sizes: tuple[tuple[Any, int, int], ...]


def capture(
    function: Callable[..., Any],
    name: str,
    inventory: Inventory,
    mode: ParallelMode,
    *,
    compare_values: bool,
    sizes: Sizes | None = None,
) -> Captured:
    """Trace a step once, without running it, and make its graph functional.

    Args:
        function: The user's step.
        name: What it is called in messages.
        inventory: What the step works on.
        mode: How it is spread over ranks.
        compare_values: Take checksums of the parameters that ranks must hold alike.
        sizes: Sizes of tensor arguments that become symbols of the graph.
    """
    check_layouts(mode, inventory.slots)
    check_memory(inventory)
    unguarded = check_reached(inventory)
    relayout = mode.lay_out(inventory)
    if relayout is not None:
        inventory = relayout.inventory
    other_axes = find_other_axes(inventory.slots, mode.sharded_over)
    inputs = _fake_inputs(inventory, sizes)

    traced = _trace(function, name, inventory, mode, inputs)
    mode.check(traced.graph)
    check_gradients(traced.graph, inventory.slots, other_axes)
    if mode.mesh is not None and mode.has_own_batches:
        trained = trained_outputs(traced.outputs, inventory.slots)
        check_inner_gradients(traced.graph.graph, mode.mesh, trained)

    graph = _make_functional(name, traced, inputs)
    symbolic = _symbolic_sizes(inputs, sizes, inventory)
    assumptions = inputs.world.assumptions()
    if symbolic:
        assumptions += inputs.world.ranges(symbol for symbol, _, _ in symbolic)
        places = graph.graph.find_nodes(op="placeholder")
        by_symbol = {symbol: (places[slot], dim) for symbol, slot, dim in symbolic}
        _torch.sizes_from_inputs(graph.graph, by_symbol)
    outputs = drop_unchanged(graph, traced.outputs)
    clean(graph)
    with phase("mode"):
        num_joined = mode.finish(graph) + join_reductions(graph.graph)
        graph.recompile()
    check_recomputation(name, graph)
    notes = (
        *unguarded,
        *describe_first_step(inventory, outputs),
        *traced.notes,
    )
    if num_joined:
        notes += (
            f"{num_joined} reductions of micro-batches joined with those of later ones",
        )

    reads = traced.reads.kept_for(assumptions)
    symbols = tuple(map(_torch.symbol_of, inputs.numbers))
    _describe(graph, outputs, inventory)
    guarded = [slot for _, slot in reads.slots]
    mark_guarded(graph.graph, guarded + _guarded(inventory, symbols, assumptions))
    values: tuple[str, ...] = ()
    if relayout is not None:
        values = tuple(fact.text for fact in relayout.facts)
    elif compare_values:
        values = checksum_parameters(inventory, mode)
    memory = _shared_memory(inventory, graph, outputs)
    return Captured(
        graph,
        outputs,
        symbols,
        assumptions,
        reads,
        relayout,
        values,
        memory,
        traced.updated,
        notes,
        symbolic,
    )


def assumes_other_sizes(captured: Captured, inventory: Inventory) -> bool:
    """Whether a step does something else for the sizes that it was traced with."""
    sizes = {
        symbol: int(inventory.slots[slot].tensor.shape[dim])
        for symbol, slot, dim in captured.sizes
    }
    return not all(
        _torch.holds(assumption, sizes)
        for assumption in captured.assumptions
        if assumption.free_symbols <= sizes.keys()
    )


def check_sizes(graph: fx.GraphModule, flat: list[Any]) -> None:
    """Raise where a graph does not run on other sizes than it was traced with.

    It is run on tensors without values; what it sends must not depend on sizes.
    """
    shapes = _torch.propagate_shapes(graph, flat)
    for node, event in events_of(graph.graph):
        known = _torch.shapes_of(node.meta.get("val"))
        if shapes[node] != known:
            raise CaptureError(
                f"{event.kind.value} sends {known} for one size and {shapes[node]} for "
                "another"
            )


def _symbolic_sizes(
    inputs: "_Inputs", sizes: Sizes | None, inventory: Inventory
) -> tuple[tuple[Any, int, int], ...]:
    """The symbol of each size that may change, with its slot and dim."""
    if sizes is None:
        return ()
    taken = [
        f"{each.name}.shape[{dim}]"
        for slot, each in enumerate(inventory.slots)
        if each.role is Role.INPUT
        for dim in sorted(sizes.dims.get(each.name, ()))
        if not _torch.is_symbol(inputs.tensors[slot].shape[dim])
    ]
    if taken:
        raise CaptureError(
            f"the step needs {', '.join(taken)} as a number, as for a loop or a text"
        )
    return tuple(
        (_torch.symbol_of(inputs.tensors[slot].shape[dim]), slot, dim)
        for slot, each in enumerate(inventory.slots)
        if each.role is Role.INPUT
        for dim in sorted(sizes.dims.get(each.name, ()))
    )


def _shared_memory(
    inventory: Inventory, graph: fx.GraphModule, outputs: Outputs
) -> SharedMemory:
    """The check of this call, made once, for all calls to come."""
    written = [d.slot for d in outputs.destinations if isinstance(d, NewValue)]
    inputs = graph.graph.find_nodes(op="placeholder")
    slots = range(len(inventory.slots))
    memory = SharedMemory(inventory, written, (n for n in slots if inputs[n].users))
    memory.check(inventory, inventory.flat_inputs())
    return memory


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Tensors without values and symbols for what a step works on."""

    world: _torch.FakeWorld
    tensors: list[torch.Tensor]
    numbers: list[Any]

    @property
    def flat(self) -> list[Any]:
        """The graph's inputs, in its order."""
        return [*self.tensors, *self.numbers]


def _fake_inputs(inventory: Inventory, sizes: Sizes | None) -> _Inputs:
    world = _torch.FakeWorld()
    tensors = [_fake_tensor(world, slot, sizes) for slot in inventory.slots]
    return _Inputs(world, tensors, [_fake_number(world, n) for n in inventory.numbers])


def _fake_tensor(
    world: _torch.FakeWorld, slot: Slot, sizes: Sizes | None
) -> torch.Tensor:
    plain = _torch.plain_tensor(slot.tensor)
    if sizes is None or slot.role is not Role.INPUT or slot.name not in sizes.dims:
        return world.fake(plain)
    dims = sizes.dims.get(slot.name, frozenset())
    return world.fake_batch(plain, slot.name, sizes.shapes[slot.name], dims)


def _fake_number(world: _torch.FakeWorld, number: Number) -> Any:
    if number.as_tensor:
        return world.fake(number.flat)
    return world.number(number.name, number.value)


@dataclass(frozen=True, slots=True)
class _Traced:
    """The graph of a step, in which operators may write into tensors."""

    graph: fx.GraphModule
    outputs: Outputs
    reads: Reads
    log: OwnerLog
    updated: frozenset[tuple[int, int]]
    notes: tuple[str, ...]


def _trace(
    function: Callable[..., Any],
    name: str,
    inventory: Inventory,
    mode: ParallelMode,
    inputs: _Inputs,
) -> _Traced:
    """Run the user's step on traced values; refuse what a graph of it would lose."""
    log = OwnerLog(inventory.modules)
    found: list[tuple[Outputs, Reads]] = []
    changes: list[Change] = []
    stored: list[str] = []
    updated: set[tuple[int, int]] = set()

    clocks: list[str] = []
    refused: list[Exception] = []
    before_all: list[BaseException] = []  # what the step raised before it did anything

    def run(*flat: Any) -> list[Any]:
        with _tracing(name, inventory, mode, log, refused):
            substitution = Substitution(inventory, flat, mode)
            states = {s.slot: substitution.steps_on(s.slot) for s in inventory.states}
            shown = dict(enumerate(substitution.shown))
            values = HostValues(
                inventory, states | _buffers(inventory, shown), inputs.world
            )
            with (
                substitution.installed(log),
                watched_optimizers(substitution, log, inputs.world, values),
            ):
                leaves = substitution.leaves()
                args, kwargs = _torch.unflatten_tree(leaves, inventory.structure)
                state = PythonState(inventory, substitution.shown, (args, kwargs))
                start = _progress_of(substitution)
                try:
                    follows = Taken.VALUES in inventory.taken
                    with values if follows else contextlib.nullcontext():
                        returned = function(*args, **kwargs)
                    if refused:
                        raise refused[0]  # the step has caught it
                except BaseException as error:
                    undone = list(state.changes())
                    has_begun = not all(map(is_, start, _progress_of(substitution)))
                    if not (undone or refused or has_begun):
                        before_all.append(error)
                    raise
                changes.extend(state.changes())
                stored.extend(state.stored)
                with torch.no_grad(), log.owned(Phase.FORWARD):
                    flat_out, outputs = collect(
                        substitution, returned, state.created, state.kept
                    )
        found.append((outputs, values.reads()))
        updated.update(substitution.updated)
        return flat_out

    random_before = state_of_torch()
    try:
        with (
            phase("capture"),
            noting_clocks(clocks),
            inputs.world.mode,
            torch.enable_grad(),
        ):
            graph = _torch.trace(run, inputs.flat)
    except Exception as error:
        if is_ours(error):
            raise
        if error in before_all and raises_itself(error):
            error.add_note(
                f"{name} was not captured: it raises this itself, before it does anything."
            )
            raise
        for taken, is_needed in (
            (Taken.REACHED, uses_other_tensors),
            (Taken.VALUES, needs_values),
        ):
            if is_needed(error) and taken not in inventory.taken:
                raise TakeMoreError(taken) from error
        is_explained = isinstance(error, RefusalError) or needs_values(error)
        closed = closed_arguments(inventory)
        cause = None if is_explained else error
        raise refuse(name, error, log.latest(), closed) from cause
    refuse_changes(name, [*changes, *torch_changes(random_before)])
    check_leaks(inventory, stored)
    check_initial(inventory, updated)
    warn_of_clocks(name, clocks)
    notes = tuple(change.text for change in changes if change.fix is None)
    return _Traced(graph, *found[-1], log, frozenset(updated), notes)


def _buffers(
    inventory: Inventory, shown: dict[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """The traced tensors of buffers that are one number, where choices are followed."""
    if Taken.VALUES not in inventory.taken:
        return {}
    return {
        place: shown[place]
        for place, slot in enumerate(inventory.slots)
        if slot.role is Role.BUFFER and slot.tensor.numel() == 1
    }


def _progress_of(substitution: Substitution) -> list[Any]:
    """The last operator that was traced, and the gradients as they are."""
    graph = _torch.current_graph()
    nodes = iter(()) if graph is None else reversed(graph.nodes)
    sizes = _torch.numbers.SYMBOLIC
    operators = (each for each in nodes if not isinstance(each.meta.get("val"), sizes))
    return [next(operators, None), *(each.grad for each in substitution.shown)]


@contextlib.contextmanager
def _tracing(
    name: str,
    inventory: Inventory,
    mode: ParallelMode,
    log: OwnerLog,
    refused: list[Exception],
) -> Iterator[None]:
    """Everything that is active while a step is traced, outermost first."""
    functions = StepFunctions(refused)
    with (
        RandomReplay().recording(),  # sees what the next one makes of random operators
        mode.tracing(),
        log.recording(),
        functions,
        _torch.backward_under(functions),  # hooks
        StepOperators(refused, log.note),
        refusing_schedulers(name, refused),
        fake_for_transformers(),
        _torch.numbers.plain_for(runs_for_user),
        _torch.keep_flat_weights(module for _, module in inventory.modules),
    ):
        yield


def _make_functional(name: str, traced: _Traced, inputs: _Inputs) -> fx.GraphModule:
    try:
        with phase("functionalize"):
            return make_functional(traced.graph, inputs.flat, inputs.world)
    except Exception as error:
        raise refuse(name, error, traced.log.latest()) from error


def _describe(graph: fx.GraphModule, outputs: Outputs, inventory: Inventory) -> None:
    """Write on the graph what its inputs and outputs are, for passes and readers."""
    names = [slot.name for slot in inventory.slots]
    names += [number.name for number in inventory.numbers]
    placeholders = graph.graph.find_nodes(op="placeholder")
    for node, name in zip(placeholders, names, strict=True):
        node.meta["torchspmd_name"] = name
    for node, slot in zip(placeholders, inventory.slots, strict=False):
        node.meta[ROLE_KEY] = slot.role.value
    set_roles(graph.graph, find_roles(outputs, inventory, graph.graph))


def _guarded(
    inventory: Inventory, symbols: Sequence[Any], assumptions: Sequence[Any]
) -> list[int]:
    """The inputs that are counters of which something is assumed."""
    used: set[Any] = set().union(*(each.free_symbols for each in assumptions))
    return [
        len(inventory.slots) + place
        for place, number in enumerate(inventory.numbers)
        if (number.is_state or number.is_counter) and symbols[place] in used
    ]


_MANY_OBJECTS = 100_000  # take about 20 ms to walk through


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Keep the garbage collector from walking growing graphs again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            # Counting what is frozen takes longer than walking through a small graph.
            if gc.get_count()[0] > _MANY_OBJECTS and gc.get_freeze_count() == 0:
                # All that was made counts as old: otherwise the next allocation would
                # walk through it, though nearly all of it stays.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
