"""Choices that an optimizer, or a module, makes by the values of counters become guards.

RAdam, for instance, rectifies its update from some step on: it adds one to a counter,
reads it, and chooses. While it is traced, operators on the single numbers of its state are
also run on their real values. What is read becomes a symbol that has this value, so that
torch can choose and notes what it assumed; before each later call the few operators run
again on the state of that call, and the assumptions are checked. Where a step needs it, the
same is done for buffers that are one number (``if self.initialized:``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import torch

from torchspmd import _torch
from torchspmd.step.capture.inventory import Inventory
from torchspmd.step.capture.optimizer_rules import is_spread, refuse_read
from torchspmd.step.capture.trace_modes import FunctionMode

# What counters are made of. Anything else is not followed: what is read from its result
# has no value while the step is traced, and a choice by it is refused.
_MAKES = frozenset({"full", "ones", "scalar_tensor", "tensor", "as_tensor", "zeros"})
_COUNTS = frozenset(
    {
        *("__add__", "__iadd__", "__imul__", "__isub__", "__mul__", "__radd__"),
        *("add", "add_", "clone", "copy_", "detach", "fill_", "mul", "mul_"),
        *("sub", "sub_", "zero_", "_foreach_add_", "_foreach_copy_", "_foreach_mul_"),
    }
)
# What choices by buffers are made of, beside that.
_COMPARES = frozenset(
    {
        *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__mod__"),
        *("eq", "ne", "lt", "le", "gt", "ge", "logical_not", "logical_and"),
        *("logical_or", "__and__", "__or__", "__invert__", "__floordiv__", "remainder"),
        *("all", "any", "logical_or_", "logical_and_", "__truediv__", "div", "detach"),
        *(
            "zeros_like",
            "ones_like",
            "full_like",
            "__getitem__",
            "float",
            "long",
            "int",
            "bool",
        ),
    }
)


_DATA: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]  # a property


def _truth(value: torch.Tensor) -> int:
    return int(bool(value))


@dataclass(frozen=True, slots=True)
class _Place:
    """A value of the tape, where a call takes it."""

    index: int


@dataclass(frozen=True, slots=True)
class _Call:
    """One call on single numbers, and the places of the values that it adds."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    makes: tuple[int, ...]

    def run(self, values: dict[int, Any]) -> None:
        """Run it on the values of a tape, and add what it makes."""
        # Before every step, for every parameter: nothing slow here.
        args = [_filled(each, values) for each in self.args]
        kwargs = {key: _filled(each, values) for key, each in self.kwargs.items()}
        made = self.function(*args, **kwargs)
        if self.makes:
            several = isinstance(made, (list, tuple))
            values.update(zip(self.makes, made if several else (made,), strict=True))

    @property
    def takes(self) -> list[int]:
        """The places of the values that it takes, and may write."""
        places = _torch.leaves_of(_Place, (self.args, self.kwargs))
        return [place.index for place in places]


def _filled(argument: Any, values: dict[int, Any]) -> Any:
    if isinstance(argument, _Place):
        return values[argument.index]
    if isinstance(argument, (list, tuple)):
        return [_filled(each, values) for each in argument]
    return argument


@dataclass(frozen=True, slots=True)
class Read:
    """A symbol, what it is called, and the places of the values that it stands for."""

    symbol: Any
    name: str
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reads:
    """What an optimizer read from its state, and how to read it again.

    Attributes:
        slots: The place on the tape of each state that is followed, and its slot.
        calls: The calls that make and change the values of the tape, in order.
        symbols: What was read; the values that one symbol stands for must be equal.
    """

    slots: tuple[tuple[int, int], ...] = ()
    calls: tuple[_Call, ...] = ()
    symbols: tuple[Read, ...] = ()

    def kept_for(self, assumptions: Sequence[Any]) -> "Reads":
        """Only what assumptions are about; for most optimizers nothing."""
        used: set[Any] = set().union(*(each.free_symbols for each in assumptions))
        symbols = tuple(read for read in self.symbols if read.symbol in used)
        needed = {place for read in symbols for place in read.places}
        calls = []
        for call in reversed(self.calls):
            takes = call.takes
            if needed.intersection(takes) or needed.intersection(call.makes):
                needed.update(takes)
                calls.append(call)
        slots = tuple(pair for pair in self.slots if pair[0] in needed)
        return Reads(slots, tuple(reversed(calls)), symbols)

    def again(self, inventory: Inventory) -> dict[Any, float] | None:
        """The value of each symbol for the states of now; None where they differ."""
        if not self.symbols:
            return {}
        found = {}
        with _torch.numbers.real_tensors():
            values: dict[int, Any] = {
                place: _real(inventory, slot).clone() for place, slot in self.slots
            }
            for call in self.calls:
                call.run(values)
        for read in self.symbols:
            numbers = {values[place] for place in read.places}
            if len(numbers) != 1:
                return None
            (found[read.symbol],) = numbers
        return found


