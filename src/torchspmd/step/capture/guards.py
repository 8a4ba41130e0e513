"""The signature of a call: all that a program took for granted, as one comparable value."""

from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from torchspmd import _torch
from torchspmd.errors import CaptureError
from torchspmd.step.capture.inventory import Inventory, Role, TakeMoreError, Taken
from torchspmd.step.capture.python_values import (
    BOOKS_OF_MODULES,
    MAX_DEPTH,
    MAX_LEAVES,
    NamedFact,
    Same,
    Walk,
    simple_fact,
)
from torchspmd.step.capture.user_code import (
    attribute_of,
    is_users_function,
    users_functions_in,
)

# Each guarded fact by its name. Two calls may share a program when all facts are equal.
Signature: TypeAlias = tuple[tuple[str, Any], ...]
_MOST_LINES = 8  # of a report; the others are counted


def sign(inventory: Inventory) -> Signature:
    """Everything about a call that a program depends on, except tensor values."""
    return (
        *ambient_facts(),
        ("structure of the arguments", inventory.structure),
        *_tensor_facts(inventory),
        *_wiring_facts(inventory),
        *_data_facts(inventory, _begin_walk(inventory)),
        *_parameter_facts(inventory),
        *_optimizer_facts(inventory),
        *inventory.constants,
    )


def walk_data(inventory: Inventory) -> Walk:
    """A walk through all data that is guarded, with what each container holds."""
    walk = _begin_walk(inventory)
    for _ in _data_facts(inventory, walk):
        pass
    return walk


def walk_arguments(inventory: Inventory) -> Walk:
    """A walk through the objects among the arguments."""
    walk = _begin_walk(inventory)
    for _ in _constant_facts(inventory, walk):
        pass
    return walk


def _begin_walk(inventory: Inventory) -> Walk:
    known = {id(optimizer): name for name, optimizer in inventory.optimizers}
    known |= {id(scaler): name for name, scaler in inventory.scalers}
    return Walk(known | {id(child): path for path, child in inventory.named_modules()})


def check_reached(inventory: Inventory) -> tuple[str, ...]:
    """Refuse what a step can reach and a graph cannot follow; note what is not guarded."""
    walk = walk_data(inventory)
    names = list(walk.scalers.values())
    if names and Taken.REACHED not in inventory.taken:
        raise TakeMoreError(Taken.REACHED)
    if names:
        raise CaptureError(
            f"compile: {', '.join(names)}: a GradScaler that is in no argument. Its scale "
            "would be that of the capture for ever. Pass it to the step as an argument."
        )
    if names := list(walk.iterators.values()):
        raise CaptureError(
            f"compile: {', '.join(names)}: an iterator that the step can reach. A captured "
            "step would take from it once, while it is captured, and use that value for "
            "ever. Call next() outside of the step, and pass what it gives."
        )
    if not (names := walk.beyond):
        return ()
    rest = len(names) - _MOST_LINES
    more = f" and {rest} more" if rest > 0 else ""
    return (
        f"not guarded, beyond {MAX_LEAVES} values or {MAX_DEPTH} levels: "
        f"{', '.join(names[:_MOST_LINES])}{more}; if one changes, call close() and compile "
        "again",
    )


def _data_facts(inventory: Inventory, walk: Walk) -> Iterator[tuple[str, Any]]:
    """Arguments that are no tensors, modules, and all that the step's code can reach."""
    yield from _constant_facts(inventory, walk)
    yield from _module_facts(inventory, walk)
    for name, optimizer in inventory.optimizers:
        walk.add_class(type(optimizer))
        walk.add_method(type(optimizer), "step")
        for key, value in own_attributes(optimizer).items():
            yield from walk.whole(f"{name}.{key}", value)
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params" and _has_parts(value):
                    yield from walk.whole(f"{name}.group{number}.{key}", value)
    step = inventory.function
    functions = () if step is None else (step,)
    yield from walk.reached_from(*functions, hooks=_named_hooks(inventory))


def _has_parts(value: Any) -> bool:
    """Whether a hyper-parameter is no number, text or tensor, nor a list of them."""
    items = value if isinstance(value, (tuple, list)) else (value,)
    traced = torch.Tensor, *_torch.numbers.SYMBOLIC  # numbers, while a step is traced
    return any(
        isinstance(item, FunctionType)
        or not (isinstance(item, traced) or simple_fact(item) is not None)
        for item in items
    )


def _named_hooks(inventory: Inventory) -> Iterator[tuple[str, Any]]:
    """The user's hooks that run in a step, by name; which there are is guarded apart."""
    holders: list[tuple[str, Any, tuple[str, ...]]] = [
        *((path, each, _torch.HOOK_TABLES) for path, each in inventory.named_modules()),
        *((n, each, _torch.OPTIMIZER_HOOK_TABLES) for n, each in inventory.optimizers),
        *(
            (slot.name, slot.tensor, _torch.GRADIENT_HOOK_TABLES)
            for slot in inventory.slots
            if slot.role is Role.PARAMETER
        ),
    ]
    for path, holder, tables in holders:
        for _, _, hook in _torch.hooks_of(holder, tables):
            if not is_of_step(hook):
                yield from _as_written(f"hook {name_of_hook(hook)} of {path}", hook)
    for hook in _torch.global_hooks().values():
        yield from _as_written(f"hook {name_of_hook(hook)}", hook)


