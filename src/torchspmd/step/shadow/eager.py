"""One call of a step made eagerly, on copies, and all that came of it."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from torchspmd import _torch
from torchspmd.step.capture.guards import walk_data
from torchspmd.step.capture.inventory import Inventory, Number, Role
from torchspmd.step.capture.optimizer_rules import is_counter
from torchspmd.step.capture.outputs import NewGradient, NewNumber, NewValue, Result
from torchspmd.step.capture.parallel_mode import ParallelMode
from torchspmd.step.capture.side_effects import undo_python, watch_python
from torchspmd.step.capture.snapshots import MISSING
from torchspmd.step.deferral.module import IterGraphModule
from torchspmd.step.graph.metadata import output_values
from torchspmd.step.modes.data_parallel import Replicated
from torchspmd.step.modes.fully_shard import FullySharded
from torchspmd.step.program import Program
from torchspmd.step.shadow.copies import Copies, Whole, copy_slots


class Kind(StrEnum):
    """What a compared value is, in the order in which a step makes them."""

    RESULT = "returned value"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    STATE = "optimizer state"
    PARAMETER = "parameter"
    REPLICA = "replicated parameter"
    INPUT = "argument"


_KINDS = {
    Role.PARAMETER: Kind.PARAMETER,
    Role.BUFFER: Kind.BUFFER,
    Role.STATE: Kind.STATE,
    Role.HYPER: Kind.STATE,
    Role.INPUT: Kind.INPUT,
}


@dataclass(frozen=True, slots=True, repr=False)
class Expected:
    """One value that the compiled step must leave.

    Attributes:
        kind: What it is.
        name: Its name.
        value: This rank's part of what the eager step left; a tensor or a Python value.
        read: What the user's own object holds there, in its layout.
        change: How much the eager step changed it at most; None for what is new.
        slot: Its slot, of a gradient that of its parameter; -1 for none.
        owner: The slot of the parameter that it belongs to; -1 for none.
        is_late: The compiled step leaves it for the next one.
    """

    kind: Kind
    name: str
    value: Any
    read: Callable[[], Any]
    change: float | None = None
    slot: int = -1
    owner: int = -1
    is_late: bool = False


@dataclass(slots=True, repr=False)
class Eager:
    """What an eager call gave.

    Attributes:
        values: What it left, in tensors and optimizers.
        returned: What it returned.
        stored: What it stored in attributes, by name.
        error: What it raised instead.
        changes: What it changed in Python, as text; it was put back.
        random: The state of every generator of torch after it.
        gradients: The sizes of the gradients that backward made, by slot.
        sums: Their sums, by slot, where that was asked for.
        ahead: What the next call begins with, of what is late, by slot.
        numbers: The same of counters that are Python numbers, by their place.
    """

    values: list[Expected] = field(default_factory=list)
    returned: Any = None
    stored: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None
    changes: list[str] = field(default_factory=list)
    random: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    sums: dict[int, torch.Tensor] = field(default_factory=dict)
    ahead: dict[int, torch.Tensor] = field(default_factory=dict)
    numbers: dict[int, Any] = field(default_factory=dict)

    @property
    def results(self) -> Any:
        """All that it gave out: what it returned, and what it stored, if anything."""
        return (self.returned, self.stored) if self.stored else self.returned


@dataclass(frozen=True, slots=True)
class Late:
    """What a compiled step leaves for the next one.

    Attributes:
        slots: Tensors whose new values it leaves.
        gradients: Parameters whose gradients it leaves.
        numbers: Counters that it leaves.
    """

    slots: frozenset[int] = frozenset()
    gradients: frozenset[int] = frozenset()
    numbers: frozenset[int] = frozenset()


def find_late(program: Program) -> Late:
    """What a program leaves for the next call, by where it goes."""
    run = program.run
    if not isinstance(run, IterGraphModule) or not run.is_deferring:
        return Late()
    names = {name for region in run.graph.regions for name in region.nodes}
    slots, gradients, numbers = set(), set(), set()
    values = output_values(run.graph)
    for value, where in zip(values, program.outputs.destinations, strict=True):
        if not isinstance(value, fx.Node) or value.name not in names:
            continue
        match where:
            case NewValue(slot):
                slots.add(slot)
            case NewGradient(parameter):
                gradients.add(parameter)
            case NewNumber(number):
                numbers.add(number)
    return Late(frozenset(slots), frozenset(gradients), frozenset(numbers))


@dataclass(frozen=True, slots=True)
class Following:
    """What a step computes from parameters that it has updated.

    Attributes:
        slots: Tensors of which the new values are.
        gradients: Parameters of which the gradients are.
        has_results: Whether any result is.
    """

    slots: frozenset[int] = frozenset()
    gradients: frozenset[int] = frozenset()
    has_results: bool = False

    def holds(self, value: Expected) -> bool:
        """Whether a value is among it."""
        match value.kind:
            case Kind.RESULT:
                return self.has_results
            case Kind.GRADIENT:
                return value.slot in self.gradients
        return value.slot in self.slots


def find_following(program: Program, inventory: Inventory) -> Following:
    """What the graph of a program computes from the new values of parameters."""
    outputs = [
        (value, where)
        for value, where in zip(
            output_values(program.graph.graph),
            program.outputs.destinations,
            strict=True,
        )
        if isinstance(value, fx.Node)
    ]
    updated = {
        value
        for value, where in outputs
        if isinstance(where, NewValue)
        and inventory.slots[where.slot].role is Role.PARAMETER
    }
    follows: set[fx.Node] = set()
    for node in program.graph.graph.nodes:
        if any(each in updated or each in follows for each in node.all_input_nodes):
            follows.add(node)
    slots, gradients, has_results = set(), set(), False
    for value, where in outputs:
        match where:
            case Result():
                has_results = has_results or value in follows or value in updated
            case NewValue(slot) if value in follows:
                slots.add(slot)
            case NewGradient(parameter) if value in follows:
                gradients.add(parameter)
    return Following(frozenset(slots), frozenset(gradients), has_results)


class Way(StrEnum):
    """How an eager call is made: alone, or as one of two, which keep their gradients."""

    ALONE = "alone"
    FIRST = "the first of two"
    PERTURBED = "the second, whose parameters begin with other last bits"


def run_eagerly(
    function: Callable[..., Any],
    program: Program,
    inventory: Inventory,
    mode: ParallelMode,
    before: Eager | None,
    *,
    communicates: bool,
    way: "Way",
) -> Eager:
    """Make one call eagerly, with plain collectives for the mode's meaning.

    Reading the user's objects must not flush meanwhile.

    Args:
        function: The step.
        program: What was made of it.
        inventory: What the call works on.
        mode: The mode.
        before: The eager call before this one, whose update is still pending in the
            user's own tensors.
        communicates: Whether the compiled step communicates.
        way: By itself, or as one of two that show amplified rounding.
    """
    late = find_late(program)
    ahead = {} if before is None else before.ahead
    numbers = {} if before is None else before.numbers
    copies = Copies(inventory, copy_slots(inventory, mode, ahead), numbers)
    if way is Way.PERTURBED:
        _perturb(copies)
    generators = Generators(inventory)
    found = Eager()
    watched = watch_python(inventory)
    stored: set[tuple[int, str | None]] = {
        (id(each.get(inventory)), None)
        if each.in_place
        else (id(each.holder_in(inventory)), each.key)
        for each in program.outputs.stored
    }
    talk = _Talk(mode.mesh if communicates else None)
    try:
        with (
            copies.installed(),
            _seen_by_forwards(mode, inventory, copies.wholes),
            _hooked(inventory, copies.wholes, mode, talk, found, way),
        ):
            args, kwargs = copies.arguments()
            try:
                found.returned = function(*args, **kwargs)
                found.stored = program.stored_in(inventory)
                talk.end()
            except Exception as error:  # what the step itself raises
                talk.fail()
                found.error = error.with_traceback(None)
            counted = {
                place: number.holder.get(number.key, MISSING)
                for place, number in enumerate(inventory.numbers)
                if number.is_counter and number.holder is not None
            }
    finally:
        found.random = generators.put_back()
        found.changes = undo_python(watched, stored)
        torch.clear_autocast_cache()
    _read_values(found, copies, late, ahead)
    for place, value in counted.items():
        number, is_late = inventory.numbers[place], place in late.numbers
        if is_late:
            found.numbers[place] = value
        read = functools.partial(_counter, number)
        found.values.append(
            Expected(Kind.STATE, number.name, value, read, is_late=is_late)
        )
    return found


def _read_values(
    found: Eager, copies: Copies, late: Late, ahead: Mapping[int, torch.Tensor]
) -> None:
    inventory = copies.inventory
    parts = [each.part for each in copies.wholes]
    in_states = {place.slot for place in inventory.states}
    gradients = set(inventory.gradients.values())
    with torch.no_grad():
        for place, slot in enumerate(inventory.slots):
            if place in gradients or place in in_states:
                continue
            whole = copies.replaced.get(place, copies.wholes[place].tensor)
            value = parts[place](whole.detach())
            own = _torch.plain_tensor(slot.tensor)
            found.values.append(
                Expected(
                    _KINDS[slot.role],
                    slot.name,
                    value,
                    functools.partial(_same, slot.tensor),
                    _change(ahead.get(place, own), value),
                    slot=place,
                    owner=place,
                    is_late=place in late.slots,
                )
            )
        _read_gradients(found, copies, late)
        _read_states(found, copies, late)
    for each in found.values:
        # A gradient has a slot of its own where a step adds to it.
        is_gradient = each.kind is Kind.GRADIENT
        place = inventory.gradients.get(each.slot, -1) if is_gradient else each.slot
        if each.is_late and place in late.slots and each.value is not None:
            found.ahead[place] = each.value
    for by_slot in (found.gradients, found.sums):
        by_slot.update({slot: parts[slot](each) for slot, each in by_slot.items()})


def _perturb(copies: Copies) -> None:
    """Change each parameter by about one unit in the last place, alike on every rank."""
    for place, slot in enumerate(copies.inventory.slots):
        tensor = _torch.plain_tensor(copies.wholes[place].tensor.detach())
        if slot.role is Role.PARAMETER and tensor.is_floating_point():
            generator = torch.Generator().manual_seed(place)
            size = 2 * torch.rand(tensor.shape, generator=generator) - 1
            size *= torch.finfo(tensor.dtype).eps
            tensor.add_(tensor * size.to(tensor.device, tensor.dtype))


def _read_gradients(found: Eager, copies: Copies, late: Late) -> None:
    added_to = copies.inventory.gradients  # the slots of those that were there before
    for place, slot in enumerate(copies.inventory.slots):
        if slot.role is Role.PARAMETER:
            whole = copies.wholes[place]
            gradient = whole.tensor.grad
            value = None if gradient is None else whole.part(gradient)
            found.values.append(
                Expected(
                    Kind.GRADIENT,
                    f"{slot.name}.grad",
                    value,
                    functools.partial(getattr, slot.tensor, "grad"),
                    slot=place,
                    owner=place,
                    is_late=place in late.gradients
                    or added_to.get(place) in late.slots,
                )
            )


def _read_states(found: Eager, copies: Copies, late: Late) -> None:
    inventory = copies.inventory
    places = {(s.optimizer, s.parameter, s.key): s.slot for s in inventory.states}
    numbers = {
        (id(number.holder), number.key): place
        for place, number in enumerate(inventory.numbers)
        if number.is_state
    }
    for index, (_, optimizer) in enumerate(inventory.optimizers):
        for slot, entries in copies.states[index].items():
            owner, whole = inventory.slots[slot], copies.wholes[slot]
            own = optimizer.state.get(owner.tensor, {})
            for key in {**entries, **own}:
                value = entries.get(key, MISSING)
                place = places.get((index, slot, key), -1)
                number = numbers.get((id(own), key), -1)
                is_late = place in late.slots or number in late.numbers
                read = functools.partial(_state, optimizer, owner.tensor, key)
                if place in late.slots:  # the user may put another one in its place
                    read = functools.partial(_same, inventory.slots[place].tensor)
                if isinstance(value, torch.Tensor):
                    value = _state_part(key, value, whole)
                elif is_late:
                    found.numbers[number] = value
                found.values.append(
                    Expected(
                        Kind.STATE,
                        f"{owner.name}.{key}",
                        value,
                        read,
                        slot=place,
                        owner=slot,
                        is_late=is_late,
                    )
                )


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _counter(number: Number) -> Any:
    return MISSING if number.holder is None else number.holder.get(number.key, MISSING)


def _state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str) -> Any:
    return optimizer.state.get(parameter, {}).get(key, MISSING)


def _state_part(key: str, value: torch.Tensor, whole: Whole) -> torch.Tensor:
    if is_counter(key, value) or value.shape != whole.tensor.shape:
        return _torch.plain_tensor(value)
    return whole.part(value)


def _change(before: torch.Tensor, after: torch.Tensor) -> float | None:
    if before.shape != after.shape or not (
        after.is_floating_point() or after.is_complex()
    ):
        return None
    if not after.numel():
        return 0.0
    return float((after - before).abs().amax())


# ----------------------------------------------------------------------------
# What data parallelism means: each gradient is reduced as soon as backward has made it.


class OtherRankStoppedError(Exception):
    """Another rank does something else in its eager call, so that none can go on."""

    def __init__(self) -> None:
        super().__init__("ranks reduce other gradients in their eager calls")


class _Word(IntEnum):
    """What a rank is about to do, besides reducing the gradient of a slot."""

    END = -1
    FAIL = -2


class _Talk:
    """Ranks say what they are about to reduce, so that none waits for another in vain."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self._mesh = None if mesh is None or mesh.size() == 1 else mesh

    def about_to(self, word: int) -> None:
        """Tell the other ranks; raise where they are about to do something else."""
        if self._mesh is None:
            return
        own = torch.tensor([word], device=self._mesh.device_type)
        name = self._mesh.get_group().group_name
        others = _torch.gather_now(own, self._mesh.size(), name)
        if any(each != word for each in others.tolist()):
            self._mesh = None  # nothing more is said
            raise OtherRankStoppedError

    def end(self) -> None:
        """The step is done on this rank."""
        self.about_to(_Word.END)

    def fail(self) -> None:
        """The step has failed on this rank."""
        with contextlib.suppress(OtherRankStoppedError):
            self.about_to(_Word.FAIL)


