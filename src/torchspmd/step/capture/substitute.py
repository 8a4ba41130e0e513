"""Traced tensors in the places of parameters, buffers and numbers while a step is traced.

The user's own modules hold what the trace gives them; afterwards everything is put back,
whatever happened.
"""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import torch

from torchspmd import _torch
from torchspmd.comm import Phase
from torchspmd.errors import CaptureError
from torchspmd.layout.retired import predecessor_id
from torchspmd.step.capture.guards import name_of_hook, walk_arguments, walk_data
from torchspmd.step.capture.inventory import Inventory, Number, Role
from torchspmd.step.capture.optimizer_rules import ELEMENTWISE, check_whole, is_spread
from torchspmd.step.capture.parallel_mode import ParallelMode
from torchspmd.step.capture.python_values import Walk
from torchspmd.step.capture.rank_divergence import (
    keep_inner,
    mark_gradient,
    refuse_graphs,
)
from torchspmd.step.capture.user_code import calling_line
from torchspmd.step.graph.metadata import OwnerLog


class Substitution:
    """Traced values for one inventory, and what becomes of the gradients among them.

    Attributes:
        locals: The traced tensor of each slot; the optimizer writes into it.
        numbers: The traced numbers.
        shown: What the user's modules see for each slot.
        handed: The parameters that a running optimizer was handed as plain tensors.
        arrived: The parameters whose gradient backward has made, cleared since or not.
        fresh: The parameters whose gradient was cleared before that.
        stepped: The parameters that an optimizer of the step has updated.
        updated: The optimizer and the parameter of each update by a gradient.
    """

    def __init__(
        self, inventory: Inventory, flat: tuple[Any, ...], mode: ParallelMode
    ) -> None:
        self.inventory, self.mode = inventory, mode
        count = len(inventory.slots)
        self.locals: list[torch.Tensor] = list(flat[:count])
        self.numbers: list[Any] = list(flat[count:])
        self.handed: set[int] = set()
        self.arrived: set[int] = set()
        self.fresh: set[int] = set()
        self.stepped: set[int] = set()
        self.updated: set[tuple[int, int]] = set()
        self._plain = _plain_slots(inventory)
        self.shown = [
            mode.show(slot, local)
            for slot, local in zip(inventory.slots, self.locals, strict=True)
        ]
        for slot, shown, local in zip(
            inventory.slots, self.shown, self.locals, strict=True
        ):
            for traced in {id(shown): shown, id(local): local}.values():
                pass_for(traced, slot.tensor)
            if slot.tensor.requires_grad:
                shown.requires_grad_()
        for index, _, slots in inventory.groups:
            parts = [inventory.slots[slot] for slot in slots]
            sharded = [part.name for part in parts if is_spread(part.tensor)]
            check_whole(inventory.optimizers[index][1], sharded)
        for parameter, gradient in inventory.gradients.items():
            self.shown[parameter].grad = self.shown[gradient]

    def leaves(self) -> list[Any]:
        """The step's arguments with traced tensors and numbers."""
        leaves = list(self.inventory.leaves)
        for place, slot in self.inventory.inputs.items():
            leaves[place] = self.shown[slot]
        for number, traced in zip(self.inventory.numbers, self.numbers, strict=True):
            if number.leaf >= 0:
                leaves[number.leaf] = traced
        return leaves

    def steps_on(self, slot: int) -> torch.Tensor:
        """What an optimizer works on for a parameter or a state.

        Where the mode laid out a plain tensor as replicated, the plain one: every
        optimizer works on it, whether DTensor knows its operators or not. Of a DTensor,
        the shard, for optimizers that treat each element by itself.
        """
        return self.locals[slot] if slot in self._plain else self.shown[slot]

    def groups_of(self, index: int) -> Iterator[tuple[dict[str, Any], tuple[int, ...]]]:
        """The parameter groups of an optimizer, and the slots of their parameters."""
        optimizer = self.inventory.optimizers[index][1]
        for owner, number, slots in self.inventory.groups:
            if owner == index:
                yield optimizer.param_groups[number], slots

    @contextlib.contextmanager
    def installed(self, log: OwnerLog) -> Iterator[None]:
        """Put the traced values into the user's objects; put all back at the end."""
        inventory = self.inventory
        trained = {
            slot: shown
            for slot, shown in enumerate(self.shown)
            if inventory.slots[slot].role is Role.PARAMETER and shown.requires_grad
        }
        with contextlib.ExitStack() as stack:
            for number, traced in zip(inventory.numbers, self.numbers, strict=True):
                if number.holder is not None and not (
                    number.is_state or number.is_counter
                ):
                    _install(stack, number.holder, number.key, _placed(number, traced))
            for slot, shown in trained.items():
                # Before it is added to `grad`: what is there was reduced already.
                hook = shown.register_hook(_Reduction(self, log, slot))
                stack.callback(hook.remove)
                if self.mode.reduces:
                    name = inventory.slots[slot].name
                    stack.callback(refuse_graphs(shown, name))
            numbers = dict(enumerate(self.numbers))
            slots = range(len(inventory.slots))
            stepped = [self.steps_on(slot) for slot in slots]
            stack.enter_context(
                in_users_objects(inventory, self.shown, stepped, numbers)
            )
            stack.enter_context(self.mode.installed(inventory, self.shown, log))
            for hook in _install_gradient_hooks(inventory, self.shown, log):
                stack.callback(hook.remove)
            for slot, shown in trained.items():  # behind all other hooks
                mark = functools.partial(mark_gradient, shown, slot)
                stack.callback(shown.register_hook(mark).remove)
            yield


