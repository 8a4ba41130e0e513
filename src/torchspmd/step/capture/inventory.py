"""What a step works on: every tensor and number in its modules, optimizers, arguments.

An inventory is taken anew at each call, so a parameter or a state that the user replaced
since the last call is simply the one that is used.
"""

import math
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchspmd import _torch
from torchspmd.errors import CaptureError
from torchspmd.step.capture.optimizer_rules import check_optimizer
from torchspmd.step.capture.python_values import Walk, is_users_object, simple_fact
from torchspmd.step.capture.snapshots import stored_role
from torchspmd.step.capture.stored import holders_in, is_holdable


class Role(StrEnum):
    """What a tensor is to the step."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    STATE = "optimizer state"
    HYPER = "hyper-parameter"
    INPUT = "input"


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor that the graph takes in."""

    name: str
    role: Role
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Number:
    """One float or integer that the graph takes in: a hyper-parameter or an argument.

    ``path`` leads into a tuple or list, such as ``betas``.
    """

    name: str
    value: float
    holder: MutableMapping[str, Any] | None = None
    key: str = ""
    path: tuple[int, ...] = ()
    leaf: int = -1  # its place among the arguments, or -1
    is_state: bool = False  # the step may give it a new value
    is_counter: bool = False  # of a group, and its optimizer gives it a new value
    as_tensor: bool = False  # goes in as a tensor: a fused optimizer takes lr so

    def reread(self, leaves: Sequence[Any]) -> "Number":
        """The same with its value of now; ``leaves`` are those of the arguments."""
        if self.leaf >= 0:
            value = leaves[self.leaf]
        else:
            assert self.holder is not None
            value = self.holder[self.key]
            for place in self.path:
                value = value[place]
        return self if value is self.value else replace(self, value=value)

    @property
    def flat(self) -> Any:
        """What goes into the graph."""
        # A double, because that is what the operator makes of a Python number.
        return (
            torch.tensor(self.value, dtype=torch.float64)
            if self.as_tensor
            else self.value
        )


# A number that optimizers of a type count in, under a key of their parameter groups.
Counter: TypeAlias = tuple[type[Optimizer], str]


class CountersError(Exception):
    """An optimizer counts in its parameter groups; its numbers there become inputs.

    Attributes:
        counters: The types of optimizers, and the keys of the numbers.
    """

    def __init__(self, counters: Collection[Counter]) -> None:
        super().__init__("the step is traced again")
        self.counters = counters


class Taken(StrEnum):
    """What most steps do not need of an inventory."""

    REACHED = "tensors, models and optimizers that its code reaches are as arguments"
    VALUES = "choices by buffers of one number are guards"


class TakeMoreError(Exception):
    """The step needs more of its inventory; it is traced again.

    Attributes:
        taken: What it needs.
    """

    def __init__(self, taken: Taken) -> None:
        super().__init__(str(taken))
        self.taken = taken


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module keeps a tensor: a table of the module and a key in it.

    ``is_attribute``: it is a plain attribute, in which a step may store another one.
    """

    table: MutableMapping[str, Any]
    key: str
    slot: int
    is_attribute: bool = False


@dataclass(frozen=True, slots=True)
class StatePlace:
    """Where an optimizer keeps a state tensor: for which parameter, under which key."""

    optimizer: int
    parameter: int
    key: str
    slot: int


@dataclass(slots=True)
class Inventory:
    """Everything that one call of a step works on."""

    leaves: list[Any]
    structure: Any
    names: list[str]
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    optimizers: list[tuple[str, Optimizer]] = field(default_factory=list)
    scalers: list[tuple[str, GradScaler]] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    numbers: list[Number] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    states: list[StatePlace] = field(default_factory=list)
    constants: list[tuple[str, Any]] = field(default_factory=list)  # of optimizers
    groups: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    gradients: dict[int, int] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)
    by_id: dict[int, int] = field(default_factory=dict)
    # Each optimizer's state as it was: a substitution puts another in its place.
    saved_states: list[Any] = field(default_factory=list)
    # The optimizer and the slot of each parameter whose state was made for a capture.
    initial: set[tuple[int, int]] = field(default_factory=set)
    function: Callable[..., Any] | None = None  # the step: its code reaches more
    taken: frozenset[Taken] = frozenset()
    held: set[int] = field(default_factory=set)  # tensors that are in no argument

    def add(self, name: str, role: Role, tensor: torch.Tensor) -> int:
        """The slot of a tensor; one object has one slot, so tied weights stay tied."""
        known = self.by_id.get(id(tensor))
        if known is None:
            if role is not Role.GRADIENT:
                _check_form(name, tensor)
            known = self.by_id[id(tensor)] = len(self.slots)
            self.slots.append(Slot(name, role, tensor))
        return known

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module of every model, by its path."""
        for root, module in self.modules:
            for prefix, child in module.named_modules():
                yield f"{root}.{prefix}" if prefix else root, child

    def flat_inputs(self) -> list[Any]:
        """The graph's inputs, in its order: tensors as they are now, then numbers."""
        tensors: list[Any] = [_torch.plain_tensor(slot.tensor) for slot in self.slots]
        return tensors + [number.flat for number in self.numbers]

    def flat_state(self) -> list[torch.Tensor]:
        """The tensors that feed the first inputs: parameters, buffers, optimizer state."""
        passing = (Role.GRADIENT, Role.INPUT)
        return [
            _torch.plain_tensor(slot.tensor)
            for slot in self.slots
            if slot.role not in passing
        ]


