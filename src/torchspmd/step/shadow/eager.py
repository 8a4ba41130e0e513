"""One call of a step made eagerly, on copies, and all that came of it."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchspmd import _torch
from torchspmd.step.capture.guards import walk_data
from torchspmd.step.capture.held import MISSING
from torchspmd.step.capture.identities import held_by_python
from torchspmd.step.capture.inventory import Inventory, Role, is_counter
from torchspmd.step.capture.side_effects import (
    hold_hooks,
    hold_python,
    undo_python,
)
from torchspmd.step.capture.spread import Spread
from torchspmd.step.modes.data_parallel import Replicated
from torchspmd.step.modes.fully_shard import FullySharded
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
        read: Reads what the user's own object holds there.
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
        error: What it raised instead.
        changes: What it changed in Python, as text; it was put back.
        random: The state of every generator of torch after it.
        drew: Whether it drew random numbers.
        gradients: The sizes of the gradients that backward made, by slot.
        ahead: What the next call begins with, of what is late, by slot.
        numbers: The same of counters that are Python numbers, by their place.
    """

    values: list[Expected] = field(default_factory=list)
    returned: Any = None
    error: Exception | None = None
    changes: list[str] = field(default_factory=list)
    random: list[torch.Tensor] = field(default_factory=list)
    drew: bool = False
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    ahead: dict[int, torch.Tensor] = field(default_factory=dict)
    numbers: dict[int, Any] = field(default_factory=dict)


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


def run_eagerly(
    function: Callable[..., Any],
    inventory: Inventory,
    spread: Spread,
    late: Late,
    before: Eager | None,
    *,
    communicates: bool,
) -> Eager:
    """Make one call eagerly, with plain collectives for the mode's meaning.

    Reading the user's objects must not flush meanwhile.

    Args:
        function: The step.
        inventory: What the call works on.
        spread: The mode.
        late: What the compiled step leaves for the next one.
        before: The eager call before this one, whose update is still pending in the
            user's own tensors.
        communicates: Whether the compiled step communicates.
    """
    ahead = {} if before is None else before.ahead
    numbers = {} if before is None else before.numbers
    copies = Copies(inventory, copy_slots(inventory, spread, ahead), numbers)
    generators = Generators(inventory)
    found, held = Eager(), [*hold_python(inventory), *hold_hooks(inventory)]
    talk = _Talk(spread.mesh if communicates else None)
    try:
        tensors = [each.tensor for each in copies.wholes]
        with (
            copies.installed(),
            _seen_by_forwards(spread, inventory, tensors),
            held_by_python(inventory, tensors),
            _reduced(inventory, copies.wholes, spread, talk),
            _watched_gradients(inventory, copies.wholes, found),
        ):
            args, kwargs = copies.arguments()
            try:
                found.returned = function(*args, **kwargs)
                talk.end()
            except Exception as error:  # what the step itself raises
                talk.fail()
                found.error = error.with_traceback(None)
    finally:
        found.random, found.drew = generators.put_back()
        found.changes = undo_python(held)
        torch.clear_autocast_cache()
    _read_values(found, copies, late, ahead)
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
                    _reader(slot.tensor),
                    _change(ahead.get(place, own), value),
                    slot=place,
                    owner=place,
                    is_late=place in late.slots,
                )
            )
        _read_gradients(found, copies, late)
        _read_states(found, copies, late)
    found.ahead = {
        each.slot: each.value
        for each in found.values
        if each.is_late and each.slot in late.slots and each.kind is not Kind.GRADIENT
    }
    found.gradients = {
        slot: parts[slot](gradient) for slot, gradient in found.gradients.items()
    }


