"""What lists, dicts, objects and the like hold at a moment.

One snapshot of each of them tells whether it still holds the very same objects (before each
call of a step), what is other than it was (after a capture), and puts that back.
"""

import os
import pickle
import random
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import is_
from types import CellType, MappingProxyType
from typing import Any

import torch

from torchspmd import _torch
from torchspmd.step.capture.user_code import attribute_of

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


class Snapshot(ABC):
    """One holder, and what it held."""

    __slots__ = ()

    @property
    @abstractmethod
    def holder(self) -> Any:
        """What holds it."""

    @abstractmethod
    def holds(self) -> bool:
        """Whether it holds the same objects."""

    @abstractmethod
    def differences(self) -> Iterator[Difference]:
        """What is other than it was; equal plain values are no difference."""

    def places(self) -> Iterator[tuple[Any, Any]]:
        """The key and the object of each place; key None for a container's items."""
        yield from ()

    @abstractmethod
    def put(self, key: Any, value: Any) -> None:
        """Make it hold a value, or ``MISSING``, at such a place."""

    def forget_stored(self) -> None:
        """Let go of what a step has stored there, and compare only its form."""
        return


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
# Tensors that a step has stored in an attribute: others in each call, of one form.

_STORED = "_torchspmd_stored"


def mark_stored(tensor: torch.Tensor, role: str) -> None:
    """Note that a step has put a tensor into an attribute, and what it is to the next."""
    vars(tensor)[_STORED] = role


def stored_role(value: Any) -> str:
    """What a tensor that a step has stored is to the next call; empty for others."""
    return str(getattr(value, _STORED, "")) if isinstance(value, torch.Tensor) else ""


def stored_form(value: Any) -> str | None:
    """What is guarded about what a step has stored; None for anything else.

    The form of one tensor is guarded with the inputs, among which it is.
    """
    if isinstance(value, torch.Tensor):
        return "a tensor" if stored_role(value) else None
    if not isinstance(value, _TREES) or not value:
        return None
    leaves, structure = _torch.flatten_tree(value)
    if not any(map(stored_role, leaves)):
        return None
    forms = [
        f"{leaf.dtype}{list(leaf.shape)}" if stored_role(leaf) else repr(leaf)
        for leaf in leaves
    ]
    return f"{structure} of {', '.join(forms)}"


_TREES = (tuple, list, dict)


class _Stored:
    """In the place of what a step has stored: what is guarded about it."""

    __slots__ = ("form",)

    def __init__(self, form: str) -> None:
        self.form = form


def without_stored(values: Sequence[Any]) -> list[Any]:
    """The same objects, but of what a step has stored only the form."""
    forms = map(stored_form, values)
    return [
        value if form is None else _Stored(form)
        for value, form in zip(values, forms, strict=True)
    ]


def _is_as_before(now: Any, before: Any) -> bool:
    if isinstance(before, _Stored):
        return stored_form(now) == before.form
    return now is before


# ----------------------------------------------------------------------------
# Containers, as a whole.


class Items(Snapshot):
    """The items of a list, a deque, a set or a dict."""

    __slots__ = ("_container", "_form", "_keys", "_path", "_values")

    def __init__(self, path: str, container: Any) -> None:
        self._path, self._container = path, container
        is_table = isinstance(container, Mapping)
        self._keys = list(container) if is_table else None
        self._values = list(container.values() if is_table else container)
        self._form: str | None = None  # of items that a step has stored

    @property
    def holder(self) -> Any:
        """The container."""
        return self._container

    def forget_stored(self) -> None:
        """Let go of items that a step has stored, and compare only their form."""
        self._form = stored_form(self._container)
        if self._form is not None:
            self._keys, self._values = None, []

    def holds(self) -> bool:
        """Whether it holds the same objects; of very many, as many as before."""
        if self._form is not None:
            return stored_form(self._container) == self._form
        if len(self._values) > MOST_ITEMS:
            return len(self._container) == len(self._values)
        if self._keys is not None:
            return is_same_table(self._container, self._keys, self._values)
        return is_same_items(self._container, self._values)

    def differences(self) -> Iterator[Difference]:
        """Its items, as a whole."""
        now, is_same = self._container, True
        if self._keys is not None:
            now, is_same = now.values(), is_same_items(now, self._keys)
        if not is_same or not _are_alike(self._values, now):
            yield Difference(self._path, None, self._before(), self._container)

    def _before(self) -> Any:
        if self._keys is None:
            return self._values
        return dict(zip(self._keys, self._values, strict=True))

    def places(self) -> Iterator[tuple[Any, Any]]:
        """Its items, as a whole."""
        yield None, self._before()

    def put(self, key: Any, value: Any) -> None:
        """Fill it with other items."""
        if isinstance(self._container, MappingProxyType):
            return
        self._container.clear()
        is_ordered = isinstance(self._container, (list, deque))
        (self._container.extend if is_ordered else self._container.update)(value)


