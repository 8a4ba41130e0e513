"""What lists, dicts, objects and the like held when they were looked at.

One record for each of them tells whether it still holds the very same objects (before each
call of a step), what is other than it was (after a capture), and puts that back.
"""

import pickle
import random
import sys
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass
from operator import attrgetter, is_
from types import CellType
from typing import Any, Protocol

import torch

MISSING: Any = object()  # in the place of what is not there
MOST_ITEMS = 4096  # of one container that are compared before each call


@dataclass(frozen=True, slots=True)
class Difference:
    """One place that does not hold what it held.

    Attributes:
        path: Where.
        key: Its key among what is held; None for the holder as a whole: its items.
        before: What was there, or ``MISSING``.
        now: What is there now.
    """

    path: str
    key: Any
    before: Any
    now: Any


class Held(Protocol):
    """One holder, and what it held."""

    def holds(self) -> bool:
        """Whether it holds the same objects."""

    def differences(self) -> Iterator[Difference]:
        """What is other than it was."""

    def places(self) -> Iterator[tuple[Any, Any]]:
        """Where it held something, and what; the key None with all that is held."""

    def put(self, key: Any, value: Any) -> None:
        """Make it hold a value, or ``MISSING``, at such a place."""


# ----------------------------------------------------------------------------
# Comparisons.


def is_same_table(table: Mapping[Any, Any], keys: list[Any], values: list[Any]) -> bool:
    """Whether a table holds the same objects under the same keys."""
    return (
        len(table) == len(values)
        and all(map(is_, table.values(), values))
        and all(map(is_, table, keys))
    )


def is_same_items(now: Collection[Any], before: Sequence[Any]) -> bool:
    """Whether what can be counted and iterated holds the same objects."""
    return len(now) == len(before) and all(map(is_, now, before))