def _read_gradients(found: Eager, copies: Copies, late: Late) -> None:
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
                    _gradient_reader(slot.tensor),
                    slot=place,
                    owner=place,
                    is_late=place in late.gradients,
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
                if isinstance(value, torch.Tensor):
                    value = _state_part(key, value, whole)
                elif is_late:
                    found.numbers[number] = value
                found.values.append(
                    Expected(
                        Kind.STATE,
                        f"{owner.name}.{key}",
                        value,
                        _state_reader(optimizer, owner.tensor, key),
                        slot=place,
                        owner=slot,
                        is_late=is_late,
                    )
                )


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


def _reader(tensor: torch.Tensor) -> Callable[[], Any]:
    return lambda: _torch.plain_tensor(tensor).detach()


def _gradient_reader(tensor: torch.Tensor) -> Callable[[], Any]:
    def read() -> Any:
        return None if tensor.grad is None else _torch.plain_tensor(tensor.grad)

    return read


def _state_reader(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str
) -> Callable[[], Any]:
    def read() -> Any:
        entries = optimizer.state.get(parameter, {})
        value = entries.get(key, MISSING)
        return _torch.plain_tensor(value) if isinstance(value, torch.Tensor) else value

    return read


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
        others = _torch.wait(_torch.start_all_gather(own, self._mesh.size(), name))
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
def _reduced(
    inventory: Inventory, wholes: list[Whole], spread: Spread, talk: _Talk
) -> Iterator[None]:
    """Hooks that reduce gradients as the mode does, and those of the user behind them."""
    reduce: Callable[[torch.Tensor], torch.Tensor] | None = None
    if isinstance(spread, Replicated):
        reduce = spread.reduce
    elif isinstance(spread, FullySharded):
        reduce = spread.reduce_whole
    with contextlib.ExitStack() as stack:
        for place, slot in enumerate(inventory.slots):
            tensor = wholes[place].tensor
            if slot.role is not Role.PARAMETER or not tensor.requires_grad:
                continue
            if reduce is not None:
                layout = None
                if isinstance(spread, FullySharded):  # its shard has lost such hooks
                    layout = _torch.layout_of(tensor)
                hook = _reduction(place, reduce, talk, layout)
                stack.callback(tensor.register_hook(hook).remove)
            for table, _, own in _torch.hooks_of(
                slot.tensor, _torch.GRADIENT_HOOK_TABLES
            ):
                handle = _torch.add_gradient_hook(tensor, table, own)
                stack.callback(handle.remove)
        yield


def _seen_by_forwards(
    spread: Spread, inventory: Inventory, tensors: list[torch.Tensor]
) -> contextlib.AbstractContextManager[None]:
    """Casts of whole parameters, where the mode gathers them in another precision."""
    if not isinstance(spread, FullySharded):
        return contextlib.nullcontext()
    return spread.installed_eagerly(inventory, tensors)


def _reduction(
    place: int,
    reduce: Callable[[torch.Tensor], torch.Tensor],
    talk: _Talk,
    layout: Any,
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


@contextlib.contextmanager
def _watched_gradients(
    inventory: Inventory, wholes: list[Whole], found: Eager
) -> Iterator[None]:
    """Note how large gradients are where backward makes them: some are rounding alone.

    Not where an optimizer takes them: clipping makes large ones small, and rounding stays.
    """

    def note(place: int, gradient: torch.Tensor) -> None:
        size, known = gradient.detach().abs(), found.gradients.get(place)
        found.gradients[place] = size if known is None else known + size

    with contextlib.ExitStack() as stack:
        for place, slot in enumerate(inventory.slots):
            tensor = wholes[place].tensor
            if slot.role is Role.PARAMETER and tensor.requires_grad:
                hook = functools.partial(note, place)
                stack.callback(tensor.register_hook(hook).remove)
        yield


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

    def put_back(self) -> tuple[list[torch.Tensor], bool]:
        """Set all to what they were; the states until now, and whether any was other."""
        now = self.states()
        for generator, state in zip(self._all, self._before, strict=True):
            generator.set_state(state)
        return now, not all(map(torch.equal, now, self._before))