# ----------------------------------------------------------------------------
# Names: attributes, slots, globals, variables around a function.


class Attributes(Snapshot):
    """Attributes of an object, a class or a file.

    Args:
        path: The path of the holder.
        holder: The object.
        table: Where it has them; its ``__dict__`` by default.
        names: Those that matter, whether they are there or not; all by default.
        matters: Whether a change of an attribute matters.
    """

    __slots__ = (
        *("_holder", "_keys", "_kind", "_matters", "_path", "_table", "_values"),
        *("_has_names", "_has_stored"),
    )

    def __init__(
        self,
        path: str,
        holder: Any,
        *,
        table: Mapping[str, Any] | None = None,
        names: Collection[str] | None = None,
        matters: Callable[[str], bool] | None = None,
    ) -> None:
        self._path, self._holder, self._kind = path, holder, type(holder)
        self._table, self._matters, self._has_names = table, matters, names is not None
        found = self._read()
        self._keys = list(found if names is None else names)
        self._values = self._get(found)
        self._has_stored = False

    def _read(self) -> Mapping[str, Any]:
        return vars(self._holder) if self._table is None else self._table

    def _get(self, table: Mapping[str, Any]) -> list[Any]:
        return list(map(table.get, self._keys, repeat(MISSING)))

    def holds(self) -> bool:
        """Whether its class and its attributes are the same, and none is new."""
        if type(self._holder) is not self._kind:
            return False
        table = self._read()
        if self._has_stored:
            is_same = self._has_names or is_same_items(table, self._keys)
            return is_same and all(map(_is_as_before, self._get(table), self._values))
        if self._has_names:
            return all(map(is_, self._get(table), self._values))
        return is_same_table(table, self._keys, self._values)

    def forget_stored(self) -> None:
        """Let go of what a step has stored there, and compare only its form."""
        values = without_stored(self._values)
        self._has_stored = not all(map(is_, values, self._values))
        self._values = values

    def differences(self) -> Iterator[Difference]:
        """Each attribute that is another one, new, or gone."""
        before, table = dict(zip(self._keys, self._values, strict=True)), self._read()
        for key in before if self._has_names else {**before, **table}:
            was, now = before.get(key, MISSING), table.get(key, MISSING)
            if not is_alike(was, now) and (self._matters is None or self._matters(key)):
                yield Difference(self._path_of(key), key, was, now)

    def _path_of(self, key: str) -> str:
        return f"{self._path}.{key}"

    @property
    def holder(self) -> Any:
        """What has the attributes."""
        return self._holder

    def places(self) -> Iterator[tuple[Any, Any]]:
        """Each attribute that was there."""
        for key, value in zip(self._keys, self._values, strict=True):
            if value is not MISSING:
                yield key, value

    def put(self, key: Any, value: Any) -> None:
        """Set an attribute, or delete it."""
        table = self._read()
        if isinstance(table, dict):
            if value is MISSING:
                del table[key]
            else:
                table[key] = value
        elif value is MISSING:
            delattr(self._holder, key)
        else:
            setattr(self._holder, key, value)


class Slots(Attributes):
    """Attributes of an object that has ``__slots__``, those that are set."""

    __slots__ = ("_names",)

    def __init__(self, path: str, holder: Any, names: Sequence[str]) -> None:
        self._names = names
        super().__init__(path, holder)

    def _read(self) -> Mapping[str, Any]:
        found = ((n, attribute_of(self._holder, n, MISSING)) for n in self._names)
        return {name: value for name, value in found if value is not MISSING}

    def put(self, key: Any, value: Any) -> None:
        """Set an attribute, or delete it, also where the class is frozen."""
        if value is MISSING:
            object.__delattr__(self._holder, key)
        else:
            object.__setattr__(self._holder, key, value)


