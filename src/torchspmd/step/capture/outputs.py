"""What a captured step gives back, and where each value goes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.errors import CaptureError
from torchspmd.step.capture.inventory import Inventory, Role, Slot, constant_state
from torchspmd.step.capture.parallel_mode import ParallelMode
from torchspmd.step.capture.side_effects import Stored, find_traced
from torchspmd.step.capture.snapshots import mark_stored
from torchspmd.step.capture.stored import Address
from torchspmd.step.capture.substitute import Substitution
from torchspmd.step.graph.metadata import OutputKind, OutputRole


@dataclass(frozen=True, slots=True)
class NewValue:
    """A new value of a tensor that came in; copied into the user's own tensor."""

    slot: int


@dataclass(frozen=True, slots=True)
class NewGradient:
    """A gradient that the step leaves behind; becomes the parameter's ``grad``.

    ``is_fresh``: the step cleared ``grad``, or put something else there, before it was
    made, and updates the parameter itself.
    """

    parameter: int
    is_fresh: bool = False


@dataclass(frozen=True, slots=True)
class NewState:
    """A state that the step created; put into the optimizer."""

    optimizer: int
    parameter: int
    key: str


@dataclass(frozen=True, slots=True)
class NewNumber:
    """A new value of an optimizer's counter that is a Python number."""

    number: int


@dataclass(frozen=True, slots=True)
class Result:
    """One leaf of what the user's function returned."""

    leaf: int


@dataclass(frozen=True, slots=True)
class Attribute:
    """A place in which each call stores something: an attribute of an object.

    Attributes:
        address: The object.
        key: The attribute.
        path: Its name.
        roles: What each leaf that is a tensor is to the next call.
        in_place: It is a dict, which each call fills.
    """

    address: Address
    key: str
    path: str
    roles: tuple[str, ...]
    in_place: bool

    def holder_in(self, inventory: Inventory) -> Any:
        """The object, in a call."""
        return self.address.holder_in(
            inventory.modules, inventory.leaves, inventory.function
        )

    def put(self, inventory: Inventory, value: Any) -> None:
        """Store a value, and note that a step has made it."""
        leaves = _torch.leaves_of(torch.Tensor, value)
        for leaf, role in zip(leaves, self.roles, strict=True):
            mark_stored(leaf, role)
        table = vars(self.holder_in(inventory))
        if self.in_place:
            table[self.key].clear()
            table[self.key].update(value)
        else:
            table[self.key] = value

    def get(self, inventory: Inventory) -> Any:
        """What is stored there now; None for nothing."""
        return vars(self.holder_in(inventory)).get(self.key)


Destination: TypeAlias = NewValue | NewGradient | NewState | NewNumber | Result


@dataclass(frozen=True, slots=True)
class Outputs:
    """The destinations of a graph's outputs, in order, and all that is constant.

    Attributes:
        destinations: One for each output of the graph.
        leaves: The leaves of the returned tree; traced ones are None here.
        structure: The shape of the returned tree.
        constant_states: States that the step created and that are no tensors.
        new_states: All states that the step created, in the order of their creation.
        cleared: Parameters whose gradient is None after the step.
        group_values: New values of parameter groups: the optimizer's place, the group's,
            the key and the value.
        stored: What the returned tree has beside what the step returned: where it goes.
    """

    destinations: tuple[Destination, ...]
    leaves: tuple[Any, ...]
    structure: Any
    constant_states: tuple[tuple[NewState, Any], ...]
    new_states: tuple[NewState, ...]
    cleared: tuple[int, ...]
    group_values: tuple[tuple[int, int, str, Any], ...] = ()
    stored: tuple[Attribute, ...] = ()