@contextlib.contextmanager
def _hooked(
    inventory: Inventory,
    wholes: list[Whole],
    mode: ParallelMode,
    talk: _Talk,
    found: Eager,
    way: "Way",
) -> Iterator[None]:
    """Hooks that reduce gradients as the mode does; behind them the user's, and a note.

    The note is how large gradients are where backward makes them: some are rounding alone.
    Not where an optimizer takes them: clipping makes large ones small, and rounding stays.
    """

    def note(place: int, gradient: torch.Tensor) -> None:
        gradient = gradient.detach()
        size, known = gradient.abs(), found.gradients.get(place)
        found.gradients[place] = size if known is None else known + size
        if way is not Way.ALONE:
            total = found.sums.get(place)
            found.sums[place] = gradient.clone() if total is None else total + gradient

    reduce: Callable[[torch.Tensor], torch.Tensor] | None = None
    if isinstance(mode, Replicated):
        reduce = mode.reduce
    elif isinstance(mode, FullySharded):
        reduce = mode.reduce_whole
    with contextlib.ExitStack() as stack:
        for place, slot in enumerate(inventory.slots):
            tensor = wholes[place].tensor
            if slot.role is not Role.PARAMETER or not tensor.requires_grad:
                continue
            if reduce is not None:
                layout = None
                if isinstance(mode, FullySharded):  # its shard has lost such hooks
                    layout = _torch.layout_of(tensor)
                hook = _reduction(place, reduce, talk, layout)
                stack.callback(tensor.register_hook(hook).remove)
            tables = _torch.GRADIENT_HOOK_TABLES
            for table, _, own in _torch.hooks_of(slot.tensor, tables):
                handle = _torch.add_gradient_hook(tensor, table, own)
                stack.callback(handle.remove)
            noting = functools.partial(note, place)
            stack.callback(tensor.register_hook(noting).remove)
        yield