class Cells(Attributes):
    """The variables around a function that it names."""

    __slots__ = ()

    def __init__(self, path: str, cells: Mapping[str, CellType]) -> None:
        super().__init__(path, cells)

    def _read(self) -> Mapping[str, Any]:
        found = ((name, contents_of(cell)) for name, cell in self._holder.items())
        return {name: value for name, value in found if value is not MISSING}

    def _path_of(self, key: str) -> str:
        return f"{key} around {self._path}"

    def put(self, key: Any, value: Any) -> None:
        """Set a variable, or delete it."""
        if value is MISSING:
            del self._holder[key].cell_contents
        else:
            self._holder[key].cell_contents = value


def contents_of(cell: CellType) -> Any:
    """What is in the variable around a function; ``MISSING`` before it is set."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


class Environment(Attributes):
    """Variables of the environment, which gives another text whenever it is asked."""

    __slots__ = ()

    def __init__(self, names: Collection[str]) -> None:
        super().__init__("os.environ", None, table=os.environ, names=names)

    def holds(self) -> bool:
        """Whether the variables have equal values."""
        return self._get(os.environ) == self._values

    def put(self, key: Any, value: Any) -> None:
        """Set a variable, or delete it."""
        if value is MISSING:
            del os.environ[key]
        else:
            os.environ[key] = value


class ContextValue(Attributes):
    """The value of a context variable."""

    __slots__ = ()

    def _read(self) -> Mapping[str, Any]:
        value = self._holder.get(MISSING)
        return {} if value is MISSING else {"get()": value}

    def put(self, key: Any, value: Any) -> None:
        """Set it; one that had no value cannot lose it again."""
        if value is not MISSING:
            self._holder.set(value)


# ----------------------------------------------------------------------------
# Values that change in place: arrays, and random generators of the user's own.


class Array(Snapshot):
    """A NumPy array; a large one is not guarded, only what a capture writes is seen."""

    __slots__ = ("_array", "_before", "_is_guarded", "_path")

    def __init__(self, path: str, array: Any, *, is_guarded: bool) -> None:
        self._path, self._array, self._is_guarded = path, array, is_guarded
        self._before = array.copy()

    @property
    def holder(self) -> Any:
        """The array."""
        return self._array

    def holds(self) -> bool:
        """Whether it has the same values."""
        return not self._is_guarded or self._has_same_values()

    def _has_same_values(self) -> bool:
        return bool(self._array.tobytes() == self._before.tobytes())

    def differences(self) -> Iterator[Difference]:
        """Its values, as a whole."""
        if not self._has_same_values():
            yield Difference(self._path, None, self._before, self._array)

    def put(self, key: Any, value: Any) -> None:
        """Fill it with other values."""
        self._array[...] = value


class Buffer(Snapshot):
    """Memory of Python's own library: a bytearray, an array, a number of ctypes."""

    __slots__ = ("_before", "_buffer", "_path")

    def __init__(self, path: str, buffer: Any) -> None:
        self._path, self._buffer = path, buffer
        self._before = bytes(memoryview(buffer))

    @property
    def holder(self) -> Any:
        """The memory."""
        return self._buffer

    def holds(self) -> bool:
        """Whether it has the same bytes."""
        return bytes(memoryview(self._buffer)) == self._before

    def differences(self) -> Iterator[Difference]:
        """Its bytes, as a whole."""
        if not self.holds():
            yield Difference(self._path, None, self._before, self._buffer)

    def put(self, key: Any, value: Any) -> None:
        """Fill it with other bytes."""
        memoryview(self._buffer).cast("B")[:] = value


class RandomState(Snapshot):
    """A random generator of Python or NumPy: drawing from it changes its state."""

    __slots__ = ("_before", "_generator", "_path")

    def __init__(self, path: str, generator: Any) -> None:
        self._path, self._generator = path, generator
        self._before = state_of_generator(generator)

    @property
    def holder(self) -> Any:
        """The generator."""
        return self._generator

    def holds(self) -> bool:
        """Yes: a step that draws from it is refused, to others its state says nothing."""
        return True

    def differences(self) -> Iterator[Difference]:
        """Its state, where something was drawn."""
        now = state_of_generator(self._generator)
        if pickle.dumps(now) != pickle.dumps(self._before):
            yield Difference(f"the state of {self._path}", "", self._before, now)

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