def collect(
    substitution: Substitution,
    returned: Any,
    created: Sequence[tuple[Any, str, Any]] = (),
    kept: Sequence[Stored] = (),
) -> tuple[list[Any], Outputs]:
    """After the step has been traced: its values, and where each goes.

    Args:
        substitution: The traced values, and where they were.
        returned: What the step returned.
        created: What it put into parameter groups.
        kept: What it stored in attributes.
    """
    found: list[tuple[Destination, Any]] = []
    found += _module_values(substitution)
    constant_states, new_states = _state_values(substitution, found)
    found += _counter_values(substitution)
    cleared = _gradient_values(substitution, found)
    written = {d.slot for d, _ in found if isinstance(d, NewValue)}
    found += [
        (NewValue(slot), local)
        for slot, local in enumerate(substitution.locals)
        if slot not in written
    ]
    known = frozenset(map(id, substitution.inventory.leaves))
    tree = _opened(returned)
    if kept:
        tree = tree, tuple(each.value for each in kept)
    leaves, structure = _torch.flatten_tree(tree)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            found.append((Result(place), substitution.mode.result(leaf.detach())))
            leaves[place] = None
        elif isinstance(leaf, (torch.SymFloat, torch.SymInt, torch.SymBool)):
            found.append((Result(place), leaf))
            leaves[place] = None
        elif id(leaf) not in known:
            _check_result(leaf)
    outputs = Outputs(
        tuple(destination for destination, _ in found),
        tuple(leaves),
        structure,
        tuple(constant_states),
        tuple(new_states),
        tuple(cleared),
        tuple(_group_values(substitution.inventory, created)),
        tuple(_attribute(each, substitution.mode) for each in kept),
    )
    return [value for _, value in found], outputs


def _attribute(kept: Stored, mode: ParallelMode) -> Attribute:
    tensors = _torch.leaves_of(torch.Tensor, kept.value)
    roles = tuple(mode.role_of_stored(each) for each in tensors)
    return Attribute(kept.address, kept.key, kept.path, roles, kept.in_place)


def _opened(returned: Any) -> Any:
    """A tree in which dataclasses that hold traced tensors are nodes too."""
    leaves, structure = _torch.flatten_tree(returned)
    for place, leaf in enumerate(leaves):
        if not is_dataclass(leaf) or isinstance(leaf, type):
            continue
        if next(find_traced(leaf, ""), None) is not None:
            values = [_opened(value) for _, value in _torch.record_fields(leaf)]
            leaves[place] = _torch.Record(leaf, values)
    return _torch.unflatten_tree(leaves, structure)


def _check_result(leaf: Any) -> None:
    kind = type(leaf).__name__
    paths = list(find_traced(leaf, kind))
    if paths:
        raise CaptureError(
            f"compile: the step returns a {kind} with tensors inside "
            f"({', '.join(paths)}), which would have no values. Return tensors in tuples, "
            "lists, dicts, named tuples or dataclasses."
        )


def _module_values(substitution: Substitution) -> list[tuple[Destination, Any]]:
    """Buffers that the step replaced by another tensor instead of writing into them."""
    replaced: list[tuple[Destination, Any]] = []
    for place in substitution.inventory.places:
        slot = substitution.inventory.slots[place.slot]
        now = place.table.get(place.key)
        if slot.role is Role.HYPER or now is substitution.shown[place.slot]:
            continue
        local = substitution.locals[place.slot]
        value = now if now is None else substitution.mode.result(now.detach())
        if value is None or value.shape != local.shape or value.dtype != local.dtype:
            raise CaptureError(
                f"compile: the step replaces {slot.name} by a tensor of another shape or "
                "dtype, or removes it. Keep its shape, or do this outside the step."
            )
        replaced.append((NewValue(place.slot), value))
    return replaced


def _state_values(
    substitution: Substitution, found: list[tuple[Destination, Any]]
) -> tuple[list[tuple[NewState, Any]], list[NewState]]:
    """What each optimizer holds now that it did not hold before."""
    constants: list[tuple[NewState, Any]] = []
    created: list[NewState] = []
    inventory = substitution.inventory
    known = {(s.optimizer, s.parameter, s.key): s.slot for s in inventory.states}
    counters = _counters(inventory)
    for index, (_, optimizer) in enumerate(inventory.optimizers):
        by_tensor = {
            id(substitution.steps_on(slot)): slot for slot in _parameters(inventory)
        }
        for parameter, entries in optimizer.state.items():
            slot = by_tensor[id(parameter)]
            _check_kept(inventory, index, slot, entries)
            for key, value in entries.items():
                address = NewState(index, slot, key)
                before = known.get((index, slot, key))
                if before is not None:
                    if value is not substitution.steps_on(before):
                        found.append((NewValue(before), _torch.plain_tensor(value)))
                elif (index, slot, key) in counters:
                    found.append((NewNumber(counters[index, slot, key]), value))
                else:
                    created.append(address)
                    if isinstance(value, torch.Tensor):
                        found.append((address, _torch.plain_tensor(value.detach())))
                    elif isinstance(value, _torch.numbers.SYMBOLIC):
                        found.append((address, value))
                    else:
                        constant_state(f"{inventory.slots[slot].name}.{key}", value)
                        constants.append((address, value))
    return constants, created