def _as_written(path: str, hook: Any) -> Iterator[tuple[str, Any]]:
    """A hook, or the user's functions in it: a function of a library is not held."""
    if isinstance(hook, FunctionType):
        yield from ((path, function) for function in users_functions_in(hook))
    else:
        yield path, hook


def explain_difference(old: Signature, new: Signature) -> list[str]:
    """One line for each fact that differs, ``name: before -> after``.

    >>> explain_difference((("x", 1), ("y", 2)), (("x", 1), ("y", 3)))
    ['y: 2 -> 3']
    """
    before, after = dict(old), dict(new)
    changed = [
        name
        for name in {**before, **after}
        if before.get(name, "absent") != after.get(name, "absent")
    ]
    created = [
        name
        for name in changed
        if name not in before and _role(after[name]) == Role.STATE
    ]
    lines = []
    if created:
        lines.append(f"{len(created)} optimizer states that did not exist before")
    facts = [name for name in changed if name not in created]
    # How tensors hang together follows from which there are: said when nothing else is.
    telling = [name for name in facts if name not in WIRING] or facts
    if not (created and all(name in WIRING for name in telling)):
        lines += [
            f"{name}: {before.get(name, 'absent')} -> {after.get(name, 'absent')}"
            for name in telling
        ]
    lines = lines or ["the order of attributes or of keys"]
    rest = len(lines) - _MOST_LINES
    return lines if rest <= 0 else [*lines[:_MOST_LINES], f"and {rest} more"]


def _role(fact: Any) -> str:
    return fact.role if isinstance(fact, TensorFact) else ""


def ambient_facts() -> Iterator[tuple[str, Any]]:
    """What a program depends on that is in no argument."""
    yield "gradients enabled", torch.is_grad_enabled()
    yield "default dtype", torch.get_default_dtype()
    yield "autocast", _torch.autocast_state()
    yield "hooks of all modules and optimizers", tuple(_torch.global_hooks())
    yield "modes of torch functions", _torch.function_modes()
    yield "kernels of attention", _torch.attention_kernels()
    yield "hooks on saved tensors", _torch.saved_tensor_hooks()
    looks_for_nan = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    yield "anomaly detection", looks_for_nan


class TensorFact(NamedTuple):
    """What is guarded about a tensor; prints readably."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    stride: Any
    device: torch.device
    requires_grad: bool
    role: str
    layout: Any

    def __str__(self) -> str:
        text = f"{self.role} {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        stride = self.stride
        text += f" strides {list(stride) if isinstance(stride, tuple) else stride}"
        text += f" on {self.device}"
        text += "" if self.requires_grad else " without gradient"
        return text + (f" {self.layout}" if self.layout else "")


def _tensor_facts(inventory: Inventory) -> Iterator[tuple[str, Any]]:
    for slot in inventory.slots:
        tensor = slot.tensor
        fact = TensorFact(
            tuple(tensor.shape),
            tensor.dtype,
            tensor.stride(),
            tensor.device,
            tensor.requires_grad,
            slot.role.value,
            _torch.layout_of(tensor),
        )
        yield slot.name, fact


WIRING = (
    "tensors of modules",
    "optimizer state",
    "parameter groups",
    "gradients before the step",
    "tensor arguments",
    "numbers",
)


def _wiring_facts(inventory: Inventory) -> Iterator[tuple[str, Any]]:
    yield "tensors of modules", tuple((p.key, p.slot) for p in inventory.places)
    yield (
        "optimizer state",
        tuple((s.optimizer, s.parameter, s.key, s.slot) for s in inventory.states),
    )
    yield "parameter groups", tuple(inventory.groups)
    yield "gradients before the step", tuple(sorted(inventory.gradients.items()))
    yield "tensor arguments", tuple(inventory.inputs.items())
    yield "numbers", tuple(number.name for number in inventory.numbers)


def _constant_facts(inventory: Inventory, walk: Walk) -> Iterator[tuple[str, Any]]:
    lifted = {number.leaf for number in inventory.numbers}
    known = [id(module) for _, module in inventory.modules]
    known += [id(optimizer) for _, optimizer in inventory.optimizers]
    scalers = {id(scaler): scaler for _, scaler in inventory.scalers}
    for place, leaf in enumerate(inventory.leaves):
        name = inventory.names[place]
        if place in inventory.inputs or place in lifted:
            continue
        if id(leaf) in known:
            yield name, type(leaf).__name__
            continue
        if id(leaf) in scalers:
            yield name, _torch.scaler_facts(leaf)
            continue
        if (fact := simple_fact(leaf)) is not None:
            walk.add_function(name, leaf)
            yield name, (type(leaf).__name__, fact)
            continue
        facts = list(walk.whole(name, leaf))
        _check_guarded(name, leaf, facts, walk)
        yield from facts


def _check_guarded(name: str, leaf: Any, facts: list[NamedFact], walk: Walk) -> None:
    """Refuse an argument that can change where no guard sees it."""
    is_seen = not any(each.startswith(name) for each in walk.beyond)
    is_seen = is_seen and not isinstance(facts[0][1][1], Same)
    if type(leaf).__hash__ is None and not is_seen:
        raise CaptureError(
            f"compile: argument {name} is a {type(leaf).__name__}, which can change "
            "without a sign, so a graph made with it could be stale. Pass tensors, "
            "numbers, strings, modules, optimizers, plain objects, or lists, tuples and "
            f"dicts of them, of at most {MAX_LEAVES} values in {MAX_DEPTH} levels."
        )


def _module_facts(inventory: Inventory, walk: Walk) -> Iterator[tuple[str, Any]]:
    """Train or eval, and all plain data among the attributes, of every module."""
    for path, child in inventory.named_modules():
        yield from _attribute_facts(path, child, walk)
        if hooks := _hooks(child, _torch.HOOK_TABLES):
            yield f"hooks of {path}", hooks


def _attribute_facts(
    path: str, module: nn.Module, walk: Walk
) -> Iterator[tuple[str, Any]]:
    walk.add_class(type(module))
    walk.add_method(type(module), "forward")
    simple: list[Any] = [type(module)]
    for key, value in sorted(_without_wrappers(module).items()):
        if (fact := simple_fact(value)) is not None:
            walk.add_function(f"{path}.{key}", value)
            simple.append((key, fact))
        elif key not in BOOKS_OF_MODULES:
            yield from walk.whole(f"{path}.{key}", value)
    yield path, tuple(simple)


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer of the user's own keeps beside its groups and states."""
    return {
        key: value
        for key, value in sorted(_without_wrappers(optimizer).items())
        if key not in _torch.OPTIMIZER_TABLES and not _is_method_of_torch(value)
    }


