"""From a value to all that is in it: the facts about it, and what could change.

Only so much is looked at; what is beyond is listed.
"""

import argparse
import functools
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from io import IOBase
from types import (
    FunctionType,
    MappingProxyType,
    MethodType,
    SimpleNamespace,
)
from typing import Any, final

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from torchspmd.step.capture.code import is_users_function
from torchspmd.step.capture.facts import Fact, Parts, Same, has_value, simple_fact
from torchspmd.step.capture.held import (
    Held,
    HeldArray,
    HeldAttributes,
    HeldDict,
    HeldItems,
    HeldRandom,
    HeldSlots,
    is_generator,
)

MAX_LEAVES = 512  # of each module, argument and class
MAX_DEPTH = 6
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


_MAX_ARRAY_BYTES = 4096  # compared before each call
_MAX_WRITTEN_BYTES = 1 << 24  # compared before and after a capture
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
        held: For each container and object, what it held.
        classes: User classes of what was found; their attributes can change too.
        functions: User functions that were found, by identity, with a name for each.
        generators: Random generators of torch, by identity.
        iterators: What gives another value whenever it is asked, by name.
        scalers: Gradient scalers that are in no argument, by name.
        beyond: What was not looked at.
    """

    def __init__(self, known: Mapping[int, str]) -> None:
        self._known = known
        self._facts: dict[tuple[int, int], Fact] = {}
        self._open: dict[int, int] = {}  # what is being looked at, for cycles
        self._left = MAX_LEAVES
        self._done: set[type] = set()
        self.held: dict[tuple[int, type], Held] = {}
        self.classes: dict[type, None] = {}
        self.functions: dict[int, tuple[str, FunctionType]] = {}
        self.generators: dict[int, torch.Generator] = {}
        self.iterators: dict[int, str] = {}
        self.scalers: dict[int, str] = {}
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
            self.add_function(name, value)
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
            if not is_closed(each):
                self.classes[each] = None

    def add_function(self, name: str, value: Any) -> None:
        """Note a function, if it is the user's: what its code names can change too."""
        if is_users_function(value):
            self.functions.setdefault(id(value), (name, value))

    def is_known(self, value: Any) -> bool:
        """Whether a value is a module or an optimizer that is guarded by itself."""
        return id(value) in self._known

    def class_facts(self) -> Iterator[tuple[str, Fact]]:
        """What is guarded about each class that was noted since the last time."""
        while todo := [kind for kind in self.classes if kind not in self._done]:
            for kind in todo:
                self._done.add(kind)
                self.begin()
                name = f"class {kind.__qualname__}"
                self.hold(kind, HeldAttributes(name, kind))
                yield name, self._inside(name, kind, _class_entries(kind), 0)

    def _compound(self, name: str, value: Any, depth: int) -> Fact:
        parts: Iterable[tuple[str, Any]]
        if isinstance(value, (list, tuple, deque)):
            parts = ((f"[{place}]", item) for place, item in enumerate(value))
            if not isinstance(value, tuple):
                self.hold(value, HeldItems(name, value))
        elif isinstance(value, (dict, MappingProxyType)):
            parts = ((f"[{key_text(key)}]", item) for key, item in value.items())
            self.hold(value, HeldDict(name, value))
        elif isinstance(value, (set, frozenset)):
            self.hold(value, HeldItems(name, value))
            return self._set(name, value, depth)
        elif isinstance(value, functools.partial):
            names = (".func", ".args", ".keywords")
            whole = (value.func, value.args, value.keywords)
            parts = zip(names, whole, strict=True)
        elif isinstance(value, MethodType):
            parts = ((".__func__", value.__func__), (".__self__", value.__self__))
        else:
            return self._object(name, value, depth)
        if not is_closed(type(value)):  # a user's list or dict may have attributes
            parts = (*parts, *self._attributes(name, value))
        return self._inside(name, type(value), parts, depth)

    def _object(self, name: str, value: Any, depth: int) -> Fact:
        kind = type(value)
        if is_generator(value):
            self.hold(value, HeldRandom(name, value))
            return Fact((kind, Same(value)))
        if isinstance(value, torch.Generator):
            self.generators[id(value)] = value
        if _is_iterator(value):
            self.iterators.setdefault(id(value), name)
        if isinstance(value, GradScaler) and value.is_enabled():
            self.scalers.setdefault(id(value), name)
        if any(each.__module__ == "numpy" for each in kind.__mro__):
            return self._array(name, value)
        is_module = isinstance(value, nn.Module)
        if not is_module and not is_closed(kind) and holds_model(value):
            self.beyond.append(f"{name} (it holds a model: by identity)")
        elif is_module or isinstance(value, _OPEN) or not is_closed(kind):
            parts = self._attributes(name, value)
            if parts or hasattr(value, "__dict__"):
                return self._inside(name, kind, parts, depth)
        self._left -= 1
        return Fact((kind, value if has_value(value) else Same(value)))

    def _attributes(self, name: str, value: Any) -> tuple[tuple[str, Any], ...]:
        self.add_class(type(value))
        table: dict[str, Any] = getattr(value, "__dict__", {})
        if table or hasattr(value, "__dict__"):
            self.hold(value, HeldAttributes(name, value))
        if slots := _slots(value):
            self.hold(value, HeldSlots(name, value, _slots))
        found = {**table, **slots}
        skipped: frozenset[str] = frozenset()
        if isinstance(value, nn.Module):
            skipped = BOOKS_OF_MODULES - {"_modules"}
        return tuple((f".{k}", found[k]) for k in sorted(found) if k not in skipped)

    def _inside(
        self, name: str, kind: type, parts: Iterable[tuple[str, Any]], depth: int
    ) -> Fact:
        if depth >= MAX_DEPTH:
            return self.stop(name, kind)
        facts = []
        for key, item in parts:
            if self._left <= 0:
                facts.append(("", self.stop(name, kind)))
                break
            facts.append((key, self.fact(f"{name}{key}", item, depth + 1)))
        return Fact((kind, Parts(facts)))

    def _set(self, name: str, value: Any, depth: int) -> Fact:
        if depth >= MAX_DEPTH or len(value) > self._left:
            return self.stop(name, type(value))
        facts = frozenset(self.fact(name, item, depth + 1) for item in value)
        return Fact((type(value), facts))

    def _array(self, name: str, value: Any) -> Fact:
        self._left -= 1
        if not hasattr(value, "tobytes"):  # a dtype, a generator
            return Fact((type(value), value if has_value(value) else Same(value)))
        if value.dtype.hasobject or value.nbytes > _MAX_WRITTEN_BYTES:
            return self.stop(name, type(value))
        is_small = value.nbytes <= _MAX_ARRAY_BYTES
        self.hold(value, HeldArray(name, value, is_guarded=is_small))
        if not is_small:
            return self.stop(name, type(value))
        return Fact((type(value), (str(value.dtype), value.shape, value.tobytes())))

    def hold(self, holder: Any, held: Held) -> None:
        """Keep what a holder holds now."""
        self.held[id(holder), type(held)] = held

    def stop(self, name: str, kind: type) -> Fact:
        """Note what is not looked at."""
        if name not in self.beyond:
            self.beyond.append(name)
        return Fact((kind, "beyond what is guarded"))


def _is_iterator(value: Any) -> bool:
    """Whether a value gives another one whenever it is asked, and shows no state."""
    has_next = hasattr(type(value), "__next__") and is_closed(type(value))
    return has_next and not isinstance(value, IOBase)


def key_text(key: Any) -> str:
    """A key of a dict as text; of an object, by identity."""
    return repr(key) if simple_fact(key) else f"{type(key).__name__} at {id(key):#x}"


def is_closed(kind: type) -> bool:
    """Whether the objects of a class are not looked into."""
    return str(kind.__module__).partition(".")[0] in _CLOSED


def _slots(value: Any) -> dict[str, Any]:
    names = [
        name
        for kind in type(value).__mro__
        if not is_closed(kind)
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


def _class_entries(kind: type) -> Iterator[tuple[str, Any]]:
    for key, value in vars(kind).items():
        if isinstance(value, FunctionType):
            yield f".{key}", Same(value)  # what its code names matters if it is called
        elif not key.startswith("__"):
            yield f".{key}", value
