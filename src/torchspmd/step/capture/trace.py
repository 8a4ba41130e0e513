"""From a step and its inventory to one functional graph."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import Phase
from torchspmd.errors import CaptureError
from torchspmd.step.capture.functionalize import make_functional
from torchspmd.step.capture.host_values import HostValues, Reads
from torchspmd.step.capture.inventory import Inventory, Number, Role
from torchspmd.step.capture.micro_batches import join_reductions
from torchspmd.step.capture.outputs import (
    NewGradient,
    NewNumber,
    NewState,
    NewValue,
    Outputs,
    Result,
    collect,
)
from torchspmd.step.capture.rank_divergence import (
    check_gradients,
    check_inner_gradients,
    find_other_axes,
)
from torchspmd.step.capture.refusals import (
    NoPrinting,
    RefusalError,
    is_ours,
    needs_values,
    refuse,
)
from torchspmd.step.capture.rng import CertainDraws, RandomTape
from torchspmd.step.capture.side_effects import (
    Change,
    PythonState,
    RandomStates,
    check_leaks,
    closed_arguments,
    refuse_changes,
    refusing_schedulers,
)
from torchspmd.step.capture.spread import (
    Relayout,
    Spread,
    check_layouts,
    checksum_parameters,
)
from torchspmd.step.capture.substitute import Stage
from torchspmd.step.capture.trace_modes import (
    NoDataAssignment,
    NoOwnCollectives,
    WrittenLists,
    known_as_traced,
    noting_cleared,
    scaled_steps,
)
from torchspmd.step.graph.memory import ROLE_KEY
from torchspmd.step.graph.metadata import (
    OutputKind,
    OutputRole,
    OwnerLog,
    mark_guarded,
    owner_of,
    set_roles,
)
from torchspmd.step.progress import note, phase


@dataclass(frozen=True, slots=True)
class Captured:
    """A functional graph, where its outputs go, and what it assumes about numbers."""

    graph: fx.GraphModule
    outputs: Outputs
    symbols: tuple[Any, ...]
    assumptions: tuple[Any, ...]
    reads: Reads
    relayout: Relayout | None
    values: tuple[str, ...]  # a checksum of each that is equal along the data axis


def capture(
    function: Callable[..., Any],
    name: str,
    inventory: Inventory,
    spread: Spread,
    *,
    compare_values: bool,
) -> Captured:
    """Trace a step once, without running it, and make its graph functional.

    Args:
        function: The user's step.
        name: What it is called in messages.
        inventory: What the step works on.
        spread: How it is spread over ranks.
        compare_values: Take checksums of the parameters that ranks must hold alike.
    """
    check_layouts(spread, inventory.slots)
    check_memory(inventory)
    relayout = spread.lay_out(inventory)
    if relayout is not None:
        inventory = relayout.inventory
    other_axes = find_other_axes(inventory.slots, spread.mesh)
    world = _torch.FakeWorld()
    flat: list[Any] = [
        world.fake(_torch.plain_tensor(slot.tensor)) for slot in inventory.slots
    ]
    numbers = [_fake_number(world, number) for number in inventory.numbers]
    symbols = tuple(_torch.symbol_of(number) for number in numbers)
    flat += numbers
    tracing = _Tracing(function, name, inventory, spread, world)
    random_states = RandomStates()
    try:
        with phase("tracing"), world.mode, torch.enable_grad():
            traced = _torch.trace(tracing.run, flat)
    except Exception as error:
        if is_ours(error):
            raise
        is_told = isinstance(error, RefusalError) or needs_values(error)
        cause = None if is_told else error
        closed = closed_arguments(inventory)
        raise refuse(name, error, tracing.log.latest(), closed) from cause
    refuse_changes(name, [*tracing.changes, *random_states.changes()])
    check_leaks(inventory, function)
    assert tracing.outputs is not None
    spread.check(traced)
    check_gradients(traced, inventory.slots, other_axes)
    _check_inner(traced, tracing.outputs, inventory, spread)
    try:
        with phase("functional form"):
            graph = make_functional(traced, flat, world)
    except Exception as error:
        raise refuse(name, error, tracing.log.latest()) from error
    outputs = _drop_unchanged(graph, tracing.outputs)
    clean(graph)
    num_joined = spread.finish(graph) + join_reductions(graph.graph)
    graph.recompile()
    check_recomputation(name, graph)
    _name_placeholders(graph, inventory)
    set_roles(graph.graph, _roles(outputs, inventory, graph.graph))
    if num_joined:
        note(
            f"{num_joined} reductions of micro-batches joined with those of later ones"
        )
    assumptions = world.assumptions()
    reads = tracing.reads.kept_for(assumptions)
    mark_guarded(graph.graph, [slot for _, slot in reads.slots])
    values: tuple[str, ...] = ()
    if relayout is not None:
        values = tuple(fact.text for fact in relayout.facts)
    elif compare_values:
        values = checksum_parameters(inventory, spread)
    return Captured(graph, outputs, symbols, assumptions, reads, relayout, values)


def _fake_number(world: _torch.FakeWorld, number: Number) -> Any:
    if number.as_tensor:
        return world.fake(number.flat)
    return world.number(number.name, number.value)


class _Tracing:
    """The function that is traced: flat values in, flat values out."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        inventory: Inventory,
        spread: Spread,
        world: _torch.FakeWorld,
    ) -> None:
        self._function, self._name, self._inventory = function, name, inventory
        self._spread, self._world = spread, world
        self.log = OwnerLog(inventory.modules)
        self.outputs: Outputs | None = None
        self.reads = Reads()
        self.changes: list[Change] = []

    def run(self, *flat: Any) -> list[Any]:
        """Run the user's step on traced values."""
        no_data_assignment = NoDataAssignment()
        with (
            RandomTape().recording(),  # sees what the next one makes of random operators
            self._spread.tracing(),
            self.log.recording(),
            NoPrinting(),
            CertainDraws(),
            no_data_assignment,
            _torch.backward_under(no_data_assignment),  # hooks
            WrittenLists(),
            refusing_schedulers(self._name),
            NoOwnCollectives(),
            known_as_traced(),
            _torch.keep_flat_weights(m for _, m in self._inventory.modules),
        ):
            stage = Stage(self._inventory, flat, self._spread)
            traced = {s.slot: stage.steps_on(s.slot) for s in self._inventory.states}
            values = HostValues(self._inventory, traced, self._world)
            with (
                stage.installed(self.log, self._world, values),
                scaled_steps(stage),
                noting_cleared(stage),
            ):
                args, kwargs = _torch.unflatten_tree(
                    stage.leaves(), self._inventory.structure
                )
                state = PythonState(self._inventory, stage.shown, (args, kwargs))
                returned = self._function(*args, **kwargs)
                self.changes += state.changes()
                with torch.no_grad(), self.log.owned(Phase.FORWARD):
                    flat_out, self.outputs = collect(stage, returned)
        self.reads = values.reads()
        return flat_out