def _is_method_of_torch(value: Any) -> bool:
    """Whether it is a method that torch has put there, as a scheduler does."""
    function = value.__func__ if isinstance(value, MethodType) else value
    return isinstance(function, FunctionType) and not is_users_function(function)


def _without_wrappers(owner: nn.Module | Optimizer) -> dict[str, Any]:
    """An object's attributes, without what stands there while an update is pending."""
    own = {key: _look_through(value) for key, value in vars(owner).items()}
    return {key: value for key, value in own.items() if value is not _NOTHING}


_NOTHING = object()


def _look_through(value: Any) -> Any:
    """What the user put in the place of a method that we wrap now."""
    while is_of_step(value):
        value = _NOTHING if value.own is None else value.own
    return value


def is_of_step(value: Any) -> bool:
    """Whether a compiled step put a hook, or what is in the place of a method, there."""
    return bool(getattr(type(value), "belongs_to_compiled_step", False))


class HookFact(tuple[Any, ...]):
    """Hooks in their order: table, key, identity and name of each; prints the names."""

    __slots__ = ()

    def __str__(self) -> str:
        return ", ".join(name for *_, name in self)


def name_of_hook(hook: Any) -> str:
    """What a hook is called in texts."""
    return str(attribute_of(hook, "__qualname__", type(hook).__name__))


def _hooks(holder: Any, tables: tuple[str, ...]) -> HookFact:
    # What a hook holds is not held here. A copy of a module has the same keys, so that
    # only the identity tells a copied hook from its original.
    return HookFact(
        (table, key, id(hook), name_of_hook(hook))
        for table, key, hook in _torch.hooks_of(holder, tables)
        if not is_of_step(hook)
    )


def _parameter_facts(inventory: Inventory) -> Iterator[tuple[str, Any]]:
    """Hooks on gradients, and what was set on parameters."""
    for slot in inventory.slots:
        if slot.role is Role.PARAMETER:
            if hooks := _hooks(slot.tensor, _torch.GRADIENT_HOOK_TABLES):
                yield f"gradient hooks of {slot.name}", hooks
            for key, value in vars(slot.tensor).items():
                if (fact := simple_fact(value)) is not None:
                    yield f"{slot.name}.{key}", fact


def _optimizer_facts(inventory: Inventory) -> Iterator[tuple[str, Any]]:
    """Hyper-parameters that are no inputs of the graph: flags, integers, strings."""
    lifted = {(number.name) for number in inventory.numbers}
    for index, (name, optimizer) in enumerate(inventory.optimizers):
        yield f"optimizer {index}", type(optimizer)
        if hooks := _hooks(optimizer, _torch.OPTIMIZER_HOOK_TABLES):
            yield f"hooks of {name}", hooks
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    label = f"{name}.group{number}.{key}"
                    yield label, _without_lifted(label, value, lifted)


def _without_lifted(label: str, value: Any, lifted: set[str]) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(
            _without_lifted(f"{label}[{place}]", item, lifted)
            for place, item in enumerate(value)
        )
    if isinstance(value, torch.Tensor):
        return "tensor"
    if label in lifted:
        return "an input of the graph"
    return type(value) if simple_fact(value) is None else value