def take_inventory(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    lift_numbers: bool,
    function: Callable[..., Any] | None = None,
    counters: Collection[Counter] = (),
    taken: Collection[Taken] = (),
) -> Inventory:
    """Find every module, optimizer, tensor and number in a call's arguments.

    Args:
        args: The arguments.
        kwargs: Those that are passed by name.
        lift_numbers: Whether numbers become inputs.
        function: The step.
        counters: Numbers that optimizers count in.
        taken: What else the step needs.
    """
    leaves, structure = _torch.flatten_tree((args, kwargs))
    paths = _torch.leaf_paths((args, kwargs))
    inventory = Inventory(leaves, structure, [_argument_name(path) for path in paths])
    inventory.function, inventory.taken = function, frozenset(taken)
    given = [*zip(inventory.names, leaves, strict=True)]
    reached = _reached(inventory) if Taken.REACHED in inventory.taken else Walk({})
    given += reached.models.values()
    for name, leaf in given:
        if isinstance(leaf, nn.Module):
            _add_module(inventory, name, leaf)
    for name, leaf in given:
        if isinstance(leaf, Optimizer):
            _add_optimizer(inventory, name, leaf, lift_numbers, counters)
    for name, leaf in given:
        if isinstance(leaf, GradScaler):
            _add_scaler(inventory, name, leaf)
    _add_gradients(inventory)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            name = inventory.names[place]
            _check_input(name, leaf, inventory)
            inventory.inputs[place] = inventory.add(name, Role.INPUT, leaf)
        elif lift_numbers and is_liftable(leaf):
            name = inventory.names[place]
            inventory.numbers.append(Number(name, leaf, leaf=place))
        else:
            _add_held(inventory, inventory.names[place], leaf)
    _add_attributes(inventory)
    for name, tensor in reached.tensors.items():
        if is_holdable(tensor):
            inventory.held.add(inventory.add(name, Role.BUFFER, tensor))
    return inventory


def _reached(inventory: Inventory) -> Walk:
    """What the step's code reaches without an argument: as buffers, as arguments."""
    walk = Walk({}, finds_models=True)
    objects = [
        (name, leaf)
        for name, leaf in zip(inventory.names, inventory.leaves, strict=True)
        if isinstance(leaf, nn.Module) or is_users_object(leaf)
    ]
    functions = () if inventory.function is None else (inventory.function,)
    for _ in walk.reached_from(*functions, hooks=objects):
        pass
    return walk


def _add_attributes(inventory: Inventory) -> None:
    """Tensors in plain attributes: what an earlier call has stored, of modules also others.

    Those of modules are as buffers are.
    """
    for name, address, holder in holders_in(
        inventory.modules, inventory.leaves, inventory.names, inventory.function
    ):
        table = vars(holder)
        for key, value in table.items():
            if not isinstance(value, torch.Tensor):
                continue
            role = stored_role(value)
            if not role and address.is_module and Taken.REACHED in inventory.taken:
                role = Role.BUFFER.value
            if role in _ROLES_OF_STORED and is_holdable(value):
                slot = inventory.add(f"{name}.{key}", Role(role), value)
                inventory.places.append(Place(table, key, slot, is_attribute=True))
                if not stored_role(value):
                    inventory.held.add(slot)


_ROLES_OF_STORED = frozenset((Role.INPUT.value, Role.BUFFER.value))


def _add_held(inventory: Inventory, name: str, argument: Any) -> None:
    """Tensors that an argument holds which is an object: a dataclass, a batch of a library.

    One that requires gradients is left out, so that it is refused where the step uses it.
    """
    if isinstance(argument, (nn.Module, Optimizer, GradScaler)):
        return
    if simple_fact(argument) is not None:
        return
    walk = Walk({})
    for _ in walk.whole(name, argument):
        pass
    for path, tensor in walk.tensors.items():
        if not tensor.requires_grad:
            inventory.add(path, Role.INPUT, tensor)


