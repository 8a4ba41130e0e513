"""Guards: all that a program took for granted, as one comparable value."""

import argparse
import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from operator import is_
from types import (
    BuiltinFunctionType,
    FunctionType,
    MappingProxyType,
    MethodType,
    SimpleNamespace,
)
from typing import Any, TypeAlias, final

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from torchspmd import _torch
from torchspmd.errors import CaptureError
from torchspmd.step.capture.inventory import Inventory, Number, Role, is_liftable
from torchspmd.step.flush_hooks import WrappedMethod
from torchspmd.step.progress import note

# ----------------------------------------------------------------------------
# What is guarded about one value: a type and what was found, which can be compared.

_SHOWN = 80  # characters of a value in texts
_BY_VALUE = (
    *(bool, int, str, bytes, complex, type(None), type(...), range, Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(FunctionType, BuiltinFunctionType),  # by identity: an activation, for instance
)


class Fact(tuple[Any, ...]):
    """A type and what was found in a value of it; prints like the value."""

    __slots__ = ()

    def __repr__(self) -> str:
        kind, found = self
        if isinstance(found, Parts):
            inside = ", ".join(f"{key}={fact!r}" for key, fact in found)
            text = f"{kind.__name__}({inside})"
        else:
            text = found if kind is float else repr(found)
        return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."

    __str__ = __repr__


class Parts(tuple[Any, ...]):
    """The facts in a container or an object, each with its key."""

    __slots__ = ()


def simple_fact(value: Any) -> Fact | None:
    """What is guarded about a single value; None for anything with parts.

    >>> simple_fact(1) == simple_fact(1.0), simple_fact(0.0) == simple_fact(-0.0)
    (False, False)
    """
    if isinstance(value, float):
        return Fact((type(value), float.__repr__(value)))
    return Fact((type(value), value)) if isinstance(value, _BY_VALUE) else None


def differing(name: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    """The innermost places at which two facts differ."""
    both = isinstance(before, Fact) and isinstance(after, Fact)
    if both and before[0] is after[0]:
        old, new = before[1], after[1]
        if isinstance(old, Parts) and isinstance(new, Parts):
            if [key for key, _ in old] == [key for key, _ in new]:
                for (key, was), (_, now) in zip(old, new, strict=True):
                    if was != now:
                        yield from differing(f"{name}{key}", was, now)
                return
    yield name, before, after


class Same:
    """An object by identity, not kept alive where that is possible."""

    __slots__ = ("_get", "_id")

    def __init__(self, value: Any) -> None:
        self._id = id(value)
        try:
            self._get: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._get = lambda: value

    def __eq__(self, other: object) -> bool:
        mine = self._get()
        return isinstance(other, Same) and mine is not None and mine is other._get()

    def __hash__(self) -> int:
        return self._id

    def __repr__(self) -> str:
        return f"{type(self._get()).__name__} at {self._id:#x}"


def has_value(value: Any) -> bool:
    """Whether an object says itself what it is equal to."""
    by_identity: Any = object.__hash__
    if type(value).__hash__ in (None, by_identity):
        return False
    try:
        hash(value)
    except TypeError:
        return False
    return True


# ----------------------------------------------------------------------------
# Objects that drive a model, such as a trainer: they hold it, and say nothing about it.

_MOST_LOOKS = 1000


def drives(value: Any) -> bool:
    """Whether an object holds modules or optimizers, itself or through what it holds.

    Its counters change with every step; guarded by value, each step would be another
    program.

    >>> class Trainer:
    ...     def __init__(self, model):
    ...         self.loop = {"model": model}
    >>> drives(Trainer(nn.Linear(1, 1))), drives([1, 2])
    (True, False)
    """
    waiting, seen = [value], {id(value)}
    while waiting and len(seen) < _MOST_LOOKS:
        for part in _parts(waiting.pop()):
            if isinstance(part, (nn.Module, Optimizer)):
                return True
            if id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)
    return False


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    elif not isinstance(value, type):
        yield from getattr(value, "__dict__", {}).values()


# ----------------------------------------------------------------------------
# Modules and optimizers as an earlier call found them, compared by identity.


class ModuleFacts:
    """A module's class, tables and attributes, as they were."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._type = type(module)
        values = vars(module)
        self._keys, self._values = list(values), list(values.values())
        containers = (module._modules, module._parameters, module._buffers)
        self._tables = [(t, list(t), list(t.values())) for t in containers if t]
        hooks = {name: values[name] for name in _torch.HOOK_TABLES}
        # By key: what a hook holds is not held here, and no key is given twice.
        self._hooks = [(name, list(table)) for name, table in hooks.items() if table]
        self._empty = [t for t in (*containers, *hooks.values()) if not t]

    def hold(self) -> bool:
        """Whether all of it is still the same."""
        module = self._module()
        if module is None or type(module) is not self._type:
            return False
        values = vars(module)
        if len(values) != len(self._keys):
            return False
        if not all(map(is_, values.values(), self._values)):
            return False
        return (
            list(values) == self._keys
            and not any(self._empty)
            and all(is_same_table(*table) for table in self._tables)
            and all(list(values[name]) == keys for name, keys in self._hooks)
        )


class OptimizerFacts:
    """An optimizer's groups and states, as they were; numbers of the graph may change."""

    def __init__(self, optimizer: Optimizer, numbers: list[Number]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._type = type(optimizer)
        self._hooks = _hook_keys(optimizer)
        self._groups = optimizer.param_groups
        self._params = [(g, g["params"], list(g["params"])) for g in self._groups]
        lifted = {(id(n.holder), n.key, n.path) for n in numbers}
        self._facts = [
            (group, [_Hyper(group, key, lifted) for key in group if key != "params"])
            for group in self._groups
        ]
        self._state = optimizer.state
        self._entries = [
            (p, e, list(e), list(e.values())) for p, e in self._state.items()
        ]

    def hold(self) -> bool:
        """Whether all of it is still the same."""
        optimizer = self._optimizer()
        if optimizer is None or type(optimizer) is not self._type:
            return False
        if _hook_keys(optimizer) != self._hooks:
            return False
        groups = optimizer.param_groups
        if groups is not self._groups or len(groups) != len(self._params):
            return False
        for group, (old, params, items) in zip(groups, self._params, strict=True):
            if group is not old or group["params"] is not params:
                return False
            if not is_same_items(params, items):
                return False
        if not all(
            len(group) == len(facts) + 1 and all(fact.holds() for fact in facts)
            for group, facts in self._facts
        ):
            return False
        return self._has_same_state(optimizer.state)

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


class _Hyper:
    """One entry of a parameter group; items that are inputs of the graph may change."""

    def __init__(
        self, group: dict[str, Any], key: str, lifted: set[tuple[Any, ...]]
    ) -> None:
        self._group, self._key = group, key
        value = group[key]
        items = list(value) if isinstance(value, (tuple, list)) else [value]
        is_flat = not isinstance(value, (tuple, list))
        self._type = type(value)
        self._items = [
            (item, (id(group), key, () if is_flat else (place,)) in lifted)
            for place, item in enumerate(items)
        ]

    def holds(self) -> bool:
        """Whether it is the same, as far as no input of the graph."""
        if self._key not in self._group:
            return False
        value = self._group[self._key]
        if type(value) is not self._type:
            return False
        items = value if isinstance(value, (tuple, list)) else (value,)
        if len(items) != len(self._items):
            return False
        for item, (before, is_lifted) in zip(items, self._items, strict=True):
            if item is before:
                continue
            if type(item) is not type(before) or isinstance(item, torch.Tensor):
                return False
            if not (is_liftable(item) if is_lifted else item == before):
                return False
        return True


def _hook_keys(optimizer: Optimizer) -> list[list[int]]:
    return [list(vars(optimizer)[name]) for name in _torch.OPTIMIZER_HOOK_TABLES]


def is_same_table(table: Mapping[Any, Any], keys: list[Any], values: list[Any]) -> bool:
    """Whether a table holds the same objects under the same keys."""
    return (
        len(table) == len(values)
        and all(map(is_, table.values(), values))
        and all(map(is_, table, keys))
    )


def is_same_vars(
    holder: Any, keys: list[str], values: list[Any], *, kind: type
) -> bool:
    """Whether an object's class and attributes are the same objects."""
    return type(holder) is kind and is_same_table(vars(holder), keys, values)


def is_same_items(now: Collection[Any], before: list[Any]) -> bool:
    """Whether a list, or what can be counted and iterated, holds the same objects."""
    return len(now) == len(before) and all(map(is_, now, before))


def is_same_bytes(array: Any, before: bytes) -> bool:
    """Whether a NumPy array has the same values."""
    return bool(array.tobytes() == before)


# ----------------------------------------------------------------------------
# Plain data that a graph took for granted, as values that can be compared.
#
# Numbers, strings and the like go by value, containers and objects with attributes by what
# is in them, functions and all else by identity. Tensors are no data: they are inputs of a
# graph, or refused by it. Only so much is looked at; what is beyond is listed.

MAX_LEAVES = 512  # of each module, argument and class
MAX_DEPTH = 6
_MAX_ARRAY_BYTES = 4096
# Their objects keep books (caches, counters) that say nothing about a step.
_CLOSED = frozenset({"torch", "torchspmd", "numpy", *sys.stdlib_module_names})
_OPEN = (SimpleNamespace, argparse.Namespace)
# Tables of tensors and hooks, which are guarded elsewhere or say nothing about a step.
BOOKS_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}


@final
class Walk:
    """Takes values apart, and keeps what could change without a sign.

    Args:
        known: Modules and optimizers that are guarded by themselves, by identity.

    Attributes:
        holding: For each container and object: whether it holds what it held.
        classes: User classes of what was found; their attributes can change too.
        beyond: What was not looked at.
    """

    def __init__(self, known: Mapping[int, str]) -> None:
        self._known = known
        self._facts: dict[tuple[int, int], Fact] = {}
        self._open: dict[int, int] = {}  # what is being looked at, for cycles
        self._left = MAX_LEAVES
        self.holding: dict[Any, Callable[[], bool]] = {}
        self.classes: dict[type, None] = {}
        self.beyond: list[str] = []

    def begin(self) -> None:
        """Begin with another module, argument or class."""
        self._left = MAX_LEAVES

    def fact(self, name: str, value: Any, depth: int = 0) -> Fact:
        """What is guarded about a value."""
        if isinstance(value, type):
            self.add_class(value)
            return Fact((type, value))
        if (simple := simple_fact(value)) is not None:
            self._left -= 1
            return simple
        if id(value) in self._known:
            return Fact((type(value), self._known[id(value)]))
        if isinstance(value, torch.Tensor):
            return Fact((type(value), "a tensor"))
        if id(value) in self._open:
            return Fact((type(value), self._open[id(value)]))
        key = id(value), depth  # one object in many modules, a configuration
        if key not in self._facts:
            self._open[id(value)] = depth
            self._facts[key] = self._take_apart(name, value, depth)
            del self._open[id(value)]
        return self._facts[key]

    def sees(self, name: str, value: Any) -> bool:
        """Whether all of a value that was taken apart is guarded."""
        if any(each.startswith(name) for each in self.beyond):
            return False
        return not isinstance(self.fact(name, value)[1], Same)

    def add_class(self, kind: type) -> None:
        """Note a class and its bases, as far as they are the user's."""
        for each in kind.__mro__:
            if not _is_closed(each):
                self.classes[each] = None

    def class_facts(self) -> Iterator[tuple[str, Fact]]:
        """What is guarded about each class that was noted."""
        done: set[type] = set()
        while todo := [kind for kind in self.classes if kind not in done]:
            for kind in todo:
                done.add(kind)
                self.begin()
                name = f"class {kind.__qualname__}"
                self._hold(kind, is_same_vars, *_table(vars(kind)), kind=type(kind))
                yield name, self._inside(name, kind, _class_entries(kind), 0)

    def _take_apart(self, name: str, value: Any, depth: int) -> Fact:
        parts: Iterable[tuple[str, Any]]
        if isinstance(value, (list, tuple, deque)):
            parts = ((f"[{place}]", item) for place, item in enumerate(value))
            if not isinstance(value, tuple):
                self._hold(value, is_same_items, list(value))
        elif isinstance(value, (dict, MappingProxyType)):
            parts = ((f"[{_key(key)}]", item) for key, item in value.items())
            self._hold(value, is_same_table, *_table(value))
        elif isinstance(value, (set, frozenset)):
            self._hold(value, is_same_items, list(value))
            return self._set(name, value, depth)
        elif isinstance(value, functools.partial):
            names = (".func", ".args", ".keywords")
            whole = (value.func, value.args, value.keywords)
            parts = zip(names, whole, strict=True)
        elif isinstance(value, MethodType):
            parts = ((".__func__", value.__func__), (".__self__", value.__self__))
        else:
            return self._object(name, value, depth)
        if not _is_closed(type(value)):  # a user's list or dict may have attributes
            parts = (*parts, *self._attributes(value))
        return self._inside(name, type(value), parts, depth)

    def _object(self, name: str, value: Any, depth: int) -> Fact:
        kind = type(value)
        if any(each.__module__ == "numpy" for each in kind.__mro__):
            return self._array(name, value)
        is_module = isinstance(value, nn.Module)
        if not is_module and not _is_closed(kind) and drives(value):
            self.beyond.append(f"{name} (it holds a model: by identity)")
        elif is_module or isinstance(value, _OPEN) or not _is_closed(kind):
            parts = self._attributes(value)
            if parts or hasattr(value, "__dict__"):
                return self._inside(name, kind, parts, depth)
        self._left -= 1
        return Fact((kind, value if has_value(value) else Same(value)))

    def _attributes(self, value: Any) -> tuple[tuple[str, Any], ...]:
        self.add_class(type(value))
        table: dict[str, Any] = getattr(value, "__dict__", {})
        if table or hasattr(value, "__dict__"):
            self._hold(value, is_same_vars, *_table(table), kind=type(value))
        slots = _slots(value)
        if slots:
            read = functools.partial(_slots, value)
            self._hold(read, _reads_same, slots)
        found = {**table, **slots}
        skipped: frozenset[str] = frozenset()
        if isinstance(value, nn.Module):
            skipped = BOOKS_OF_MODULES - {"_modules"}
        return tuple((f".{k}", found[k]) for k in sorted(found) if k not in skipped)

    def _inside(
        self, name: str, kind: type, parts: Iterable[tuple[str, Any]], depth: int
    ) -> Fact:
        if depth >= MAX_DEPTH:
            return self._stop(name, kind)
        facts = []
        for key, item in parts:
            if self._left <= 0:
                facts.append(("", self._stop(name, kind)))
                break
            facts.append((key, self.fact(f"{name}{key}", item, depth + 1)))
        return Fact((kind, Parts(facts)))

    def _set(self, name: str, value: Any, depth: int) -> Fact:
        if depth >= MAX_DEPTH or len(value) > self._left:
            return self._stop(name, type(value))
        facts = frozenset(self.fact(name, item, depth + 1) for item in value)
        return Fact((type(value), facts))

    def _array(self, name: str, value: Any) -> Fact:
        self._left -= 1
        if not hasattr(value, "tobytes"):  # a dtype, a generator
            return Fact((type(value), value if has_value(value) else Same(value)))
        if value.nbytes > _MAX_ARRAY_BYTES or value.dtype.hasobject:
            return self._stop(name, type(value))
        found = value.tobytes()
        self._hold(value, is_same_bytes, found)
        return Fact((type(value), (str(value.dtype), value.shape, found)))

    def _hold(
        self, holder: Any, check: Callable[..., bool], *was: Any, **by: Any
    ) -> None:
        self.holding[id(holder), check] = functools.partial(check, holder, *was, **by)

    def _stop(self, name: str, kind: type) -> Fact:
        if name not in self.beyond:
            self.beyond.append(name)
        return Fact((kind, "beyond what is guarded"))


def _key(key: Any) -> str:
    return repr(key) if simple_fact(key) else f"{type(key).__name__} at {id(key):#x}"


def _is_closed(kind: type) -> bool:
    return str(kind.__module__).partition(".")[0] in _CLOSED


def _table(table: Mapping[Any, Any]) -> tuple[list[Any], list[Any]]:
    return list(table), list(table.values())


def _slots(value: Any) -> dict[str, Any]:
    names = [
        name
        for kind in type(value).__mro__
        if not _is_closed(kind)
        for name in _slot_names(kind)
    ]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _slot_names(kind: type) -> Iterator[str]:
    slots = vars(kind).get("__slots__", ())
    for name in (slots,) if isinstance(slots, str) else slots:
        if not name.startswith("__"):
            yield name
        elif not name.endswith("__"):  # private: Python puts the class before it
            yield f"_{kind.__name__.lstrip('_')}{name}"


def _reads_same(read: Callable[[], dict[str, Any]], before: dict[str, Any]) -> bool:
    return is_same_items(list(read().values()), list(before.values()))


def _class_entries(kind: type) -> Iterator[tuple[str, Any]]:
    for key, value in vars(kind).items():
        if isinstance(value, FunctionType) or not key.startswith("__"):
            yield f".{key}", value


# Each guarded fact by its name. Two calls may share a program when all facts are equal.
Signature: TypeAlias = tuple[tuple[str, Any], ...]


def sign(inventory: Inventory) -> Signature:
    """Everything about a call that a program depends on, except tensor values."""
    walk = _begin_walk(inventory)
    facts = (
        *ambient_facts(),
        ("structure of the arguments", inventory.structure),
        *_tensor_facts(inventory),
        *_wiring_facts(inventory),
        *_data_facts(inventory, walk),
        *_gradient_hook_facts(inventory),
        *_optimizer_facts(inventory),
    )
    if walk.beyond:
        note(_describe_beyond(walk.beyond))
    return facts


def watch_data(inventory: Inventory) -> list[Callable[[], bool]]:
    """For each container and object in guarded data: whether it holds what it held."""
    walk = _begin_walk(inventory)
    for _ in _data_facts(inventory, walk):
        pass
    return list(walk.holding.values())


def _begin_walk(inventory: Inventory) -> Walk:
    known = {id(optimizer): name for name, optimizer in inventory.optimizers}
    known |= {id(scaler): name for name, scaler in inventory.scalers}
    return Walk(known | {id(child): path for path, child in _named_modules(inventory)})


def _describe_beyond(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (
        f"not guarded, beyond {MAX_LEAVES} values or {MAX_DEPTH} levels: "
        f"{', '.join(names[:limit])}{more}; if one changes, call close() and compile again"
    )


def _data_facts(inventory: Inventory, walk: Walk) -> Iterator[tuple[str, Any]]:
    """Arguments that are no tensors, modules, and the classes of all that was found."""
    yield from _constant_facts(inventory, walk)
    yield from _module_facts(inventory, walk)
    yield from walk.class_facts()


def explain_difference(old: Signature, new: Signature, *, limit: int = 8) -> list[str]:
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
            f"{place}: {was} -> {now}"
            for name in telling
            for place, was, now in differing(
                name, before.get(name, "absent"), after.get(name, "absent")
            )
        ]
    rest = len(lines) - limit
    return lines if rest <= 0 else [*lines[:limit], f"and {rest} more"]


def _role(fact: Any) -> str:
    return fact[5] if isinstance(fact, TensorFact) else ""


def ambient_facts() -> Iterator[tuple[str, Any]]:
    """What a program depends on that is in no argument."""
    yield "gradients enabled", torch.is_grad_enabled()
    yield "default dtype", torch.get_default_dtype()
    yield "autocast", _torch.autocast_state()


def _tensor_facts(inventory: Inventory) -> Iterator[tuple[str, Any]]:
    for slot in inventory.slots:
        tensor = slot.tensor
        yield (
            slot.name,
            TensorFact(
                (
                    tuple(tensor.shape),
                    tensor.dtype,
                    tensor.stride(),
                    tensor.device,
                    tensor.requires_grad,
                    slot.role.value,
                    _torch.layout_of(tensor),
                )
            ),
        )


class TensorFact(tuple[Any, ...]):
    """Shape, dtype, strides, device, requires_grad, role, layout; prints readably."""

    __slots__ = ()

    def __str__(self) -> str:
        shape, dtype, stride, device, requires_grad, role, layout = self
        text = f"{role} {str(dtype).removeprefix('torch.')}{list(shape)}"
        text += f" strides {list(stride)} on {device}"
        text += "" if requires_grad else " without gradient"
        return text + (f" {layout}" if layout else "")


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
        walk.begin()
        fact = walk.fact(name, leaf)
        _check_guarded(name, leaf, walk)
        is_simple = simple_fact(leaf) is not None
        yield name, (type(leaf).__name__, fact) if is_simple else fact


def _check_guarded(name: str, leaf: Any, walk: Walk) -> None:
    if type(leaf).__hash__ is None and not walk.sees(name, leaf):
        raise CaptureError(
            f"compile: argument {name} is a {type(leaf).__name__}, which can change "
            "without a sign, so a graph made with it could be stale. Pass tensors, "
            "numbers, strings, modules, optimizers, plain objects, or lists, tuples and "
            f"dicts of them, of at most {MAX_LEAVES} values in {MAX_DEPTH} levels."
        )


def _named_modules(inventory: Inventory) -> Iterator[tuple[str, nn.Module]]:
    for root, module in inventory.modules:
        for prefix, child in module.named_modules():
            yield f"{root}.{prefix}" if prefix else root, child


def _module_facts(inventory: Inventory, walk: Walk) -> Iterator[tuple[str, Any]]:
    """Train or eval, and all plain data among the attributes, of every module."""
    for path, child in _named_modules(inventory):
        yield from _attribute_facts(path, child, walk)
        if hooks := _hooks(child, _torch.HOOK_TABLES):
            yield f"hooks of {path}", hooks


def _attribute_facts(
    path: str, module: nn.Module, walk: Walk
) -> Iterator[tuple[str, Any]]:
    walk.begin()
    walk.add_class(type(module))
    simple: list[Any] = [type(module)]
    for key, value in sorted(_own_attributes(module).items()):
        if (fact := simple_fact(value)) is not None:
            simple.append((key, fact))
        elif key not in BOOKS_OF_MODULES:
            yield f"{path}.{key}", walk.fact(f"{path}.{key}", value)
    yield path, tuple(simple)


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """A module's attributes, without what stands there while an update is pending."""
    own = {key: _look_through(value) for key, value in vars(module).items()}
    return {key: value for key, value in own.items() if value is not WrappedMethod}


def _look_through(value: Any) -> Any:
    if not isinstance(value, WrappedMethod):
        return value
    # What the user put there; the class stands for nothing.
    return WrappedMethod if value.own is None else _look_through(value.own)


class HookFact(tuple[Any, ...]):
    """Hooks in their order: table, key, identity and name of each; prints the names."""

    __slots__ = ()

    def __str__(self) -> str:
        return ", ".join(name for *_, name in self)


def name_of_hook(hook: Any) -> str:
    """What a hook is called in texts."""
    return str(getattr(hook, "__qualname__", type(hook).__name__))


def _hooks(holder: Any, tables: tuple[str, ...]) -> HookFact:
    # What a hook holds is not held here. A copy of a module has the same keys, so that
    # only the identity tells a copied hook from its original.
    return HookFact(
        (table, key, id(hook), name_of_hook(hook))
        for table, key, hook in _torch.hooks_of(holder, tables)
        if not getattr(hook, "belongs_to_compiled_step", False)
    )


def _gradient_hook_facts(inventory: Inventory) -> Iterator[tuple[str, Any]]:
    for slot in inventory.slots:
        if slot.role is Role.PARAMETER:
            if hooks := _hooks(slot.tensor, _torch.GRADIENT_HOOK_TABLES):
                yield f"gradient hooks of {slot.name}", hooks


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
    return "an input of the graph" if label in lifted else value