_SIMPLE = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or the like, or a list of them."""
    return (
        value is MISSING
        or isinstance(value, _SIMPLE)
        or (type(value) in (tuple, list) and all(map(is_plain, value)))
    )


def is_alike(before: Any, now: Any) -> bool:
    """Whether two values are one object, or equal plain values of one type.

    >>> is_alike(1, 1.0), is_alike((1, "a"), (1, "a")), is_alike([1], [1])
    (False, True, True)
    """
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    if isinstance(before, (tuple, list)):
        return _are_alike(before, now)
    return isinstance(before, _SIMPLE) and bool(before == now)


def _are_alike(before: Collection[Any], now: Collection[Any]) -> bool:
    return len(before) == len(now) and all(map(is_alike, before, now))


def describe_change(difference: Difference) -> str:
    """``path: before -> now`` where both can be printed."""
    path, before, now = difference.path, difference.before, difference.now
    if difference.key is None:
        return f"{path}: its items"
    if isinstance(before, _SIMPLE) and isinstance(now, _SIMPLE):
        return f"{path}: {before!r} -> {now!r}"
    return f"{path}: new" if before is MISSING else path


# ----------------------------------------------------------------------------
# Containers and attributes.


class HeldItems:
    """A list, a deque or a set."""

    __slots__ = ("_before", "_items", "name")

    def __init__(self, name: str, items: Any) -> None:
        self.name, self._items, self._before = name, items, list(items)

    @property
    def is_frozen(self) -> bool:
        """Whether nothing else can be put in."""
        return isinstance(self._items, frozenset)

    def holds(self) -> bool:
        """Whether it holds the same objects; of very many, as many as before."""
        if len(self._before) > MOST_ITEMS:
            return len(self._items) == len(self._before)
        return is_same_items(self._items, self._before)

    def differences(self) -> Iterator[Difference]:
        """Its items, as a whole."""
        if not _are_alike(self._before, self._items):
            yield Difference(self.name, None, self._before, self._items)

    def places(self) -> Iterator[tuple[Any, Any]]:
        """Its items, as a whole."""
        yield None, self._before

    def put(self, key: Any, value: Any) -> None:
        """Fill it with other items."""
        self._items.clear()
        is_ordered = isinstance(self._items, (list, deque))
        (self._items.extend if is_ordered else self._items.update)(value)


class HeldDict:
    """A dict."""

    __slots__ = ("_keys", "_name", "_table", "_values")

    def __init__(self, name: str, table: Any) -> None:
        self._name, self._table = name, table
        self._keys, self._values = list(table), list(table.values())

    def holds(self) -> bool:
        """Whether it holds the same objects; of very many, as many as before."""
        if len(self._keys) > MOST_ITEMS:
            return len(self._table) == len(self._keys)
        return is_same_table(self._table, self._keys, self._values)

    def differences(self) -> Iterator[Difference]:
        """Its items, as a whole."""
        is_same = is_same_items(self._table, self._keys)
        if not is_same or not _are_alike(self._values, self._table.values()):
            before = dict(zip(self._keys, self._values, strict=True))
            yield Difference(self._name, None, before, self._table)

    def places(self) -> Iterator[tuple[Any, Any]]:
        """Its items, as a whole."""
        yield None, dict(zip(self._keys, self._values, strict=True))

    def put(self, key: Any, value: Any) -> None:
        """Fill it with other items."""
        if isinstance(self._table, MutableMapping):  # and not a view of one
            self._table.clear()
            self._table.update(value)


class HeldAttributes:
    """Attributes of an object, a class or a file.

    Args:
        name: The path of the holder.
        holder: The object.
        table: Where it has them; its ``__dict__`` by default.
        only: The attributes that matter; all by default.
        ignored: Attributes that do not matter.
    """

    __slots__ = (
        *("_holder", "_ignored", "_keys", "_kind", "_name", "_num"),
        *("_only", "_table", "_values"),
    )

    def __init__(
        self,
        name: str,
        holder: Any,
        *,
        table: Mapping[str, Any] | None = None,
        only: Container[str] | None = None,
        ignored: Collection[str] = (),
    ) -> None:
        self._name, self._holder, self._kind = name, holder, type(holder)
        self._table: Mapping[str, Any] = vars(holder) if table is None else table
        self._only, self._ignored = only, frozenset(ignored)
        self._keys = [key for key in self._table if self._matters(key)]
        self._values = [self._table[key] for key in self._keys]
        self._num = len(self._table)

    def _matters(self, key: str) -> bool:
        return key not in self._ignored and (self._only is None or key in self._only)

    def holds(self) -> bool:
        """Whether its class and its attributes are the same, and none is new."""
        table = self._table
        if len(table) != self._num or type(self._holder) is not self._kind:
            return False
        if len(self._keys) == self._num:
            return is_same_table(table, self._keys, self._values)
        return all(map(is_, map(table.get, self._keys), self._values))

    def differences(self) -> Iterator[Difference]:
        """Each attribute that is another one, new, or gone."""
        before = dict(zip(self._keys, self._values, strict=True))
        for key in {**before, **self._table}:
            was, now = (table.get(key, MISSING) for table in (before, self._table))
            if self._matters(key) and not is_alike(was, now):
                yield Difference(f"{self._name}.{key}", key, was, now)

    def places(self) -> Iterator[tuple[Any, Any]]:
        """Each attribute that matters."""
        yield from zip(self._keys, self._values, strict=True)

    def put(self, key: Any, value: Any) -> None:
        """Set an attribute, or delete it."""
        if isinstance(self._table, dict):
            if value is MISSING:
                del self._table[key]
            else:
                self._table[key] = value
        elif value is MISSING:
            delattr(self._holder, key)
        else:
            setattr(self._holder, key, value)


class HeldSlots:
    """Attributes of an object that has ``__slots__``, those that are set."""

    __slots__ = ("_before", "_holder", "_name", "_read")

    def __init__(
        self, name: str, holder: Any, read: Callable[[Any], dict[str, Any]]
    ) -> None:
        self._name, self._holder, self._read = name, holder, read
        self._before = read(holder)

    def holds(self) -> bool:
        """Whether they are the same objects."""
        now = self._read(self._holder)
        return is_same_items(list(now.values()), list(self._before.values()))

    def differences(self) -> Iterator[Difference]:
        """Each attribute that is another one, new, or gone."""
        now = self._read(self._holder)
        for key in {**self._before, **now}:
            was, found = self._before.get(key, MISSING), now.get(key, MISSING)
            if not is_alike(was, found):
                yield Difference(f"{self._name}.{key}", key, was, found)

    def places(self) -> Iterator[tuple[Any, Any]]:
        """Each attribute that is set."""
        yield from self._before.items()

    def put(self, key: Any, value: Any) -> None:
        """Set an attribute, or delete it."""
        if value is MISSING:
            delattr(self._holder, key)
        else:
            object.__setattr__(self._holder, key, value)


# ----------------------------------------------------------------------------
# Variables of functions.


class HeldGlobals:
    """The variables of its file that a function names."""

    __slots__ = ("_keys", "_name", "_table", "_values")

    def __init__(self, name: str, table: dict[str, Any], keys: Collection[str]) -> None:
        self._name, self._table, self._keys = name, table, tuple(keys)
        self._values = list(map(table.get, self._keys))

    def holds(self) -> bool:
        """Whether they are the same objects."""
        return all(map(is_, map(self._table.get, self._keys), self._values))

    def differences(self) -> Iterator[Difference]:
        """Each variable that is another one, new, or gone."""
        for key, was in zip(self._keys, self._values, strict=True):
            if not is_alike(was, now := self._table.get(key)):
                yield Difference(f"{self._name}.{key}", key, was, now)

    def places(self) -> Iterator[tuple[Any, Any]]:
        """Each variable."""
        yield from zip(self._keys, self._values, strict=True)

    def put(self, key: Any, value: Any) -> None:
        """Set a variable."""
        self._table[key] = value


_contents = attrgetter("cell_contents")


class HeldCells:
    """The variables around a function that it names."""

    __slots__ = ("_cells", "_name", "_names", "_values")

    def __init__(
        self, name: str, names: Sequence[str], cells: Sequence[CellType]
    ) -> None:
        found = [
            (variable, cell, contents)
            for variable, cell in zip(names, cells, strict=True)
            if (contents := contents_of(cell)) is not MISSING
        ]
        self._name = name
        self._names = [variable for variable, _, _ in found]
        self._cells = [cell for _, cell, _ in found]
        self._values = [contents for _, _, contents in found]

    def holds(self) -> bool:
        """Whether they are the same objects."""
        try:
            return all(map(is_, map(_contents, self._cells), self._values))
        except ValueError:  # a variable that was deleted
            return False

    def differences(self) -> Iterator[Difference]:
        """Each variable that is another one."""
        for number, cell in enumerate(self._cells):
            was, now = self._values[number], contents_of(cell)
            if not is_alike(was, now):
                path = f"{self._names[number]} around {self._name}"
                yield Difference(path, number, was, now)

    def places(self) -> Iterator[tuple[Any, Any]]:
        """Each variable, by its number."""
        yield from enumerate(self._values)

    def put(self, key: Any, value: Any) -> None:
        """Set a variable."""
        self._cells[key].cell_contents = value


def contents_of(cell: CellType) -> Any:
    """What is in the variable around a function; ``MISSING`` before it is set."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


