"""The guard fast path: whether a call works on the very same objects as an earlier one.

Taking an inventory and comparing the whole signature costs microseconds for each tensor. In
a training loop nothing changes from step to step but values, so what an earlier call found
is kept and compared by identity: every module, tensor, container and attribute, and the
form of every tensor. Whatever differs, even by an equal value in another object, is left to
the signature; the fast path decides nothing but "all is as it was".
"""

import weakref
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any, Generic, Protocol, TypeVar, final

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from torchspmd import _torch
from torchspmd.step.capture.guards import ambient_facts, own_attributes, walk_data
from torchspmd.step.capture.inventory import (
    Inventory,
    Number,
    Role,
    Slot,
    is_liftable,
    own_table,
)
from torchspmd.step.capture.python_values import Fact, Same, simple_fact
from torchspmd.step.capture.snapshots import Attributes, is_same_items, stored_form

_form = attrgetter("shape", "dtype", "device", "requires_grad")
_VALUES = methodcaller("values")
_gradient = attrgetter("grad")
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


class Guarded(Protocol):
    """What is kept for a call: a program."""

    number: int
    size_symbols: tuple[tuple[Any, int, int], ...]

    def accepts(self, inventory: Inventory) -> bool:
        """Whether the numbers of a call fit what was assumed about them."""


Kept = TypeVar("Kept", bound=Guarded)


