"""What a step changes in Python while it is traced: it would happen once, at capture."""

import contextlib
import inspect
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchspmd import _torch
from torchspmd.errors import CaptureError
from torchspmd.layout.retired import is_retired
from torchspmd.step.capture.guards import ambient_facts
from torchspmd.step.capture.inventory import Inventory, Role
from torchspmd.step.capture.refusals import calling_line
from torchspmd.step.capture.trace_modes import replaced

# ----------------------------------------------------------------------------
# Traced tensors in places where a captured step cannot put their values.

_DEPTH = 4  # levels of what an attribute holds that are looked into
_LATEST = 1000  # items of a container that are looked at: new ones are the last
_CONTAINERS = (dict, set, frozenset, list, tuple, deque)
_CLOSED = (
    *(nn.Module, Optimizer, torch.Tensor, type, ModuleType, FunctionType),
    *(str, bytes, int, float, type(None)),
)


def is_traced(value: Any) -> bool:
    """Whether a value is a tensor or a number of the trace, without a value."""
    if is_retired(value):
        return False
    if not isinstance(value, torch.Tensor):
        return isinstance(value, (torch.SymFloat, torch.SymInt, torch.SymBool))
    return _torch.is_fake(_torch.plain_tensor(value)) and not value.is_meta


def find_traced(
    value: Any, path: str, *, depth: int = 100, seen: set[int] | None = None
) -> Iterator[str]:
    """The paths of traced tensors in containers and in attributes of objects.

    Args:
        value: Where to look.
        path: Its name.
        depth: How many levels of containers and objects to look into.
        seen: Those that were looked into already, by identity.
    """
    seen = set() if seen is None else seen
    if is_traced(value):
        yield path
    elif depth and id(value) not in seen and not isinstance(value, _CLOSED):
        seen.add(id(value))
        for step, item in _items(value):
            yield from find_traced(item, f"{path}{step}", depth=depth - 1, seen=seen)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key in list(value)[-_LATEST:]:
            is_short = isinstance(key, (str, int))  # a tensor would be printed
            yield f"[{key!r}]" if is_short else "[...]", value[key]
    elif isinstance(value, (list, tuple, deque)):
        first = max(0, len(value) - _LATEST)
        for place in range(first, len(value)):
            yield f"[{place}]", value[place]
    elif isinstance(value, (set, frozenset)):
        yield from (("{...}", item) for item in list(value)[-_LATEST:])
    else:
        slots = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
        for key in (*getattr(value, "__dict__", ()), *chain(*slots)):
            if hasattr(value, key):
                yield f".{key}", getattr(value, key)


def closed_arguments(inventory: Inventory) -> list[str]:
    """The arguments that hold tensors where no inventory looks, and what they are."""
    held = (torch.Tensor, nn.Module, Optimizer)
    return [
        f"{name} is a {type(leaf).__name__}"
        for name, leaf in zip(inventory.names, inventory.leaves, strict=True)
        if not isinstance(leaf, _CLOSED)
        and any(isinstance(item, held) for _, item in _items(leaf))
    ]


def check_leaks(inventory: Inventory, function: Callable[..., Any]) -> None:
    """Refuse what kept a traced tensor: it would hold no value."""
    seen: set[int] = set()
    kept = [
        (found, table, key)
        for path, table, key in (*_attributes(inventory), *_reached_by(function))
        for found in find_traced(table[key], path, depth=_DEPTH, seen=seen)
    ]
    if not kept:
        return
    for _, table, key in kept:
        _forget(table, key)
    paths = ", ".join(dict.fromkeys(path for path, _, _ in kept))
    raise CaptureError(
        f"compile: the step stores a tensor in {paths}, where a captured step cannot put "
        "its value. Return the tensor from the step, or register a buffer and write into "
        "it with copy_()."
    )


def _attributes(inventory: Inventory) -> Iterator[tuple[str, Any, str]]:
    for path, child in inventory.named_modules():
        yield from ((f"{path}.{key}", vars(child), key) for key in vars(child))
    for name, optimizer in inventory.optimizers:
        yield from ((f"{name}.{key}", vars(optimizer), key) for key in vars(optimizer))


def _reached_by(function: Callable[..., Any]) -> Iterator[tuple[str, Any, str]]:
    """Variables around the step's function, and around functions of its file it calls."""
    waiting, seen = [function], {id(function)}
    while waiting:
        current = waiting.pop()
        if not isinstance(current, FunctionType):
            continue
        for name, value in (scope := _scope(current)).items():
            if isinstance(value, FunctionType):
                is_near = value.__module__ == current.__module__
                if is_near and id(value) not in seen:
                    seen.add(id(value))
                    waiting.append(value)
            elif isinstance(value, _CONTAINERS):
                yield name, scope, name


def _scope(function: FunctionType) -> dict[str, Any]:
    variables = inspect.getclosurevars(function)
    return {**variables.globals, **variables.nonlocals}