def _seen_by_forwards(
    mode: ParallelMode, inventory: Inventory, wholes: list[Whole]
) -> contextlib.AbstractContextManager[None]:
    """Casts of whole parameters, where the mode gathers them in another precision."""
    if not isinstance(mode, FullySharded):
        return contextlib.nullcontext()
    return mode.installed_eagerly(inventory, [each.tensor for each in wholes])


def _reduction(
    place: int, reduce: Callable[[torch.Tensor], torch.Tensor], talk: _Talk, layout: Any
) -> Callable[[torch.Tensor], torch.Tensor]:
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():  # create_graph=True: an inner gradient
            return gradient
        talk.about_to(place)
        total = reduce(gradient)
        found = _torch.layout_of(total)
        if layout is not None and found is not None:
            laid_out: Any = total
            total = laid_out.redistribute(placements=layout.placements)
        return total

    return hook


# ----------------------------------------------------------------------------
# Random generators of torch.


class Generators:
    """The generators that a step can draw from, and their states as they were."""

    def __init__(self, inventory: Inventory) -> None:
        devices = {slot.tensor.device for slot in inventory.slots}
        self._all = [torch.default_generator]
        self._all += [
            torch.cuda.default_generators[device.index or 0]
            for device in sorted(devices, key=str)
            if device.type == "cuda"
        ]
        self._all += walk_data(inventory).generators.values()
        self._before = self.states()

    def states(self) -> list[torch.Tensor]:
        """The states, as they are now."""
        return [each.get_state() for each in self._all]

    def put_back(self) -> list[torch.Tensor]:
        """Set all to what they were; the states until now."""
        now = self.states()
        for generator, state in zip(self._all, self._before, strict=True):
            generator.set_state(state)
        return now


def draws(graph: fx.GraphModule) -> bool:
    """Whether a graph draws random numbers."""
    return any(
        node.op == "call_function"
        and _torch.draws_random_numbers(node.target, node.args, node.kwargs)
        for node in graph.graph.nodes
    )