@final
class GuardCache(Generic[Kept]):
    """The latest call of each program, as far as its objects still exist."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[Unchanged, Kept]] = {}

    def add(self, inventory: Inventory, program: Kept) -> None:
        """Remember a call before it is run."""
        if not _has_simple_inputs(inventory):
            return
        dims: dict[int, set[int]] = {}
        for _, slot, dim in program.size_symbols:
            dims.setdefault(slot, set()).add(dim)
        self._calls[program.number] = Unchanged(inventory, dims), program

    def drop(self, program: Kept) -> None:
        """Forget a program."""
        self._calls.pop(program.number, None)

    def find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Kept, Inventory] | None:
        """The program of a known call that this one equals, and its inventory."""
        if not self._calls:
            return None
        leaves, structure = _torch.flatten_tree((args, kwargs))
        for call, program in self._calls.values():
            inventory = call.renew(leaves, structure)
            if inventory is not None and program.accepts(inventory):
                return program, inventory
        return None


@final
class Unchanged:
    """What one call found, kept without its arguments, inputs and gradients.

    Modules and optimizers are held weakly: when one of them goes, all of this goes.
    """

    def __init__(
        self,
        inventory: Inventory,
        any_sizes: Mapping[int, Collection[int]] | None = None,
    ) -> None:
        self._is_usable = True
        self._any_sizes = any_sizes or {}  # of inputs, by slot: the dims of any size
        self._ambient = tuple(ambient_facts())
        # Attributes and tables of modules and parameters, with what was in each, one
        # behind another.
        self._tables: list[Mapping[Any, Any]] = []
        self._lengths: list[int] = []
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._hooks: list[tuple[Mapping[int, Any], list[int]]] = []
        self._empty: list[Mapping[Any, Any]] = []
        self._storing: list[Attributes] = []  # tables with what a step has stored
        self._keep_arguments(inventory)
        self._keep_tensors(inventory)
        self._keep_modules(inventory)
        self._data = walk_data(inventory).taken
        for each in self._data:
            each.forget_stored()
        self._optimizers: list[OptimizerFacts | ScalerFacts] = [
            OptimizerFacts(optimizer, inventory.numbers)
            for _, optimizer in inventory.optimizers
        ]
        self._optimizers += [ScalerFacts(scaler) for _, scaler in inventory.scalers]
        self._inventory = replace(
            inventory,
            leaves=[],
            modules=[],
            optimizers=[],
            scalers=[],
            slots=[],
            saved_states=[],
        )

    def _keep_arguments(self, inventory: Inventory) -> None:
        self._roots: dict[int, weakref.ref[Any]] = {}
        self._constants: dict[int, tuple[Any, Fact | None]] = {}
        roots = (*inventory.modules, *inventory.optimizers, *inventory.scalers)
        known = {id(each) for _, each in roots}
        lifted = {number.leaf for number in inventory.numbers}
        for place, leaf in enumerate(inventory.leaves):
            if id(leaf) in known:
                self._roots[place] = weakref.ref(leaf, self._forget)
            elif place not in inventory.inputs and place not in lifted:
                self._constants[place] = leaf, simple_fact(leaf)
        self._named = {
            key: [(name, weakref.ref(each)) for name, each in getattr(inventory, key)]
            for key in ("modules", "optimizers", "scalers")
        }

    def _keep_tensors(self, inventory: Inventory) -> None:
        self._attributes = [each for each in inventory.places if each.is_attribute]
        passing = {*inventory.inputs.values(), *inventory.gradients.values()}
        passing.update(each.slot for each in self._attributes)
        self._slots: list[Slot | None] = [
            None if place in passing else slot
            for place, slot in enumerate(inventory.slots)
        ]
        self._kept = [slot.tensor for slot in self._slots if slot is not None]
        self._forms = _forms(self._kept)
        is_plain = _PLAIN.issuperset(self._forms[0])
        self._is_same_form = _torch.form_check(self._kept) if is_plain else None
        self._ids = {id(tensor) for tensor in self._kept}
        self._owners = [
            slot.tensor
            for slot in self._slots
            if slot is not None and slot.role is Role.PARAMETER
        ]
        self._gradient_hooks = _torch.gradient_hook_keys(self._owners)
        for owner in self._owners:
            self._keep_table(vars(owner))
        self._names = [(slot.name, slot.role) for slot in inventory.slots]
        self._gradient_slots = [
            inventory.gradients.get(place)
            for place, slot in enumerate(inventory.slots)
            if slot.role is Role.PARAMETER
        ]
        self._passing_forms = {
            place: self._form(place, inventory.slots[place].tensor) for place in passing
        }

    def _keep_modules(self, inventory: Inventory) -> None:
        modules = [each for _, root in inventory.modules for each in root.modules()]
        self._modules = list(map(weakref.ref, modules))
        self._types = list(map(type, modules))
        for own in map(vars, modules):
            self._keep_table(own)
            for name in ("_modules", "_parameters", "_buffers"):
                self._keep_table(own_table(own[name]))
            for hooks in (own[name] for name in _torch.HOOK_TABLES):
                if hooks:
                    # By key: what a hook holds is not held here, and no key is given twice.
                    self._hooks.append((hooks, list(hooks)))
                else:
                    self._empty.append(hooks)

    def _keep_table(self, table: Mapping[Any, Any]) -> None:
        if any(map(stored_form, table.values())):
            attributes = Attributes("", table, table=table)
            attributes.forget_stored()
            self._storing.append(attributes)
        elif table:
            self._tables.append(table)
            self._lengths.append(len(table))
            self._keys += table
            self._values += table.values()
        else:
            self._empty.append(table)

    def _form(self, place: int, tensor: torch.Tensor) -> Any:
        """All that is guarded about an input or a gradient."""
        dims = self._any_sizes.get(place)
        if dims is None:
            return _forms([tensor])
        shape = [n for dim, n in enumerate(tensor.shape) if dim not in dims]
        form = _form(tensor)[1:]
        return type(tensor), tensor.ndim, shape, form, tensor.is_contiguous()

    def _forget(self, _: Any) -> None:
        self._is_usable = False
        self._slots, self._kept, self._owners, self._attributes = [], [], [], []
        self._tables, self._hooks, self._empty, self._storing = [], [], [], []
        self._lengths, self._keys, self._values = [], [], []
        self._optimizers, self._data = [], []
        self._inventory = Inventory([], None, [])

    def renew(self, leaves: list[Any], structure: Any) -> Inventory | None:
        """The inventory of a call on the same objects; None where anything differs."""
        if not self._is_usable or not self._has_same_arguments(leaves, structure):
            return None
        slots = self._same_tensors(leaves)
        if slots is None or not self._has_same_tables():
            return None
        if not all(facts.hold() for facts in self._optimizers):
            return None
        if not all(each.holds() for each in self._data):
            return None
        numbers = [number.reread(leaves) for number in self._inventory.numbers]
        named: dict[str, Any] = {
            key: [(name, ref()) for name, ref in found]
            for key, found in self._named.items()
        }
        return replace(
            self._inventory,
            leaves=leaves,
            structure=structure,
            saved_states=[each.state for _, each in named["optimizers"]],
            slots=slots,
            numbers=numbers,
            **named,
        )

    def _has_same_arguments(self, leaves: list[Any], structure: Any) -> bool:
        if structure != self._inventory.structure:
            return False
        if tuple(ambient_facts()) != self._ambient:
            return False
        if any(leaves[place] is not ref() for place, ref in self._roots.items()):
            return False
        for place, (constant, fact) in self._constants.items():
            leaf = leaves[place]
            if leaf is not constant and (fact is None or simple_fact(leaf) != fact):
                return False
        return all(
            is_liftable(leaves[number.leaf])
            for number in self._inventory.numbers
            if number.leaf >= 0
        )

    def _has_same_tables(self) -> bool:
        """Whether modules and parameters have the same attributes, tables and hooks."""
        types = (type(module()) for module in self._modules)
        return (
            not any(self._empty)
            and all(each.holds() for each in self._storing)
            and list(map(len, self._tables)) == self._lengths
            and all(map(is_, chain.from_iterable(self._tables), self._keys))
            and all(
                map(is_, chain.from_iterable(map(_VALUES, self._tables)), self._values)
            )
            and all(list(hooks) == keys for hooks, keys in self._hooks)
            and all(map(is_, types, self._types))
        )

    def _same_tensors(self, leaves: list[Any]) -> list[Slot] | None:
        """The slots with this call's inputs and gradients, if all have their old forms."""
        is_same = self._is_same_form is not None and self._is_same_form(self._kept)
        if not is_same and _forms(self._kept) != self._forms:
            return None
        if _torch.gradient_hook_keys(self._owners) != self._gradient_hooks:
            return None
        passing: dict[int, Any] = {
            slot: leaves[place] for place, slot in self._inventory.inputs.items()
        }
        for held in self._attributes:
            passing[held.slot] = held.table.get(held.key)
        for slot, gradient in zip(
            self._gradient_slots, map(_gradient, self._owners), strict=True
        ):
            if (slot is None) is not (gradient is None):
                return None
            if slot is not None:
                passing[slot] = gradient
        ids = {id(tensor) for tensor in passing.values()}
        if len(ids) != len(passing) or not ids.isdisjoint(self._ids):
            return None
        slots: list[Any] = self._slots.copy()
        for place, tensor in passing.items():
            if not isinstance(tensor, torch.Tensor):
                return None
            if self._form(place, tensor) != self._passing_forms[place]:
                return None
            slots[place] = Slot(*self._names[place], tensor)
        return slots