# ----------------------------------------------------------------------------
# Values that change in place: arrays, and random generators of the user's own.


class HeldArray:
    """A NumPy array; a large one is not guarded, only what a capture writes is seen."""

    __slots__ = ("_array", "_before", "_is_guarded", "_name")

    def __init__(self, name: str, array: Any, *, is_guarded: bool) -> None:
        self._name, self._array, self._is_guarded = name, array, is_guarded
        self._before = array.copy()

    def holds(self) -> bool:
        """Whether it has the same values."""
        return not self._is_guarded or self._has_same_values()

    def _has_same_values(self) -> bool:
        return bool(self._array.tobytes() == self._before.tobytes())

    def differences(self) -> Iterator[Difference]:
        """Its values, as a whole."""
        if not self._has_same_values():
            yield Difference(self._name, None, self._before, self._array)

    def places(self) -> Iterator[tuple[Any, Any]]:
        """None: numbers, and no objects."""
        yield from ()

    def put(self, key: Any, value: Any) -> None:
        """Fill it with other values."""
        self._array[...] = value


class HeldRandom:
    """A random generator of Python or NumPy: drawing from it changes its state."""

    __slots__ = ("_before", "_generator", "_name")

    def __init__(self, name: str, generator: Any) -> None:
        self._name, self._generator = name, generator
        self._before = state_of_generator(generator)

    def holds(self) -> bool:
        """Yes: a step that draws from it is refused, to others its state says nothing."""
        return True

    def differences(self) -> Iterator[Difference]:
        """Its state, where something was drawn."""
        now = state_of_generator(self._generator)
        if pickle.dumps(now) != pickle.dumps(self._before):
            yield Difference(f"the state of {self._name}", "", self._before, now)

    def places(self) -> Iterator[tuple[Any, Any]]:
        """None: numbers, and no objects."""
        yield from ()

    def put(self, key: Any, value: Any) -> None:
        """Set it to another state."""
        generator = self._generator
        if hasattr(generator, "setstate"):
            generator.setstate(value)
        elif hasattr(generator, "set_state"):
            generator.set_state(value)
        else:
            generator.bit_generator.state = value


def is_generator(value: Any) -> bool:
    """Whether a value is a random generator of Python or NumPy.

    >>> is_generator(random.Random(0)), is_generator(3)
    (True, False)
    """
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    numpy = sys.modules.get("numpy.random")
    kinds: Any = () if numpy is None else (numpy.Generator, numpy.RandomState)
    return isinstance(value, kinds)


def state_of_generator(generator: Any) -> Any:
    """The state of a random generator, or of a module that has one."""
    if hasattr(generator, "getstate"):
        return generator.getstate()
    if hasattr(generator, "get_state"):
        kind, keys, *rest = generator.get_state()
        return (kind, keys.copy(), *rest)
    return generator.bit_generator.state