def _plain_slots(inventory: Inventory) -> set[int]:
    """The slots of which optimizers get the plain tensor."""
    plain = {
        place
        for place, slot in enumerate(inventory.slots)
        if slot.role is Role.HYPER or _torch.layout_of(slot.tensor) is None
    }
    elementwise = {
        index
        for index, (_, optimizer) in enumerate(inventory.optimizers)
        if type(optimizer) in ELEMENTWISE
    }
    for index, _, slots in inventory.groups:
        if index in elementwise:
            plain.update(slots)
    plain.update(s.slot for s in inventory.states if s.optimizer in elementwise)
    return plain


def _install(stack: contextlib.ExitStack, table: Any, key: str, value: Any) -> None:
    stack.callback(table.__setitem__, key, table[key])
    table[key] = value


def _placed(number: Number, traced: Any) -> Any:
    """A hyper-parameter with one of its items traced; other items as they are now."""
    assert number.holder is not None
    if not number.path:
        return traced
    items = list(number.holder[number.key])
    items[number.path[0]] = traced
    return type(number.holder[number.key])(items)


class _Reduction:
    """Reduces a parameter's gradient as soon as backward has made it."""

    def __init__(self, substitution: Substitution, log: OwnerLog, place: int) -> None:
        self._substitution, self._log = substitution, log
        self._place, self._name = place, substitution.inventory.slots[place].name
        self._owner = self._name.rpartition(".")[0]

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        mode = self._substitution.mode
        self._substitution.arrived.add(self._place)
        if self._place in self._substitution.handed:
            raise CaptureError(
                f"compile: an optimizer's step() runs backward itself, after it was handed "
                f"the gradient of {self._name}\n\n  * {calling_line()}\n\nCall backward "
                "before step(), or pass step() a closure that does."
            )
        with self._log.owned(Phase.BACKWARD, self._owner):
            if mode.reduces and torch.is_grad_enabled():
                return keep_inner(gradient)  # create_graph=True
            with torch.no_grad():
                return mode.reduce(gradient)


# ----------------------------------------------------------------------------
# Hooks that the user put on the gradients of parameters, run while a step is traced.
#
# They are put on the traced tensor, so that autograd calls them where it would call them in
# eager, and what they compute becomes part of the graph.


def _install_gradient_hooks(
    inventory: Inventory, shown: list[torch.Tensor], log: OwnerLog
) -> Iterator[Any]:
    """Put the user's hooks on the traced parameters; gives the handles.

    Behind all hooks of ours: a hook gets the gradient that ``grad`` gets.
    """
    _check_gradient_hooks(inventory)
    for slot, traced in zip(inventory.slots, shown, strict=True):
        if slot.role is not Role.PARAMETER or not traced.requires_grad:
            continue
        owner = slot.name.rpartition(".")[0]
        for table, _, hook in _hooks_of(slot.tensor):
            yield _torch.add_gradient_hook(traced, table, _Owned(hook, log, owner))


def _hooks_of(tensor: torch.Tensor) -> Iterator[tuple[str, int, Any]]:
    return _torch.hooks_of(tensor, _torch.GRADIENT_HOOK_TABLES)


def _check_gradient_hooks(inventory: Inventory) -> None:
    """Refuse hooks that would never be called on other tensors than their own."""
    lines = [
        f"  * {slot.name}: {name_of_hook(hook)}"
        for slot in inventory.slots
        if slot.role is Role.PARAMETER
        for _, _, hook in _hooks_of(slot.tensor)
        if _torch.waits_for_nodes(hook)
    ]
    if lines:
        raise CaptureError(
            "compile: parameters have gradient hooks of register_multi_grad_hook("
            'mode="all"), which wait for all gradients of one backward and cannot be '
            "captured:\n\n" + "\n".join(lines) + "\n\nRemove them, and do what they do "
            "in the step, after backward."
        )


class _Owned:
    """A hook whose operators belong to the module of its parameter."""

    def __init__(self, hook: Any, log: OwnerLog, owner: str) -> None:
        self._hook, self._log, self._owner = hook, log, owner

    def __call__(self, tensor: torch.Tensor) -> Any:
        with self._log.owned(Phase.BACKWARD, self._owner):
            return self._hook(tensor)


# ----------------------------------------------------------------------------
# Other tensors in the user's objects: traced ones, or the copies of a shadow step.