def _check_form(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_nested or tensor.layout is not torch.strided:
        form = "nested" if tensor.is_nested else str(tensor.layout).partition(".")[2]
        raise CaptureError(
            f"compile: {name} is a {form} tensor, whose sizes depend on its values; a "
            "graph needs strided ones. Pass its values and its indices or offsets as "
            "tensors of fixed size (padded where they vary), and compute with index_add, "
            "gather or a mask."
        )


def _check_input(name: str, tensor: torch.Tensor, inventory: Inventory) -> None:
    if tensor.requires_grad and id(tensor) not in inventory.by_id:
        raise CaptureError(
            f"compile: argument {name} requires gradients, but its grad would stay "
            "inside the graph. Pass it detached, or make it a parameter of a module."
        )


def _argument_name(path: tuple[Any, ...]) -> str:
    kind, *rest = path
    if kind == 1:
        return ".".join(map(str, rest))
    return "args" + "".join(f"[{step!r}]" for step in rest)


def _add_module(inventory: Inventory, argument: str, module: nn.Module) -> None:
    if any(module is known for _, known in inventory.modules):
        return
    _check_module(argument, module)
    root = type(module).__name__
    if any(root == name for name, _ in inventory.modules):
        root = f"{root}@{argument}"
    inventory.modules.append((root, module))
    for prefix, child in module.named_modules():
        path = f"{root}.{prefix}" if prefix else root
        for table, role in (
            (own_table(child._parameters), Role.PARAMETER),
            (own_table(child._buffers), Role.BUFFER),
        ):
            for key, tensor in table.items():
                if tensor is not None:
                    slot = inventory.add(f"{path}.{key}", role, tensor)
                    inventory.places.append(Place(table, key, slot))


def own_table(table: Any) -> Any:
    """A module's own table, below what stands there while an update is pending."""
    while getattr(type(table), "belongs_to_compiled_step", False):
        table = table.own
    return table


def _check_module(argument: str, module: nn.Module) -> None:
    # Not at the top: importing it registers operators.
    from torch.distributed.fsdp import FSDPModule

    if isinstance(module, (DistributedDataParallel, FSDPModule)):
        raise CaptureError(
            f"compile: argument {argument} is wrapped by {type(module).__name__}, which "
            "reduces gradients by itself, outside of the graph. Pass the plain module: "
            "compile reduces them, see parallel_mode."
        )
    full = [name for each in module.parameters() if (name := full_name(each))]
    if full:
        raise CaptureError(
            f"compile: {full[0]} of argument {argument} is gathered for a while, by "
            "full_parameters(). Call the step after the block."
        )
    for path, child in module.named_modules():
        if _torch.is_compiled_module(child):
            raise CaptureError(
                f"compile: {path or 'the module itself'} of argument {argument} is made by "
                "torch.compile, whose code has operators of its own and cannot be "
                "captured. Pass the module that it was made from (its _orig_mod; instead "
                "of module.compile(), leave it as it is): backend='inductor' compiles the "
                "whole step."
            )
        if isinstance(child, torch.jit.ScriptModule):
            raise CaptureError(
                f"compile: {path or 'the module itself'} of argument {argument} is made by "
                "torch.jit, whose code runs outside of Python and cannot be captured. Pass "
                "the Python module that it was made from; compile makes a graph of that."
            )


_FULL = "_torchspmd_full"


def mark_full(parameter: torch.Tensor, name: str) -> None:
    """Note that a parameter is a gathered copy, which is thrown away soon."""
    vars(parameter).setdefault(_FULL, name)


def full_name(parameter: torch.Tensor) -> str:
    """The name of a gathered copy; empty for other parameters."""
    return str(vars(parameter).get(_FULL, ""))


def _add_optimizer(
    inventory: Inventory,
    argument: str,
    optimizer: Optimizer,
    lift_numbers: bool,
    counters: Collection[Counter],
) -> None:
    if any(optimizer is known for _, known in inventory.optimizers):
        return
    check_optimizer(argument, optimizer)
    index = len(inventory.optimizers)
    name = (
        f"{type(optimizer).__name__}@{argument}" if index else type(optimizer).__name__
    )
    inventory.optimizers.append((name, optimizer))
    inventory.saved_states.append(optimizer.state)
    for number, group in enumerate(optimizer.param_groups):
        slots = tuple(
            inventory.add(
                f"{name}.group{number}.params[{place}]", Role.PARAMETER, tensor
            )
            for place, tensor in enumerate(group["params"])
        )
        inventory.groups.append((index, number, slots))
        keys = {key for kind, key in counters if kind is type(optimizer)}
        label = f"{name}.group{number}"
        _add_hyper_parameters(inventory, label, group, lift_numbers, keys)
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, torch.Tensor) and id(parameter) in inventory.by_id:
            slot = inventory.by_id[id(parameter)]
            _add_states(inventory, index, slot, state)
        elif state:
            raise CaptureError(
                f"{name} keeps state under {type(parameter).__name__} that is not one of "
                "its parameters: compile cannot follow it. Keep state for each "
                "parameter, as torch.optim's own optimizers do."
            )