def _check_kept(inventory: Inventory, index: int, slot: int, entries: Any) -> None:
    owner = inventory.slots[slot]
    gone = [
        key
        for key in inventory.saved_states[index].get(owner.tensor, ())
        if key not in entries
    ]
    if gone:
        raise CaptureError(
            f"compile: the step removes {owner.name}.{gone[0]} from the state of "
            f"{inventory.optimizers[index][0]}, which would happen once, at capture. Keep "
            "it, or remove it between two steps."
        )


def _parameters(inventory: Inventory) -> list[int]:
    return [slot for _, _, slots in inventory.groups for slot in slots]


def _group_values(
    inventory: Inventory, created: Sequence[tuple[Any, str, Any]]
) -> Iterator[tuple[int, int, str, Any]]:
    for group, key, value in created:
        for index, (_, optimizer) in enumerate(inventory.optimizers):
            for number, each in enumerate(optimizer.param_groups):
                if each is group:
                    yield index, number, key, value


def _counter_values(substitution: Substitution) -> Iterator[tuple[Destination, Any]]:
    """Numbers of parameter groups that their optimizer counts in."""
    numbers = zip(substitution.inventory.numbers, substitution.numbers, strict=True)
    for place, (number, traced) in enumerate(numbers):
        if not number.is_counter or number.holder is None:
            continue
        now = number.holder.get(number.key)
        if now is traced:
            continue
        if not isinstance(now, _torch.numbers.SYMBOLIC):
            raise CaptureError(
                f"compile: the step sets {number.name} to what does not follow from its "
                "value before, which would happen once, at capture. Set it between two "
                "calls of the step."
            )
        yield NewNumber(place), now


def _counters(inventory: Inventory) -> dict[tuple[int, int, str], int]:
    holders = {
        id(entries): (index, inventory.by_id[id(parameter)])
        for index, (_, optimizer) in enumerate(inventory.optimizers)
        for parameter, entries in inventory.saved_states[index].items()
    }
    return {
        (*holders[id(number.holder)], number.key): place
        for place, number in enumerate(inventory.numbers)
        if number.is_state
    }


def _gradient_values(
    substitution: Substitution, found: list[tuple[Destination, Any]]
) -> list[int]:
    """Gradients that the step leaves behind, and parameters without one."""
    cleared = []
    for place, slot in enumerate(substitution.inventory.slots):
        if slot.role is not Role.PARAMETER:
            continue
        gradient = substitution.shown[place].grad
        before = substitution.inventory.gradients.get(place)
        if gradient is None:
            if before is not None:
                cleared.append(place)
        elif before is None or gradient is not substitution.shown[before]:
            local = substitution.mode.for_optimizer(substitution.shown[place])
            is_fresh = before is not None or place in substitution.fresh
            is_used = (
                place in substitution.stepped
            )  # not by an optimizer outside of the step
            found.append((NewGradient(place, is_fresh and is_used), local))
    return cleared


def drop_unchanged(graph: fx.GraphModule, outputs: Outputs) -> Outputs:
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


def find_roles(
    outputs: Outputs, inventory: Inventory, graph: fx.Graph
) -> list[OutputRole]:
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
                roles.append(OutputRole(OutputKind.GRADIENT, parameter, may_wait))
            case NewState(_, parameter, _):
                roles.append(OutputRole(OutputKind.CREATED, parameter))
            case Result():
                roles.append(OutputRole(OutputKind.RESULT))
    return roles


def trained_outputs(outputs: Outputs, slots: list[Slot]) -> dict[int, str]:
    """The names of new parameters and gradients, by their place among the outputs."""
    names = {}
    for place, destination in enumerate(outputs.destinations):
        if isinstance(destination, NewGradient):
            names[place] = f"{slots[destination.parameter].name}.grad"
        elif isinstance(destination, NewValue):
            if slots[destination.slot].role in (Role.PARAMETER, Role.GRADIENT):
                names[place] = slots[destination.slot].name
    return names
