"""The Python values that a step can read: one walk signs them and takes snapshots of them.

Numbers, strings and the like are guarded by value, containers and objects by what is in
them, all else by identity. Arguments and modules are walked whole. From the step's function
the walk goes through the variables around it, the globals that it names, the object whose
method it is, and the user's functions that are named there; of the user's own objects it
takes the attributes that any of this code names, so that a counter beside them may count.
Only so much is looked at; what is beyond is listed. Tensors are no data: they are inputs of
a graph, or refused by it.
"""

import argparse
import ctypes
import functools
import itertools
import os
import sys
import threading
import weakref
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from io import IOBase
from multiprocessing.sharedctypes import SynchronizedBase
from types import (
    BuiltinFunctionType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, TypeAlias, final

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchspmd.step.capture import snapshots
from torchspmd.step.capture.user_code import (
    CALLED_BY_TORCH,
    attribute_of,
    called_in_packages,
    imported_module,
    is_users_file,
    is_users_function,
    methods_of,
    names_in,
    unwrapped,
    users_functions_in,
)

MAX_LEAVES = 512  # in each argument, attribute of a module, and value that code names
MAX_REACHED = 32 * MAX_LEAVES  # in values that the step's code names, all together
MAX_DEPTH = 6

# ----------------------------------------------------------------------------
# What is guarded about one value.

_SHOWN = 80  # characters of a value in texts
_BY_VALUE = (
    *(bool, int, str, bytes, complex, type(None), type(...), range, Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(FunctionType, BuiltinFunctionType),  # by identity: an activation, for instance
)


class Fact(tuple[type, Any]):
    """The type of a value and what was found in it; prints like the value."""

    __slots__ = ()

    def __repr__(self) -> str:
        text = repr(self[1])
        return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."

    __str__ = __repr__


NamedFact: TypeAlias = tuple[str, Fact]


class _Text(str):
    """What is said about a value, printed without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


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


def simple_fact(value: Any) -> Fact | None:
    """What is guarded about a single value; None for anything with parts.

    >>> simple_fact(1) == simple_fact(1.0), simple_fact(0.0) == simple_fact(-0.0)
    (False, False)
    """
    if isinstance(value, float):
        return Fact((type(value), _Text(float.__repr__(value))))
    return Fact((type(value), value)) if isinstance(value, _BY_VALUE) else None


def _fact_of_whole(value: Any) -> Fact:
    """By value for an object that says itself what it is equal to, or by identity."""
    by_identity: Any = object.__hash__
    if type(value).__hash__ not in (None, by_identity):
        try:
            hash(value)
        except TypeError:
            return Fact((type(value), Same(value)))
        return Fact((type(value), value))
    return Fact((type(value), Same(value)))


# ----------------------------------------------------------------------------
# What is inside of a value.

# Their objects keep books (caches, counters) that say nothing about a step.
_CLOSED = frozenset({"torch", "torchspmd", "numpy", *sys.stdlib_module_names})
_OPEN = (
    *(SimpleNamespace, argparse.Namespace, threading.local, threading.Event),
    *(UserDict, UserList, ChainMap, SynchronizedBase),
)
_BUFFERS = (
    bytearray,
    array,
    ctypes.Array,
    ctypes.Structure,
    ctypes._SimpleCData,
)
# Tables of tensors and hooks, which are guarded elsewhere or say nothing about a step.
BOOKS_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_TABLES = (dict, MappingProxyType)
_SEQUENCES = (list, tuple, deque)
_BOUND = (functools.partial, MethodType, weakref.ReferenceType, ContextVar)
# They cannot hold each other in a circle, and equal ones may or may not be one object.
_MODELS = (nn.Module, Optimizer, GradScaler)
_CALLED = (FunctionType, BuiltinFunctionType, type)
_UNCHANGING = (tuple, frozenset, *_BOUND)
_MOST_LOOKS = 1000


def parts_of(value: Any, latest: int | None = None) -> Iterator[tuple[str, Any]]:
    """All that is directly inside of a value: how it is reached from there, and itself.

    Args:
        value: A container, an object with attributes or slots, a bound method, a partial,
            a weak reference, a context variable.
        latest: Only so many items of a container, its last ones.
    """
    first = None if latest is None else -latest
    if isinstance(value, _TABLES):
        for key in list(value)[first:]:
            yield f"[{_key_text(key)}]", value[key]
    elif isinstance(value, _SEQUENCES):
        begin = 0 if latest is None else max(0, len(value) - latest)
        for place, item in itertools.islice(enumerate(value), begin, None):
            yield f"[{place}]", item
    elif isinstance(value, (set, frozenset)):
        yield from (("{...}", item) for item in list(value)[first:])
    elif isinstance(value, functools.partial):
        yield from ((f".{key}", getattr(value, key)) for key in _OF_PARTIALS)
    elif isinstance(value, MethodType):
        yield ".__func__", value.__func__
        yield ".__self__", value.__self__
    elif isinstance(value, weakref.ReferenceType):
        yield "()", value()
    elif isinstance(value, ContextVar):
        yield ".get()", value.get(None)
    elif not isinstance(value, type):
        yield from _attributes_of(value)


_OF_PARTIALS = ("func", "args", "keywords")


def _attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    found = dict(attribute_of(value, "__dict__", {}))
    for name in _slot_names(type(value)):
        held = attribute_of(value, name, snapshots.MISSING)
        if held is not snapshots.MISSING:
            found[name] = held
    skipped: frozenset[str] = frozenset()
    if isinstance(value, nn.Module):
        skipped = BOOKS_OF_MODULES - {"_modules"}
    for key in sorted(found.keys() - skipped):
        yield f".{key}", found[key]


def _flat_fact(value: Any) -> Fact | None:
    """What is guarded about a long list or table of numbers, texts and the like."""
    if isinstance(value, _BOUND) or not MAX_LEAVES < len(value) <= snapshots.MOST_ITEMS:
        return None
    items = (*value, *value.values()) if isinstance(value, _TABLES) else tuple(value)
    facts = tuple(map(simple_fact, items))
    return None if None in facts else Fact((type(value), facts))


def _has_parts(part: tuple[str, Any]) -> bool:
    return simple_fact(part[1]) is None


def _key_text(key: Any) -> str:
    """A key of a dict as text; of an object, by identity."""
    return repr(key) if simple_fact(key) else f"{type(key).__name__} at {id(key):#x}"


def _slot_names(kind: type) -> tuple[str, ...]:
    names = []
    for each in kind.__mro__:
        slots = () if _is_closed(each) else vars(each).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__"):
                names.append(name)
            elif not name.endswith("__"):  # private: Python puts the class before it
                names.append(f"_{each.__name__.lstrip('_')}{name}")
    return tuple(names)


def _is_closed(kind: type) -> bool:
    """Whether the objects of a class are not looked into."""
    return str(kind.__module__).partition(".")[0] in _CLOSED


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
        for _, part in parts_of(waiting.pop()):
            if isinstance(part, (nn.Module, Optimizer)):
                return True
            if id(part) not in seen and not isinstance(part, _BOUND):
                seen.add(id(part))
                waiting.append(part)
    return False


def _is_iterator(value: Any) -> bool:
    """Whether a value gives another one whenever it is asked, and shows no state."""
    has_next = hasattr(type(value), "__next__") and _is_closed(type(value))
    return has_next and not isinstance(value, IOBase)


def _is_users_class(kind: type) -> bool:
    """Whether a class is the user's own: of no installed package."""
    if _is_closed(kind):
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is None or is_users_file(file)


def is_users_object(value: Any) -> bool:
    """Whether a value is an object of the user's own, with attributes."""
    is_more = isinstance(value, (nn.Module, Optimizer))
    return (
        not is_more
        and attribute_of(value, "__dict__") is not None
        and _is_users_class(type(value))
    )


# ----------------------------------------------------------------------------
# The walk.

_MAX_ARRAY_BYTES = 1 << 16  # compared before each call
_MAX_WRITTEN_BYTES = 1 << 24  # compared before and after a capture


@dataclass
class _Named:
    """An object of which the attributes count that the code names."""

    path: str
    value: Any
    depth: int
    done: set[str] = field(default_factory=set)

    @functools.cached_property
    def may_count(self) -> bool:
        """Whether attributes that no code names may change with every step."""
        return isinstance(self.value, ModuleType) or holds_model(self.value)


@final
class Walk:
    """Walks through values, and keeps what could change without a sign.

    Args:
        known: Modules and optimizers that are guarded by themselves, by identity.
        finds_models: Whether to look for others.

    Attributes:
        models: Modules, optimizers and scalers that were found, by identity, with names.
        generators: Random generators of torch, by identity.
        iterators: What gives another value whenever it is asked, by name.
        scalers: Gradient scalers that are in no argument, by name.
        tensors: Tensors that were found, by name.
        beyond: What was not looked at.
    """

    def __init__(self, known: Mapping[int, str], *, finds_models: bool = False) -> None:
        self._known, self._finds_models = known, finds_models
        self.models: dict[int, tuple[str, Any]] = {}
        self._left = MAX_LEAVES
        self._left_for_code = MAX_REACHED
        self._paths: dict[int, str] = {}  # of what was looked at, by identity
        # User classes and functions that were found: what they name can change too.
        self._classes: dict[type, None] = {}
        self._done: set[type] = set()
        self._functions: dict[int, tuple[str, FunctionType]] = {}
        self._read: set[int] = set()  # functions whose code was read
        self._globals: set[tuple[int, str]] = set()
        self._names: set[str] = set(CALLED_BY_TORCH)  # of attributes, in their code
        self._is_open = False  # whether attributes are read by names that are computed
        self._is_of_hook = False  # whether it is a hook whose code is read
        self._made: set[type] = set()  # classes that the step may make objects of
        self._objects: list[_Named] = []
        # Modules of installed packages, and functions there that forwards lead to.
        self._packages: dict[int, tuple[str, ModuleType]] = {}
        self._library: dict[int, FunctionType] = {}
        self._methods: dict[tuple[type, str], None] = {}
        self._called: set[type] = set()  # classes of which methods were noted
        self._taken: dict[tuple[int, type], snapshots.Snapshot] = {}
        self.generators: dict[int, torch.Generator] = {}
        self.iterators: dict[int, str] = {}
        self.scalers: dict[int, str] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.beyond: list[str] = []

    @property
    def taken(self) -> list[snapshots.Snapshot]:
        """Snapshots of each container and object that was found."""
        return list(self._taken.values())

    def whole(self, path: str, value: Any) -> Iterator[NamedFact]:
        """What is guarded about a value and all that is in it."""
        return self._begin(path, value, is_named=False)

    def reached_from(
        self, *functions: Callable[..., Any], hooks: Iterable[tuple[str, Any]] = ()
    ) -> Iterator[NamedFact]:
        """What is guarded about all that the code of functions can read.

        Args:
            functions: The step.
            hooks: What modules, optimizers and gradients call on the way, by name.
        """
        for function in functions:
            yield from self._start(function)
        yield from self._follow()
        self._is_of_hook = True
        for path, hook in hooks:
            yield from self._begin(path, hook, is_named=True)
        yield from self._follow()
        yield from self._library_facts()
        self._hold_objects()

    def _follow(self) -> Iterator[NamedFact]:
        """Read the code of all functions that were found, until there is no more."""
        size = None
        while size != (size := self._size()):
            for name, found in list(self._functions.values()):
                if id(found) not in self._read:
                    yield from self._function(name, found)
            yield from self._class_facts()
            self._add_methods()
            for each in list(self._objects):
                yield from self._named_attributes(each)

    def add_class(self, kind: type) -> None:
        """Note a class and its bases, as far as they are the user's."""
        for each in kind.__mro__:
            if not _is_closed(each):
                self._classes[each] = None

    def add_method(self, kind: type, key: str) -> None:
        """Note a method that torch calls, of a package's class, and what it names there."""
        if kind in self._called:
            return
        self._called.add(kind)
        for each in kind.__mro__:
            method = vars(each).get(key)
            if isinstance(method, FunctionType) and _is_closed(each):
                self._methods[each, key] = None
                self.add_function(f"{each.__qualname__}.{key}", method)
            if isinstance(method, FunctionType) and not is_users_function(method):
                self._library[id(method)] = method

    def add_function(self, path: str, value: Any) -> None:
        """Note a function, if it is the user's: what its code names can change too."""
        if isinstance(value, FunctionType):
            for function in users_functions_in(value):
                self._functions.setdefault(id(function), (path, function))

    # ------------------------------------------------------------------------
    # Values, by their kind.

    def _begin(
        self, path: str, value: Any, depth: int = 0, *, is_named: bool
    ) -> Iterator[NamedFact]:
        allowed = min(MAX_LEAVES, self._left_for_code) if is_named else MAX_LEAVES
        self._left = allowed
        yield from self._value(path, value, depth, is_named=is_named)
        if is_named:
            self._left_for_code -= allowed - self._left

    def _value(
        self, path: str, value: Any, depth: int, *, is_named: bool
    ) -> Iterator[NamedFact]:
        """What is guarded about one value, and about all that is in it.

        Args:
            path: What it is called.
            value: The value.
            depth: How many containers and objects it is in.
            is_named: Of the user's own objects, take only attributes that the code names.
        """
        kind = type(value)
        if isinstance(value, type):
            if is_named and _is_users_class(value):
                self._made.add(value)
            self.add_class(value)
            self.add_class(type(value))
            yield path, Fact((type, value))
        elif (simple := simple_fact(value)) is not None:
            self.add_function(path, value)
            self._left -= 1
            is_code = is_named and is_users_function(value)
            yield path, Fact((kind, value.__code__)) if is_code else simple
        elif id(value) in self._known:
            yield path, Fact((kind, _Text(self._known[id(value)])))
        elif self._finds_models and isinstance(value, _MODELS):
            self._found(path, value)
            yield path, Fact((kind, _Text(path)))
        elif (form := snapshots.stored_form(value)) is not None:
            yield f"type of {path}", Fact((kind, _Text(form)))
            if isinstance(value, (list, dict)):
                self._hold(value, snapshots.Items(path, value))
        elif isinstance(value, torch.Tensor):
            self.tensors[path] = value
            yield f"type of {path}", Fact((kind, _Text("a tensor")))
        elif id(value) in self._paths:
            yield path, Fact((kind, _Text(f"as {self._paths[id(value)]}")))
        elif depth >= MAX_DEPTH or self._left <= 0:
            yield path, self._stop(path, kind)
        else:
            self._left -= 1
            if not isinstance(value, _UNCHANGING):
                self._paths[id(value)] = path
            yield from self._compound(path, value, depth, is_named=is_named)

    def _found(self, path: str, value: Any) -> None:
        self.models.setdefault(id(value), (path, value))
        children = value.modules() if isinstance(value, nn.Module) else ()
        for child in children:
            self.add_class(type(child))

    def _compound(
        self, path: str, value: Any, depth: int, *, is_named: bool
    ) -> Iterator[NamedFact]:
        kind = type(value)
        if isinstance(value, ModuleType):
            yield path, Fact((kind, Same(value)))
            if is_users_file(getattr(value, "__file__", None) or "<frozen"):
                self._objects.append(_Named(path, value, depth))
            else:
                self._packages[id(value)] = path, value
        elif isinstance(value, (set, frozenset)):
            yield path, self._set(path, value, depth)
        elif isinstance(value, (*_TABLES, *_SEQUENCES, *_BOUND)):
            text = "" if isinstance(value, _BOUND) else f" of {len(value)}"
            yield path, Fact((kind, _Text(f"{kind.__name__}{text}")))
            parts = parts_of(value)
            if (flat := _flat_fact(value)) is not None:  # one fact for many items
                yield f"items of {path}", flat
                parts = iter(())
            if not isinstance(value, _UNCHANGING):
                self._hold(value, snapshots.Items(path, value))
            elif isinstance(value, ContextVar):
                self._hold(value, snapshots.ContextValue(path, value))
            if not _is_closed(kind):  # a user's list or dict may have attributes
                self._hold_attributes(path, value)
                parts = iter((*parts, *_attributes_of(value)))
            yield from self._inside(path, kind, parts, depth, is_named=is_named)
        elif is_named and (inner := unwrapped(value)) is not None:
            yield path, Fact((kind, Same(value)))
            inside = ((".__wrapped__", inner),)
            yield from self._inside(path, kind, inside, depth, is_named=True)
        elif is_named and is_users_object(value):
            yield path, Fact((kind, _Text(kind.__name__)))
            self.add_class(kind)
            self._objects.append(_Named(path, value, depth))
        else:
            yield from self._object(path, value, depth)

    def _object(self, path: str, value: Any, depth: int) -> Iterator[NamedFact]:
        kind = type(value)
        if snapshots.is_generator(value):
            self._hold(value, snapshots.RandomState(path, value))
            yield path, Fact((kind, Same(value)))
            return
        if isinstance(value, torch.Generator):
            self.generators[id(value)] = value
        if _is_iterator(value):
            self.iterators.setdefault(id(value), path)
        if isinstance(value, GradScaler) and value.is_enabled():
            self.scalers.setdefault(id(value), path)
        if any(each.__module__ == "numpy" for each in kind.__mro__):
            yield path, self._array(path, value)
            return
        if isinstance(value, _BUFFERS):
            yield path, self._buffer(path, value)
            return
        if isinstance(value, LRScheduler):  # it counts steps, which few steps read
            self._objects.append(_Named(path, value, depth))
            yield path, Fact((kind, Same(value)))
            return
        is_module = isinstance(value, nn.Module)
        is_holder = not is_module and not _is_closed(kind) and holds_model(value)
        if is_holder and is_users_object(value):
            self.add_class(kind)  # its counters may count, unless the code names them
            self._objects.append(_Named(path, value, depth))
            yield path, Fact((kind, _Text(kind.__name__)))
            return
        if is_holder:
            self.beyond.append(f"{path} (it holds a model: by identity)")
        elif is_module or isinstance(value, _OPEN) or not _is_closed(kind):
            if attribute_of(value, "__dict__") is not None or _slot_names(kind):
                self._hold_attributes(path, value)
                yield path, Fact((kind, _Text(kind.__name__)))
                parts = _attributes_of(value)
                yield from self._inside(path, kind, parts, depth, is_named=False)
                return
        yield path, _fact_of_whole(value)

    def _inside(
        self,
        path: str,
        kind: type,
        parts: Iterable[tuple[str, Any]],
        depth: int,
        *,
        is_named: bool,
    ) -> Iterator[NamedFact]:
        # What has parts itself comes last: one long table must not hide what is beside it.
        first = list(itertools.islice(parts, max(self._left, 0) + 1))
        for key, item in sorted(first, key=_has_parts):
            if self._left <= 0:
                yield path, self._stop(path, kind)
                return
            yield from self._value(f"{path}{key}", item, depth + 1, is_named=is_named)

    def _set(self, path: str, value: Any, depth: int) -> Fact:
        if isinstance(value, set):
            self._hold(value, snapshots.Items(path, value))
        if len(value) > self._left:
            return self._stop(path, type(value))
        facts, known = set(), self._paths
        for item in value:
            if simple_fact(item) is None:
                self._paths = dict(known)  # a set has no order: none may come first
            facts.add(tuple(self._value(path, item, depth + 1, is_named=False)))
        self._paths = known
        return Fact((type(value), frozenset(facts)))

    def _array(self, path: str, value: Any) -> Fact:
        if not hasattr(value, "tobytes"):  # a dtype, a generator
            return _fact_of_whole(value)
        if value.dtype.hasobject or value.nbytes > _MAX_WRITTEN_BYTES:
            return self._stop(path, type(value))
        is_small = value.nbytes <= _MAX_ARRAY_BYTES
        self._hold(value, snapshots.Array(path, value, is_guarded=is_small))
        if not is_small:
            return self._stop(path, type(value))
        return Fact((type(value), (str(value.dtype), value.shape, value.tobytes())))

    def _buffer(self, path: str, value: Any) -> Fact:
        """Memory of Python's own library: what is in it, where that is little."""
        if memoryview(value).nbytes > _MAX_ARRAY_BYTES:
            return self._stop(path, type(value))
        self._hold(value, snapshots.Buffer(path, value))
        return Fact((type(value), bytes(memoryview(value))))

    def _hold_attributes(self, path: str, value: Any) -> None:
        self.add_class(type(value))
        if attribute_of(value, "__dict__") is not None:
            self._hold(value, snapshots.Attributes(path, value))
        if names := _slot_names(type(value)):
            self._hold(value, snapshots.Slots(path, value, names))

    def _hold(self, holder: Any, snapshot: snapshots.Snapshot) -> None:
        """Keep what a holder holds now."""
        self._taken[id(holder), type(snapshot)] = snapshot

    def _stop(self, path: str, kind: type) -> Fact:
        """Note what is not looked at."""
        if path not in self.beyond:
            self.beyond.append(path)
        return Fact((kind, _Text("beyond what is guarded")))

    # ------------------------------------------------------------------------
    # From code to values.

    def _start(self, step: Any) -> Iterator[NamedFact]:
        if isinstance(step, functools.partial):
            yield from self._start(step.func)
            named = (("arguments", step.args), ("keywords", step.keywords))
            for key, value in named:
                path = f"{key} of the partial"
                yield from self._begin(path, value, is_named=True)
        elif isinstance(step, MethodType):
            yield from self._start(step.__func__)
            yield from self._begin("self", step.__self__, is_named=True)
        elif isinstance(step, FunctionType):
            yield from self._function(step.__name__, step)
        elif (inner := unwrapped(step)) is not None:
            yield from self._start(inner)
        else:
            yield from self._begin("self", step, is_named=True)

    def _size(self) -> tuple[int, ...]:
        found = (self._names, self._functions, self._classes, self._objects, self._made)
        return tuple(map(len, found))

    def _function(self, name: str, function: FunctionType) -> Iterator[NamedFact]:
        """A function's code, and the values of the variables that it names."""
        self._read.add(id(function))
        code, table = function.__code__, function.__globals__
        names = names_in(code)
        self._names |= names.attributes
        self._is_open = self._is_open or names.is_open
        yield f"code of {name}", Fact((FunctionType, code))
        if names.environment:
            self._hold(code, snapshots.Environment(names.environment))
            for variable in sorted(names.environment):
                text = os.environ.get(variable)
                yield f"os.environ[{variable!r}]", Fact((type(text), text))
        found = [*self._around(name, function)]
        if variables := sorted(names.globals):
            file = f"global {function.__module__}"
            values = snapshots.Attributes(file, None, table=table, names=variables)
            self._hold(code, values)  # the function holds its own attributes
            for variable in variables:
                if variable in table and (id(table), variable) not in self._globals:
                    self._globals.add((id(table), variable))
                    found.append((f"{file}.{variable}", table[variable]))
        package = table.get("__package__")
        for level, imported in sorted(names.imports):
            module = imported_module(level, imported, package)
            found.append((f"module {imported}", module or snapshots.MISSING))
        for value in filter(None, (function.__defaults__, function.__kwdefaults__)):
            found.append((f"defaults of {name}", value))
        self._objects.append(_Named(name, function, 0))
        for path, value in found:
            if value is not snapshots.MISSING:
                yield from self._begin(path, value, is_named=True)

    def _around(self, name: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
        """The variables around a function, which are held from now on."""
        variables = function.__code__.co_freevars
        cells = dict(zip(variables, function.__closure__ or (), strict=True))
        for variable, cell in cells.items():
            yield f"{variable} around {name}", snapshots.contents_of(cell)
        if self._is_of_hook:  # the hook of a model must not keep it alive
            cells = {
                variable: cell
                for variable, cell in cells.items()
                if id(snapshots.contents_of(cell)) not in self._known
            }
        if cells:
            self._hold(function, snapshots.Cells(name, cells))

    def _class_facts(self) -> Iterator[NamedFact]:
        """What is guarded about each class that was noted since the last time."""
        while todo := [kind for kind in self._classes if kind not in self._done]:
            for kind in todo:
                self._done.add(kind)
                path = f"class {kind.__qualname__}"
                self._hold(kind, snapshots.Attributes(path, kind))
                for key, value in vars(kind).items():
                    if isinstance(value, FunctionType):  # its code matters if called
                        yield f"{path}.{key}", Fact((FunctionType, Same(value)))
                    elif not key.startswith("__"):
                        yield from self.whole(f"{path}.{key}", value)

    def _add_methods(self) -> None:
        for kind in filter(_is_users_class, list(self._classes)):
            is_made, is_holder = kind in self._made, False
            if is_dataclass(kind):
                objects = (each for each in self._objects if type(each.value) is kind)
                is_holder = any(each.may_count for each in objects)
            for key, function in methods_of(
                kind, self._names, is_made=is_made, is_holder=is_holder
            ):
                self.add_function(f"{kind.__qualname__}.{key}", function)

    def _named_attributes(self, named: _Named) -> Iterator[NamedFact]:
        table = vars(named.value)
        names = set(table) if self._takes_all(named) else self._names & table.keys()
        for key in sorted(names - named.done):
            named.done.add(key)
            path = f"{named.path}.{key}"
            depth = named.depth + 1
            yield from self._begin(path, table[key], depth, is_named=True)

    # ------------------------------------------------------------------------
    # Functions of installed packages, by identity: they may be replaced (F.gelu = mine).

    def _library_facts(self) -> Iterator[NamedFact]:
        """Functions that the code names in packages, and methods that torch calls there."""
        for kind, key in self._methods:
            path, method = f"class {kind.__qualname__}", vars(kind)[key]
            yield f"{path}.{key}", Fact((type(method), Same(method)))
            held = snapshots.Attributes(path, kind, names=[key])
            self._taken.setdefault((id(kind), snapshots.Attributes), held)
        found: dict[int, tuple[str, dict[str, Any], set[str]]] = {}
        own = frozenset(self._names)
        waiting = [(path, module, own) for path, module in self._packages.values()]
        for function in called_in_packages(self._library.values()):
            table, names = function.__globals__, names_in(function.__code__)
            path = str(function.__module__)
            found.setdefault(id(table), (path, table, set()))[2].update(names.globals)
            for key in names.globals & table.keys():
                if isinstance(module := table[key], ModuleType):
                    waiting.append((module.__name__, module, names.attributes))
        seen: set[tuple[int, frozenset[str]]] = set()
        while waiting:
            path, module, named = waiting.pop()
            if (id(module), named) in seen:
                continue
            seen.add((id(module), named))
            table = vars(module)
            found.setdefault(id(table), (path, table, set()))[2].update(named)
            for name in named & table.keys():
                if isinstance(inner := table[name], ModuleType):
                    waiting.append((f"{path}.{name}", inner, named))
        for path, table, known in found.values():
            keys = sorted(key for key in known if isinstance(table.get(key), _CALLED))
            if keys:
                held = snapshots.Attributes(path, None, table=table, names=keys)
                self._taken[id(table), snapshots.Attributes] = held
                for key in keys:
                    yield f"{path}.{key}", Fact((type(table[key]), Same(table[key])))

    def _takes_all(self, named: _Named) -> bool:
        return self._is_open and not named.may_count

    def _hold_objects(self) -> None:
        names = frozenset(self._names)
        for each in self._objects:
            only = None if self._takes_all(each) else names
            attributes = snapshots.Attributes(each.path, each.value, names=only)
            self._hold(each.value, attributes)
            if self._is_open and only and not isinstance(each.value, ModuleType):
                text = "it holds a model: only attributes that the code names"
                self.beyond.append(f"{each.path} ({text})")
