"""From a step's function to the values that its code can read.

The walk begins with the variables around the function, the globals that it names and the
object whose method it is, and goes on through the user's functions and methods that are
named there. Of the user's own objects it takes the attributes that any of this code names,
so that a counter beside them may count. Installed packages are not walked.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from torchspmd.step.capture.code import (
    CALLED_BY_TORCH,
    is_users_file,
    is_users_function,
    methods_of,
    names_in,
    unwrapped,
)
from torchspmd.step.capture.facts import Fact, Same, simple_fact
from torchspmd.step.capture.held import (
    MISSING,
    HeldAttributes,
    HeldCells,
    HeldDict,
    HeldGlobals,
    HeldItems,
    contents_of,
)
from torchspmd.step.capture.walk import (
    MAX_DEPTH,
    MAX_LEAVES,
    Walk,
    holds_model,
    is_closed,
    key_text,
)

MAX_REACHED = 4 * MAX_LEAVES  # values that are reached from one step


@dataclass(slots=True)
class _Named:
    """An object of which the attributes count that the code names."""

    path: str
    value: Any
    depth: int
    is_all: bool  # whether all attributes count where names are computed
    done: set[str] = field(default_factory=set)


@final
class Reach:
    """Walks from the code of a step.

    Args:
        walk: Takes what is found, and knows what is guarded by itself.
    """

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._names: set[str] = set(CALLED_BY_TORCH)
        self._is_open = False  # whether attributes are read by names that are computed
        self._read: set[int] = set()  # functions
        self._globals: set[tuple[int, str]] = set()
        self._made: set[type] = set()  # classes that the step may make objects of
        self._paths: dict[int, str] = {}  # of containers and objects
        self._objects: list[_Named] = []
        self._left = MAX_REACHED

    def facts(self, step: Callable[..., Any] | None) -> Iterator[tuple[str, Fact]]:
        """What is guarded about everything that can be reached."""
        if step is not None:
            yield from self._step(step)
        size = None
        while size != (size := self._size()):
            for name, function in list(self._walk.functions.values()):
                if id(function) not in self._read:
                    yield from self._function(name, function)
            yield from self._walk.class_facts()
            self._add_methods()
            for each in list(self._objects):
                yield from self._attributes(each)
        self._hold_objects()

    def _size(self) -> tuple[int, ...]:
        walk = self._walk
        found = (self._names, walk.functions, walk.classes, self._objects, self._made)
        return tuple(map(len, found))

    def _step(self, step: Callable[..., Any]) -> Iterator[tuple[str, Fact]]:
        if isinstance(step, functools.partial):
            yield from self._step(step.func)
            yield from self._value("arguments of the partial", step.args)
            yield from self._value("keywords of the partial", step.keywords)
        elif isinstance(step, MethodType):
            yield from self._step(step.__func__)
            yield from self._value("self", step.__self__)
        elif isinstance(step, FunctionType):
            yield from self._function(step.__name__, step)
        elif (inner := unwrapped(step)) is not None:
            yield from self._step(inner)
        else:
            yield from self._value("self", step)

    def _add_methods(self) -> None:
        for kind in list(self._walk.classes):
            if _is_users_class(kind):
                is_made = kind in self._made
                for key, function in methods_of(kind, self._names, is_made=is_made):
                    self._walk.add_function(f"{kind.__qualname__}.{key}", function)

    def _function(
        self, name: str, function: FunctionType
    ) -> Iterator[tuple[str, Fact]]:
        self._read.add(id(function))
        code, walk = function.__code__, self._walk
        names = names_in(code)
        self._names |= names.attributes
        self._is_open = self._is_open or names.is_open
        yield f"code of {name}", Fact((FunctionType, code))
        if cells := function.__closure__:
            walk.hold(function, HeldCells(name, code.co_freevars, cells))
            for variable, cell in zip(code.co_freevars, cells, strict=True):
                if (value := contents_of(cell)) is not MISSING:
                    yield from self._value(f"{variable} around {name}", value)
        table, file = function.__globals__, f"global {function.__module__}"
        if names.globals:
            walk.hold(function, HeldGlobals(file, table, sorted(names.globals)))
        for variable in sorted(names.globals):
            if variable in table and (id(table), variable) not in self._globals:
                self._globals.add((id(table), variable))
                yield from self._value(f"{file}.{variable}", table[variable])
        if defaults := (function.__defaults__, function.__kwdefaults__):
            for value in filter(None, defaults):
                yield from self._value(f"defaults of {name}", value)

    def _value(
        self, path: str, value: Any, depth: int = 0
    ) -> Iterator[tuple[str, Fact]]:
        """What is guarded about one value, and about all that it leads to."""
        kind = type(value)
        if isinstance(value, type):
            if _is_users_class(value):
                self._made.add(value)
            self._walk.add_class(value)
            yield path, Fact((type, value))
        elif is_users_function(value):
            self._walk.add_function(path, value)
            yield path, Fact((kind, value.__code__))
        elif (simple := simple_fact(value)) is not None:
            self._left -= 1
            yield path, simple
        elif isinstance(value, torch.Tensor) or self._walk.is_known(value):
            yield path, self._walk.fact(path, value)
        elif id(value) in self._paths:
            yield path, Fact((kind, f"as {self._paths[id(value)]}"))
        elif depth >= MAX_DEPTH or self._left <= 0:
            yield path, self._walk.stop(path, kind)
        else:
            self._paths[id(value)] = path
            yield from self._compound(path, value, depth)

    def _compound(
        self, path: str, value: Any, depth: int
    ) -> Iterator[tuple[str, Fact]]:
        kind = type(value)
        if isinstance(value, ModuleType):
            yield path, Fact((kind, Same(value)))
            if is_users_file(getattr(value, "__file__", None) or "<frozen"):
                self._objects.append(_Named(path, value, depth, is_all=False))
        elif kind in (list, tuple, dict):
            yield from self._container(path, value, depth)
        elif isinstance(value, MethodType):
            yield from self._value(f"{path}.__func__", value.__func__, depth + 1)
            yield from self._value(f"{path}.__self__", value.__self__, depth + 1)
        elif (inner := unwrapped(value)) is not None:
            yield path, Fact((kind, Same(value)))
            yield from self._value(f"{path}.__wrapped__", inner, depth + 1)
        elif _is_plain_object(value):
            yield path, Fact((kind, "an object"))
            self._walk.add_class(kind)
            is_all = not holds_model(value)
            self._objects.append(_Named(path, value, depth, is_all=is_all))
        else:
            self._walk.begin()
            yield path, self._walk.fact(path, value)

    def _container(
        self, path: str, value: Any, depth: int
    ) -> Iterator[tuple[str, Fact]]:
        if len(value) > self._left:
            yield path, self._walk.stop(path, type(value))
        if isinstance(value, dict):
            self._walk.hold(value, HeldDict(path, value))
            items = [(key_text(key), item) for key, item in value.items()]
        else:
            if isinstance(value, list):
                self._walk.hold(value, HeldItems(path, value))
            items = [(str(place), item) for place, item in enumerate(value)]
        if len(items) <= self._left:
            yield path, Fact((type(value), tuple(key for key, _ in items)))
            for key, item in items:
                yield from self._value(f"{path}[{key}]", item, depth + 1)

    def _attributes(self, named: _Named) -> Iterator[tuple[str, Fact]]:
        table = vars(named.value)
        names = set(table) if self._takes_all(named) else self._names & table.keys()
        for key in sorted(names - named.done):
            named.done.add(key)
            yield from self._value(f"{named.path}.{key}", table[key], named.depth + 1)

    def _takes_all(self, named: _Named) -> bool:
        return self._is_open and named.is_all

    def _hold_objects(self) -> None:
        names = frozenset(self._names)
        for each in self._objects:
            only = None if self._takes_all(each) else names
            held = HeldAttributes(each.path, each.value, only=only)
            self._walk.hold(each.value, held)
            if self._is_open and only and not isinstance(each.value, ModuleType):
                text = "it holds a model: only attributes that the code names"
                self._walk.beyond.append(f"{each.path} ({text})")


def _is_plain_object(value: Any) -> bool:
    """Whether a value is an object of the user's own, with attributes."""
    kind = type(value)
    is_more = isinstance(value, (nn.Module, Optimizer, list, tuple, dict, set))
    return not is_more and hasattr(value, "__dict__") and _is_users_class(kind)


def _is_users_class(kind: type) -> bool:
    """Whether a class is the user's own: of no installed package."""
    if is_closed(kind):
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is None or is_users_file(file)