@final
class HostValues(FunctionMode):
    """Follows the single numbers of optimizer states while a step is traced."""

    def __init__(
        self,
        inventory: Inventory,
        traced: dict[int, torch.Tensor],
        world: _torch.FakeWorld,
    ) -> None:
        super().__init__()
        self._world = world
        self._num_open = 0
        self._optimizers = [name for name, _ in inventory.optimizers]
        # Each followed tensor: itself, its place on the tape, its version there.
        self._known: dict[int, tuple[torch.Tensor, int, int]] = {}
        self._values: dict[int, Any] = {}
        self._families: list[frozenset[str]] = []  # which states a value comes from
        self._calls: list[_Call] = []
        self._numbers: dict[tuple[Any, ...], tuple[Any, list[int]]] = {}
        self._read_already: dict[tuple[int, int], Any] = {}
        self._slots: list[tuple[int, int]] = []
        for state in inventory.states:
            tensor = traced[state.slot]
            if tensor.ndim or _torch.layout_of(tensor) is not None:
                continue
            name = f"{self._optimizers[state.optimizer]}.{state.key}"
            self._slots.append((self._follow(tensor, frozenset({name})), state.slot))
        states = {state.slot for state in inventory.states}
        for slot in traced.keys() - states:  # buffers
            tensor, name = traced[slot], inventory.slots[slot].name
            if not is_spread(tensor):
                self._slots.append((self._follow(tensor, frozenset({name})), slot))
        with _torch.numbers.real_tensors():
            self._values = {p: _real(inventory, s).clone() for p, s in self._slots}

    def reads(self) -> Reads:
        """What was read, for the calls to come."""
        symbols = tuple(
            Read(_torch.symbol_of(number), _name(family), tuple(places))
            for (family, _), (number, places) in self._numbers.items()
        )
        return Reads(tuple(self._slots), tuple(self._calls), symbols)

    def __enter__(self) -> Self:
        # An optimizer may step another one; what is called must still be seen once.
        self._num_open += 1
        if self._num_open == 1:
            super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            super().__exit__(*error)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function; once more on real values where all its tensors are followed."""
        name = getattr(func, "__name__", "")
        if name in ("tensor", "as_tensor"):
            number = args[0] if args else kwargs.get("data")
            if isinstance(number, (*_NUMBERS, torch.SymBool)):
                return _as_tensor(number, **kwargs)
        if name == "__get__" and func == _DATA:
            # What is written through it shows in no version.
            self._known.pop(id(args[0]), None)
        if func is torch.Tensor.__bool__ and self._place_of(args[0]) is not None:
            return self._world.is_true(self._truth_of(args[0]))
        if func is torch.Tensor.item:
            if is_spread(args[0]):
                raise refuse_read()
            if args[0].dtype is torch.bool and self._place_of(args[0]) is not None:
                return self._world.is_true(self._truth_of(args[0]))
            return self._read(args[0], lambda: func(*args, **kwargs))
        follows = name in _MAKES | _COUNTS | _COMPARES
        given = self._given(args, kwargs) if follows else None
        result = func(*args, **kwargs)
        if given or (given is not None and name in _MAKES):
            self._repeat(func, args, kwargs, given, result)
        return result

    def _given(self, args: Any, kwargs: Any) -> list[torch.Tensor] | None:
        """The tensors of a call if all are followed; None where one is not."""
        leaves = _torch.flatten_tree((args, kwargs))[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        is_followed = all(self._place_of(tensor) is not None for tensor in tensors)
        has_symbols = any(isinstance(leaf, _NUMBERS) for leaf in leaves)
        return tensors if is_followed and not has_symbols else None

    def _place_of(self, tensor: torch.Tensor) -> int | None:
        entry = self._known.get(id(tensor))
        if entry is None or entry[2] != _torch.version_of(tensor):
            return None  # never seen, or written by something that was not
        return entry[1]

    def _repeat(
        self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], result: Any
    ) -> None:
        """Run a call once more, on real values, and follow what it makes and writes."""
        tensors = _torch.leaves_of(torch.Tensor, result)
        made = [each for each in tensors if id(each) not in self._known]
        if any(each.ndim > 1 or (each.ndim and each.shape[0] != 1) for each in made):
            return
        places = [self._known[id(tensor)][1] for tensor in given]
        family = frozenset().union(*(self._families[place] for place in places))
        args, kwargs = _torch.map_tree(self._as_place, (args, kwargs))
        makes = tuple(self._follow(tensor, family) for tensor in made)
        self._run(_Call(func, args, kwargs, makes))
        for tensor, place in zip(given, places, strict=True):
            self._known[id(tensor)] = (tensor, place, _torch.version_of(tensor))

    def _as_place(self, leaf: Any) -> Any:
        is_tensor = isinstance(leaf, torch.Tensor)
        return _Place(self._known[id(leaf)][1]) if is_tensor else leaf

    def _run(self, call: _Call) -> None:
        self._calls.append(call)
        with _torch.numbers.real_tensors():
            call.run(self._values)

    def _follow(self, tensor: torch.Tensor, family: frozenset[str]) -> int:
        place = len(self._families)
        self._known[id(tensor)] = (tensor, place, _torch.version_of(tensor))
        self._families.append(family)
        return place

    def _read(self, tensor: torch.Tensor, item: Callable[[], Any]) -> Any:
        """A number with a value for one without, where the value is known."""
        place = self._place_of(tensor)
        if place is None:
            return item()
        key = (place, _torch.version_of(tensor))
        if key not in self._read_already:
            with self._world.reading_values():
                result = item()
            if not isinstance(result, _NUMBERS):
                return result
            family, made = self._families[place], len(self._families)
            self._families.append(family)
            self._run(_Call(torch.Tensor.item, (_Place(place),), {}, (made,)))
            number = self._number(made, family)
            self._read_already[key] = _torch.numbers.stand_in(number, result)
        return self._read_already[key]

    def _truth_of(self, tensor: torch.Tensor) -> Any:
        """A symbol for whether a tensor is true, with what it is now."""
        place = self._place_of(tensor)
        assert place is not None
        family, made = self._families[place], len(self._families)
        self._families.append(family)
        self._run(_Call(_truth, (_Place(place),), {}, (made,)))
        return self._number(made, family)

    def _number(self, place: int, family: frozenset[str]) -> Any:
        """The number at a place; equal ones of one kind have one symbol."""
        value = self._values[place]
        known = self._numbers.get((family, value))
        if known is None:
            number = self._world.number(_name(family), value)
            self._numbers[family, value] = (number, [place])
            return number
        known[1].append(place)
        return self._world.same_number(known[0])


_NUMBERS = (torch.SymFloat, torch.SymInt)


def _name(family: frozenset[str]) -> str:
    return " and ".join(sorted(family)) or "a new counter"


def _as_tensor(
    number: Any, *, data: Any = None, dtype: torch.dtype | None = None, **options: Any
) -> torch.Tensor:
    """What ``torch.tensor`` makes of a number, which it would fix to its value of now."""
    if dtype is None and not isinstance(number, torch.SymFloat):
        dtype = torch.int64 if isinstance(number, torch.SymInt) else torch.bool
    return torch.scalar_tensor(number, dtype=dtype, **options)


def _real(inventory: Inventory, slot: int) -> torch.Tensor:
    return _torch.plain_tensor(inventory.slots[slot].tensor)