@contextlib.contextmanager
def in_users_objects(
    inventory: Inventory,
    shown: Sequence[torch.Tensor],
    stepped: Sequence[torch.Tensor],
    numbers: Mapping[int, Any],
) -> Iterator[None]:
    """Inside, the user's modules, optimizers and variables hold other tensors.

    Args:
        inventory: Where the user's own tensors are.
        shown: For each slot, what modules and Python code see.
        stepped: For each slot, what optimizers work on: hyper-parameters and states, and
            the parameters that states belong to.
        numbers: Counters that are Python numbers, by their place in the inventory.
    """
    with contextlib.ExitStack() as stack:
        for place in inventory.places:
            is_hyper = inventory.slots[place.slot].role is Role.HYPER
            held = stepped if is_hyper else shown
            _install(stack, place.table, place.key, held[place.slot])
        for index, number, slots in inventory.groups:
            params = inventory.optimizers[index][1].param_groups[number]["params"]
            stack.callback(params.__setitem__, slice(None), list(params))
            params[:] = [shown[slot] for slot in slots]
        for index, (_, optimizer) in enumerate(inventory.optimizers):
            stack.callback(setattr, optimizer, "state", optimizer.state)
            optimizer.state = _state_of(inventory, index, stepped, numbers)
        for count, value in numbers.items():
            counter = inventory.numbers[count]
            if counter.is_counter and counter.holder is not None:
                _install(stack, counter.holder, counter.key, value)
        stack.enter_context(_held_by_python(inventory, shown))
        yield


def _state_of(
    inventory: Inventory,
    index: int,
    stepped: Sequence[torch.Tensor],
    numbers: Mapping[int, Any],
) -> defaultdict[torch.Tensor, Any]:
    """An optimizer's state with other tensors, keyed by what it steps on."""
    tensors = {
        (place.parameter, place.key): stepped[place.slot]
        for place in inventory.states
        if place.optimizer == index
    }
    counters = {
        (id(number.holder), number.key): numbers[place]
        for place, number in enumerate(inventory.numbers)
        if number.is_state and place in numbers
    }
    state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    for parameter, entries in inventory.saved_states[index].items():
        slot = inventory.by_id[id(parameter)]
        state[stepped[slot]] = {
            key: tensors.get((slot, key), counters.get((id(entries), key), value))
            for key, value in entries.items()
        }
    return state


# ----------------------------------------------------------------------------
# Tensors that Python code knows by themselves: what it set on them, who holds them.
#
# A list, a set, a dict or a variable that holds a parameter, or its ``id``, holds that of
# the traced one meanwhile, so that ``p is self.head`` and ``id(p) in frozen`` say what they
# say in eager code.


def pass_for(traced: torch.Tensor, own: torch.Tensor) -> None:
    """Give a traced tensor what Python code can ask a parameter about itself."""
    known = vars(traced)
    known.update({key: each for key, each in vars(own).items() if key not in known})
    if isinstance(own, torch.nn.Parameter):
        known["_is_param"] = True  # what isinstance(p, nn.Parameter) asks for


@contextlib.contextmanager
def _held_by_python(
    inventory: Inventory, shown: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Inside, whatever the step's code reaches holds traced parameters for its own.

    Tensors that are passed are traced ones in the objects among the arguments alone: what
    else holds one now may hold another one in the next call.
    """
    pairs = list(zip(inventory.slots, shown, strict=True))
    of_modules = [
        (slot.tensor, traced)
        for slot, traced in pairs
        if slot.role in (Role.PARAMETER, Role.BUFFER)
    ]
    known = {id(own): traced for own, traced in of_modules}
    known |= {was: traced for own, traced in of_modules if (was := predecessor_id(own))}
    passed = {
        id(slot.tensor): traced for slot, traced in pairs if slot.role is Role.INPUT
    }
    with contextlib.ExitStack() as stack:
        _put_into(stack, walk_data(inventory), known)
        _put_into(stack, walk_arguments(inventory), passed)
        yield


def _put_into(
    stack: contextlib.ExitStack, walk: Walk, known: Mapping[int, torch.Tensor]
) -> None:
    """Put traced tensors into all that a walk has found, until the stack is closed."""
    for each in walk.taken:
        for key, before in each.places():
            now = _all(before, known) if key is None else _one(before, known)
            if now is not before:
                stack.callback(each.put, key, before)
                each.put(key, now)


def _all(held: Any, known: Mapping[int, torch.Tensor]) -> Any:
    """The items of a container with traced parameters; the same object if there is none."""
    if not isinstance(held, dict):
        return _replaced(held, known)
    keys, values = list(held), list(held.values())
    changed = _replaced(keys, known), _replaced(values, known)
    if changed[0] is keys and changed[1] is values:
        return held
    return dict(zip(*changed, strict=True))


def _one(value: Any, known: Mapping[int, torch.Tensor]) -> Any:
    """A traced parameter, or its id, for one that is held; other values as they are."""
    if type(value) in (tuple, frozenset):  # a list in a list is looked at by itself
        return _replaced(value, known)
    if type(value) is int:
        return id(known[value]) if value in known else value
    return known.get(id(value), value) if isinstance(value, torch.Tensor) else value


def _replaced(items: Any, known: Mapping[int, torch.Tensor]) -> Any:
    changed = [_one(item, known) for item in items]
    return items if all(map(is_, items, changed)) else type(items)(changed)