def _add_scaler(inventory: Inventory, argument: str, scaler: GradScaler) -> None:
    if any(scaler is known for _, known in inventory.scalers):
        return
    inventory.scalers.append((argument, scaler))
    devices = [slot.tensor.device for slot in inventory.slots]
    device = devices[0] if devices else torch.device("cpu")
    for key, tensor in _torch.scaler_tensors(scaler, device).items():
        slot = inventory.add(f"{argument}.{key.lstrip('_')}", Role.STATE, tensor)
        inventory.places.append(Place(vars(scaler), key, slot))


def _add_hyper_parameters(
    inventory: Inventory,
    name: str,
    group: dict[str, Any],
    lift_numbers: bool,
    counters: Collection[str],
) -> None:
    for key, value in group.items():
        if key == "params":
            continue
        if key in counters and type(value) in (int, float):
            label = f"{name}.{key}"
            inventory.numbers.append(Number(label, value, group, key, is_counter=True))
            continue
        for path, item in _items(value):
            label = f"{name}.{key}" + "".join(f"[{step}]" for step in path)
            if isinstance(item, torch.Tensor):
                if path:
                    raise CaptureError(
                        f"compile: {label} is a tensor inside a {type(value).__name__}. "
                        "Pass a number, or a tensor as the whole hyper-parameter."
                    )
                inventory.places.append(
                    Place(group, key, inventory.add(label, Role.HYPER, item))
                )
            elif key == "lr" and group.get("fused") and type(item) is float:
                inventory.numbers.append(
                    Number(label, item, group, key, as_tensor=True)
                )
            elif lift_numbers and is_liftable(item):
                inventory.numbers.append(Number(label, item, group, key, path))


def _add_states(
    inventory: Inventory, optimizer: int, parameter: int, state: dict[str, Any]
) -> None:
    owner = inventory.slots[parameter].name
    for key, value in state.items():
        name = f"{owner}.{key}"
        if isinstance(value, torch.Tensor):
            slot = inventory.add(name, Role.STATE, value)
            inventory.states.append(StatePlace(optimizer, parameter, key, slot))
        elif type(value) in (int, float):
            # A counter that is a Python number changes at each step.
            inventory.numbers.append(Number(name, value, state, key, is_state=True))
        else:
            inventory.constants.append((name, constant_state(name, value)))


def constant_state(name: str, value: Any) -> Any:
    """What is guarded about a state that is no tensor and no number; or refuse it."""
    items = value if type(value) is tuple else (value,)
    facts = tuple(map(simple_fact, items))
    is_numpy = any(type(each).__module__ == "numpy" for each in items)
    if is_numpy or any(fact is None for fact in facts):
        raise CaptureError(
            f"compile: an optimizer keeps {name} as {_described(value)}, which a captured "
            "step would make once and lose. Keep every tensor under a key of its own, as "
            "state[p]['left'] and state[p]['right'], and counters as tensors, ints or "
            "floats; flags, strings and tuples of them may stay."
        )
    return facts if type(value) is tuple else facts[0]


def _described(value: Any) -> str:
    kind = type(value).__name__
    if not isinstance(value, (list, tuple, dict, set)):
        return f"a {kind}"
    parts = value.values() if isinstance(value, dict) else value
    kinds = dict.fromkeys(type(part).__name__ for part in parts)
    return f"a {kind} of {', '.join(kinds)}" if kinds else f"an empty {kind}"


def _add_gradients(inventory: Inventory) -> None:
    parameters = [
        (place, slot)
        for place, slot in enumerate(inventory.slots)
        if slot.role is Role.PARAMETER and slot.tensor.grad is not None
    ]
    for place, slot in parameters:
        assert slot.tensor.grad is not None
        name = f"{slot.name}.grad"
        if slot.tensor.grad.shape != slot.tensor.shape:
            raise CaptureError(
                f"compile: {name} is of shape {list(slot.tensor.grad.shape)}, and its "
                f"parameter of {list(slot.tensor.shape)}: the parameter was resized since "
                "(resize_token_embeddings does that). Call zero_grad() before the step."
            )
        inventory.gradients[place] = inventory.add(
            name, Role.GRADIENT, slot.tensor.grad
        )


def _items(value: Any) -> Iterator[tuple[tuple[int, ...], Any]]:
    """A value, or the items of a flat tuple or list, with where they are."""
    if isinstance(value, (tuple, list)):
        for place, item in enumerate(value):
            yield (place,), item
    else:
        yield (), value


def is_liftable(value: Any) -> bool:
    """Whether a number can be an input of the graph."""
    # Infinity and NaN have no symbol; they stay constants.
    return type(value) is float and math.isfinite(value)