def _drop_unchanged(graph: fx.GraphModule, outputs: Outputs) -> Outputs:
    """Leave out the state that the step does not change."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    place = {node: index for index, node in enumerate(placeholders)}
    output = next(iter(graph.graph.find_nodes(op="output")))
    (values,) = output.args
    kept = [
        (value, destination)
        for value, destination in zip(values, outputs.destinations, strict=True)
        if not (
            isinstance(destination, NewValue) and place.get(value) == destination.slot
        )
    ]
    output.args = ([value for value, _ in kept],)
    return replace(outputs, destinations=tuple(where for _, where in kept))


_TRANSPARENT = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def clean(graph: fx.GraphModule) -> None:
    """Remove what does nothing in a functional graph: detach, equal views, dead code."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in _TRANSPARENT:
            node.replace_all_uses_with(node.args[0])
        elif _is_same_view(node):
            node.replace_all_uses_with(node.args[0])
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    graph.recompile()


def _is_same_view(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is not torch.ops.aten.view.default:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return before.shape == after.shape and before.stride() == after.stride()


def _name_placeholders(graph: fx.GraphModule, inventory: Inventory) -> None:
    """Write on each input what it is, for readers of the graph."""
    names = [slot.name for slot in inventory.slots]
    names += [number.name for number in inventory.numbers]
    placeholders = graph.graph.find_nodes(op="placeholder")
    for node, name in zip(placeholders, names, strict=True):
        node.meta["torchspmd_name"] = name
    for node, slot in zip(placeholders, inventory.slots, strict=False):
        node.meta[ROLE_KEY] = slot.role.value


def _roles(outputs: Outputs, inventory: Inventory, graph: fx.Graph) -> list[OutputRole]:
    """What each output is for, as the graph's passes see it."""
    roles = []
    num_slots = len(inventory.slots)
    inputs = graph.find_nodes(op="placeholder")
    read = {p for p, slot in inventory.gradients.items() if inputs[slot].users}
    for destination in outputs.destinations:
        match destination:
            case NewValue(slot):
                roles.append(OutputRole(OutputKind.STATE, slot))
            case NewNumber(number):
                roles.append(OutputRole(OutputKind.STATE, num_slots + number))
            case NewGradient(parameter, is_fresh):
                may_wait = is_fresh and parameter not in read
                roles.append(OutputRole(OutputKind.GRADIENT, may_wait=may_wait))
            case NewState():
                roles.append(OutputRole(OutputKind.CREATED))
            case Result():
                roles.append(OutputRole(OutputKind.RESULT))
    return roles


def check_memory(inventory: Inventory) -> None:
    """Refuse tensors that share memory: a functional graph would pull them apart."""
    spans: list[tuple[int, int, int, str]] = []
    for slot in inventory.slots:
        tensor = _torch.plain_tensor(slot.tensor)
        if slot.role is Role.INPUT or tensor.numel() == 0 or tensor.is_meta:
            continue
        extent = 1 + sum(
            (size - 1) * step
            for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        start = tensor.data_ptr()
        end = start + extent * tensor.element_size()
        spans.append((tensor.untyped_storage().data_ptr(), start, end, slot.name))
    spans.sort()
    for (storage, _, end, name), (other, start, _, second) in pairwise(spans):
        if storage == other and start < end:
            raise CaptureError(
                f"compile: {name} and {second} are two tensors on the same memory, and a "
                "graph that writes one would not change the other. Tie weights by "
                "assigning the parameter itself, not its data."
            )


def check_recomputation(name: str, graph: fx.GraphModule) -> None:
    """Refuse random numbers that would be drawn twice: eager restores the generator."""
    for node in graph.graph.nodes:
        draws = _torch.draws_random_numbers(node.target, node.args, node.kwargs)
        owner = owner_of(node)
        in_backward = owner.phase in (Phase.RECOMPUTE, Phase.BACKWARD)
        if in_backward and draws:
            raise CaptureError(
                f"compile on {name!r}: {owner.module} draws random numbers in backward "
                f"({node.target}). A region that is recomputed there must draw those of "
                "its forward: leave preserve_rng_state=True, use F.dropout for random "
                "numbers on a sharded batch, or take them out of the checkpointed region."
            )


def _check_inner(
    traced: fx.GraphModule, outputs: Outputs, inventory: Inventory, spread: Spread
) -> None:
    """Parameters and their gradients must not follow from what one rank has alone."""
    if spread.mesh is None or not spread.has_own_batches:
        return
    slots = inventory.slots
    names = {}
    for place, destination in enumerate(outputs.destinations):
        if isinstance(destination, NewGradient):
            names[place] = f"{slots[destination.parameter].name}.grad"
        elif isinstance(destination, NewValue):
            if slots[destination.slot].role in (Role.PARAMETER, Role.GRADIENT):
                names[place] = slots[destination.slot].name
    check_inner_gradients(traced.graph, spread.mesh, names)


# ----------------------------------------------------------------------------
# The garbage collector rests while a step is captured.


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Keep the garbage collector from walking growing graphs again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
