"""What is guarded about one value, as a fact that can be compared and printed.

Numbers, strings and the like go by value, containers and objects with attributes by what
is in them, functions and all else by identity. Tensors are no data: they are inputs of a
graph, or refused by it.
"""

import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

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