def _has_simple_inputs(inventory: Inventory) -> bool:
    """Whether each input is an argument of its own: not passed twice, or held by another.

    Nor may it be a tensor of a module as well.
    """
    slots = list(inventory.inputs.values())
    held = {n for n, slot in enumerate(inventory.slots) if slot.role is Role.INPUT}
    slots += [place.slot for place in inventory.places if place.is_attribute]
    return len(set(slots)) == len(slots) and held <= set(slots)


def _forms(tensors: list[torch.Tensor]) -> list[Any]:
    """All that is guarded about tensors, in as few Python steps as possible."""
    types = list(map(type, tensors))
    layouts = None if _PLAIN.issuperset(types) else list(map(_torch.layout_of, tensors))
    strides = list(map(torch.Tensor.stride, tensors))
    return [types, list(map(_form, tensors)), strides, layouts]


# ----------------------------------------------------------------------------
# Optimizers and scalers as an earlier call found them.


class OptimizerFacts:
    """An optimizer's groups and states, as they were; numbers of the graph may change."""

    def __init__(self, optimizer: Optimizer, numbers: list[Number]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._type = type(optimizer)
        self._hooks = _hook_keys(optimizer)
        self._own = _own_facts(optimizer)
        self._lifted = {(id(n.holder), n.key, n.path) for n in numbers}
        self._groups = optimizer.param_groups
        self._facts = [_group_facts(g, self._lifted) for g in self._groups]
        self._params = [(g, g["params"], list(g["params"])) for g in self._groups]
        self._state = optimizer.state
        self._entries = [
            (p, e, list(e), list(e.values())) for p, e in self._state.items()
        ]

    def hold(self) -> bool:
        """Whether all of it is still the same."""
        optimizer = self._optimizer()
        if optimizer is None or type(optimizer) is not self._type:
            return False
        if _hook_keys(optimizer) != self._hooks or _own_facts(optimizer) != self._own:
            return False
        groups = optimizer.param_groups
        if groups is not self._groups or len(groups) != len(self._params):
            return False
        for group, (old, params, items) in zip(groups, self._params, strict=True):
            if group is not old or group["params"] is not params:
                return False
            if not is_same_items(params, items):
                return False
        facts = [_group_facts(group, self._lifted) for group in groups]
        return facts == self._facts and self._has_same_state(optimizer.state)

    def _has_same_state(self, state: Any) -> bool:
        if state is not self._state or len(state) != len(self._entries):
            return False
        for (parameter, entries), (owner, old, keys, values) in zip(
            state.items(), self._entries, strict=True
        ):
            if parameter is not owner or entries is not old or list(entries) != keys:
                return False
            if not all(map(is_, entries.values(), values)) and not all(
                now is before
                or (type(now) is type(before) and type(now) in (int, float))
                for now, before in zip(entries.values(), values, strict=True)
            ):
                return False
        return True


class ScalerFacts:
    """A gradient scaler's numbers and tensors, as they were."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = weakref.ref(scaler)
        self._facts = _torch.scaler_facts(scaler)
        self._tensors = self._tensors_of(scaler)

    def hold(self) -> bool:
        """Whether all of it is still the same."""
        scaler = self._scaler()
        if scaler is None or _torch.scaler_facts(scaler) != self._facts:
            return False
        return is_same_items(self._tensors_of(scaler), self._tensors)

    @staticmethod
    def _tensors_of(scaler: GradScaler) -> list[torch.Tensor]:
        # It has them already: an earlier call was made with it.
        return list(_torch.scaler_tensors(scaler, torch.device("cpu")).values())


_BY_VALUE = frozenset((bool, int, float, str, bytes, type(None)))
_LIFTED = object()  # in the place of a number that is an input of the graph


def _group_facts(group: dict[str, Any], lifted: set[tuple[Any, ...]]) -> list[Any]:
    """The hyper-parameters of a group: by value, tensors by identity."""
    facts = []
    for key, value in group.items():
        if key == "params":
            continue
        is_list = isinstance(value, (tuple, list))
        items = tuple(
            _item_fact(item, (id(group), key, (place,) if is_list else ()) in lifted)
            for place, item in enumerate(value if is_list else (value,))
        )
        facts.append((key, type(value), items))
    return facts


def _item_fact(item: Any, is_lifted: bool) -> Any:
    if is_lifted and is_liftable(item):
        return _LIFTED
    # What has parts is looked at where the data is: here, whether it is the same.
    return type(item), item if type(item) in _BY_VALUE else id(item)


def _own_facts(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's own attributes: simple ones by value, others by identity."""
    own = own_attributes(optimizer)
    return {key: simple_fact(value) or Same(value) for key, value in own.items()}


def _hook_keys(optimizer: Optimizer) -> list[list[int]]:
    return [list(vars(optimizer)[name]) for name in _torch.OPTIMIZER_HOOK_TABLES]
