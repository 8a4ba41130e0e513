"""What is guarded about one value, as a fact that can be compared and printed.

Numbers, strings and the like go by value, containers and objects with attributes by what
is in them, functions and all else by identity. Tensors are no data: they are inputs of a
graph, or refused by it. Only so much is looked at; what is beyond is listed.
"""

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
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

MAX_LEAVES = 512  # of each module, argument and class
MAX_DEPTH = 6
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
# Comparisons by identity, for the guard fast path.


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
# Data in containers and objects.

_MOST_LOOKS = 1000


def holds_model(value: Any) -> bool:
    """Whether an object holds modules or optimizers, itself or through what it holds.

    Its counters change with every step; guarded by value, each step would be another
    program.

    >>> class Trainer:
    ...     def __init__(self, model):
    ...         self.loop = {"model": model}
    >>> holds_model(Trainer(nn.Linear(1, 1))), holds_model([1, 2])
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


_MAX_ARRAY_BYTES = 4096
# Their objects keep books (caches, counters) that say nothing about a step.
_CLOSED = frozenset({"torch", "torchspmd", "numpy", *sys.stdlib_module_names})
_OPEN = (SimpleNamespace, argparse.Namespace)
# Tables of tensors and hooks, which are guarded elsewhere or say nothing about a step.
BOOKS_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}


@final
class Walk:
    """Walks through values, and keeps what could change without a sign.

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
            self._facts[key] = self._compound(name, value, depth)
            del self._open[id(value)]
        return self._facts[key]

    def sees(self, name: str, value: Any) -> bool:
        """Whether all of a value that was walked through is guarded."""
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

    def _compound(self, name: str, value: Any, depth: int) -> Fact:
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
        if not is_module and not _is_closed(kind) and holds_model(value):
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