def _forget(table: Any, key: str) -> None:
    # The fake tensor must not stay behind for eager code to trip over.
    value = table[key]
    if isinstance(value, list):
        value[:] = [item for item in value if not is_traced(item)]
    elif isinstance(value, dict):
        for name in [name for name, item in value.items() if is_traced(item)]:
            del value[name]
    elif is_traced(value):
        table[key] = None


class Fix(StrEnum):
    """What to do instead, for each kind of thing that a step changes."""

    GROUP = (
        "Call scheduler.step(), and set hyper-parameters, between two calls of the step; "
        "an optimizer of your own counts in a tensor of its state (state[p]['step'])."
    )
    ATTRIBUTE = (
        "Count in a buffer (register_buffer, add_), call train() and eval() outside of the "
        "step, and return what is to be kept."
    )
    TENSOR = "Set requires_grad and grad of parameters outside of the step."
    ZERO = "Pass every optimizer whose zero_grad() the step calls as an argument."
    ARGUMENT = (
        "Return what is to be kept, and change a copy of an argument (dict(batch))."
    )
    RANDOM = (
        "Draw with torch's operators, which draw anew in each step, or draw outside of the "
        "step and pass what was drawn; set seeds outside."
    )
    AMBIENT = "Set modes of torch with a context manager, or outside of the step."


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is not as it was before the step."""

    text: str
    fix: Fix | None  # None for what may stay


_SIMPLE = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_MUTABLE = (list, dict, set, deque)
_MISSING = object()


class _Snapshot:
    """What was in a dict of some object.

    A plain attribute that is there for the first time, of a class that has none of its
    name, is what a module notes about itself in its first call: it may stay.
    """

    def __init__(
        self,
        name: str,
        table: Any,
        fix: Fix,
        ignored: Any = (),
        kind: type | None = None,
    ) -> None:
        self._name, self._table, self._fix = name, table, fix
        self._kind = kind
        self._ignored = frozenset(ignored)
        self._before = dict(table)
        self._contents = {
            key: _contents(value)
            for key, value in self._before.items()
            if isinstance(value, _MUTABLE) and key not in self._ignored
        }

    def changes(self, *, all_values: bool = False) -> Iterator[Change]:
        """What is other than it was, which is put back; by default only plain values."""
        for key in {**self._before, **self._table}:
            if key in self._ignored:
                continue
            before, now = (t.get(key, _MISSING) for t in (self._before, self._table))
            if before is now:
                if key in self._contents:
                    yield from self._content_changes(key, now)
            elif not _is_same(before, now):
                is_plain = _is_plain(before) and _is_plain(now)
                if is_plain and before is _MISSING and self._may_begin(key):
                    text = f"{self._name}.{key} was set in this capture, and not again"
                    yield Change(text, None)
                elif is_plain or all_values:
                    yield Change(
                        f"{self._name}.{key}{_describe_values(before, now)}", self._fix
                    )
                    self._put_back(key)

    def _may_begin(self, key: str) -> bool:
        return self._kind is not None and not hasattr(self._kind, key)

    def _content_changes(self, key: str, value: Any) -> Iterator[Change]:
        before, now = self._contents[key], _contents(value)
        same = len(now) == len(before) and all(map(_is_same_item, before, now))
        if not same:
            path = f"{self._name}.{key}"
            traced = ", ".join(dict.fromkeys(find_traced(value, path)))
            text = f"{traced}: a tensor of the step" if traced else f"{path}: its items"
            yield Change(text, self._fix)
            _refill(value, before)

    def _put_back(self, key: str) -> None:
        if key in self._before:
            self._table[key] = self._before[key]
        else:
            del self._table[key]


def _contents(value: Any) -> list[Any]:
    return list(value.items()) if isinstance(value, dict) else list(value)


def _refill(value: Any, items: list[Any]) -> None:
    value.clear()
    (value.extend if isinstance(value, (list, deque)) else value.update)(items)


def _is_plain(value: Any) -> bool:
    return (
        value is _MISSING
        or isinstance(value, _SIMPLE)
        or (type(value) in (tuple, list) and all(map(_is_plain, value)))
    )


def _is_same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    is_plain = type(before) is type(now) and _is_plain(before) and _is_plain(now)
    return is_plain and bool(before == now)


def _is_same_item(before: Any, now: Any) -> bool:
    if isinstance(before, tuple) and isinstance(now, tuple):
        return len(before) == len(now) and all(map(_is_same, before, now))
    return _is_same(before, now)


def _describe_values(before: Any, now: Any) -> str:
    if not isinstance(before, _SIMPLE) or not isinstance(now, _SIMPLE):
        return "" if before is not _MISSING else ": new"
    return f": {before!r} -> {now!r}"


class PythonState:
    """All that a step could change in Python, as it was before it was traced."""

    def __init__(
        self, inventory: Inventory, shown: list[torch.Tensor], arguments: Any
    ) -> None:
        self._arguments = arguments
        self._flat = [_torch.flatten_tree(each) for _, each in _named(arguments)]
        self._ambient = dict(ambient_facts())
        self._parameters = [
            (slot.name, slot.tensor, traced, slot.tensor.grad)
            for slot, traced in zip(inventory.slots, shown, strict=True)
            if slot.role is Role.PARAMETER
        ]
        self._groups = [
            _Snapshot(f"{name}.group{number}", group, Fix.GROUP)
            for name, optimizer in inventory.optimizers
            for number, group in enumerate(optimizer.param_groups)
        ]
        self._objects = list(_objects(inventory))

    def changes(self) -> Iterator[Change]:
        """What is other than before."""
        for table in self._groups:
            yield from table.changes(all_values=True)
        for table in self._objects:
            yield from table.changes()
        for name, own, traced, gradient in self._parameters:
            if own.requires_grad != traced.requires_grad:
                text = f"{own.requires_grad} -> {traced.requires_grad}"
                yield Change(f"{name}.requires_grad: {text}", Fix.TENSOR)
            if own.grad is not gradient:
                own.grad = gradient
                yield Change(f"{name}.grad: set from outside", Fix.ZERO)
        for (name, each), (leaves, structure) in zip(
            _named(self._arguments), self._flat, strict=True
        ):
            items, form = _torch.flatten_tree(each)
            if form != structure or any(map(_is_other, leaves, items)):
                yield Change(f"argument {name}: its items", Fix.ARGUMENT)
        for name, fact in ambient_facts():
            if fact != self._ambient[name]:
                yield Change(f"{name}: {self._ambient[name]} -> {fact}", Fix.AMBIENT)


def _is_other(before: Any, now: Any) -> bool:
    return before is not now


def _named(arguments: Any) -> list[tuple[str, Any]]:
    args, kwargs = arguments
    return [
        *((f"args[{place}]", arg) for place, arg in enumerate(args)),
        *kwargs.items(),
    ]


# Tables of a module that capture itself works on.
_TABLES = ("_parameters", "_buffers", "_modules")


def _objects(inventory: Inventory) -> Iterator[_Snapshot]:
    for path, child in inventory.named_modules():
        yield _Snapshot(path, vars(child), Fix.ATTRIBUTE, _TABLES, type(child))
    for name, optimizer in inventory.optimizers:
        ignored = {"state", *_torch.OPTIMIZER_BOOKKEEPING}
        yield _Snapshot(name, vars(optimizer), Fix.ATTRIBUTE, ignored)
    own = (nn.Module, Optimizer, GradScaler, torch.Tensor, type)
    for name, leaf in zip(inventory.names, inventory.leaves, strict=True):
        if hasattr(leaf, "__dict__") and not isinstance(leaf, own):
            yield _Snapshot(name, vars(leaf), Fix.ATTRIBUTE)


def random_changes(before: dict[str, Any]) -> Iterator[Change]:
    """Which random generators have another state now than before."""
    for name, state in random_states().items():
        if name in before and state != before[name]:
            yield Change(f"the state of {name}", Fix.RANDOM)


def random_states() -> dict[str, Any]:
    """States of random generators that a graph knows nothing of."""
    states: dict[str, Any] = {"Python's random": random.getstate()}
    state = torch.default_generator.get_state()
    states["torch's generator"] = state.numpy().tobytes()
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        kind, keys, *rest = numpy.get_state()
        states["numpy.random"] = (kind, keys.tobytes(), *rest)
    return states


_HOOKS_FIX = (
    "Put hooks on before the step. A model of transformers does so in its first forward "
    "that gives hidden states, attentions or router logits: call it once before, eagerly."
)


def refuse_changes(function: str, changes: list[Change]) -> None:
    """Raise where any may not stay: it would be made at capture, and never again."""
    fixes = "\n".join(dict.fromkeys(each.fix for each in changes if each.fix))
    if not fixes:
        return
    changes = [change for change in changes if change.fix]
    lines = "\n".join(f"  * {change.text}" for change in changes)
    if any("_hooks: " in change.text for change in changes):
        fixes += f"\n{_HOOKS_FIX}"
    raise CaptureError(
        f"compile on {function!r}: the step changes what is no tensor of the graph\n\n"
        f"{lines}\n\nWhat the step changes in Python would happen once, at "
        f"capture.\n{fixes}"
    )


def refusing_schedulers(function: str) -> contextlib.AbstractContextManager[None]:
    """Refuse ``scheduler.step()``, also of a scheduler that is in no argument."""

    def refuse(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        text = f"{type(scheduler).__name__}.step() at {calling_line()}"
        refuse_changes(function, [Change(text, Fix.GROUP)])

    kinds = [kind for kind in _family(LRScheduler) if "step" in vars(kind)]
    return replaced(*((kind, "step", refuse) for kind in kinds))


def _family(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _family(child)
