"""What a step changes in Python while it is traced: it would happen once, at capture."""

import contextlib
import functools
import random
import sys
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
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
from torchspmd.step.capture.guards import ambient_facts, walk_data
from torchspmd.step.capture.inventory import Counter, CountersError, Inventory, Role
from torchspmd.step.capture.python_values import parts_of
from torchspmd.step.capture.refusals import noting_refusals
from torchspmd.step.capture.snapshots import (
    MISSING,
    Attributes,
    Difference,
    Items,
    RandomState,
    Snapshot,
    describe_change,
    is_plain,
)
from torchspmd.step.capture.stored import Address, holders_in
from torchspmd.step.capture.trace_modes import replaced
from torchspmd.step.capture.user_code import attribute_of, calling_line

# ----------------------------------------------------------------------------
# Traced tensors in places where a captured step cannot put their values.

_DEPTH = 4  # levels of what an attribute holds that are looked into
_LATEST = 1000  # items of a container that are looked at: new ones are the last
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
    plain = _torch.plain_tensor(value)
    is_users = plain.is_meta or _torch.is_rehearsed(plain)
    return _torch.is_fake(plain) and not is_users


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
        for step, item in parts_of(value, latest=_LATEST):
            yield from find_traced(item, f"{path}{step}", depth=depth - 1, seen=seen)


def closed_arguments(inventory: Inventory) -> list[str]:
    """The arguments that hold tensors where no inventory looks, and what they are."""
    held = (torch.Tensor, nn.Module, Optimizer)
    return [
        f"{name} is a {type(leaf).__name__}"
        for name, leaf in zip(inventory.names, inventory.leaves, strict=True)
        if not isinstance(leaf, _CLOSED)
        and any(isinstance(item, held) for _, item in parts_of(leaf))
    ]


def check_leaks(inventory: Inventory, stored: Sequence[str]) -> None:
    """Refuse what kept a traced tensor: it would hold no value.

    Args:
        inventory: What the step works on; its modules and optimizers are searched.
        stored: Where else the step stored one; it is gone from there.
    """
    seen: set[int] = set()
    kept = [
        (found, table, key)
        for path, table, key in _attributes(inventory)
        for found in find_traced(table[key], path, depth=_DEPTH, seen=seen)
    ]
    for _, table, key in kept:
        _forget(table, key)
    paths = ", ".join(dict.fromkeys((*stored, *(path for path, _, _ in kept))))
    if paths:
        raise CaptureError(
            f"compile: the step stores a tensor in {paths}, where a captured step cannot "
            "put its value. Return the tensor from the step (from a forward, beside its "
            "output), or store it in an attribute of a module, of an argument, or of the "
            "object that the step is a method of."
        )


def _attributes(inventory: Inventory) -> Iterator[tuple[str, Any, str]]:
    for path, child in inventory.named_modules():
        yield from ((f"{path}.{key}", vars(child), key) for key in vars(child))
    for name, optimizer in inventory.optimizers:
        yield from ((f"{name}.{key}", vars(optimizer), key) for key in vars(optimizer))


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
    OBJECT = (
        "Count outside of the step, where it is called, and pass what the step needs; "
        "return what is to be kept."
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
    counter: Counter | None = None  # it could be an input and an output of the graph


@dataclass(frozen=True, slots=True)
class Watched:
    """Something that holds what a step could change.

    Attributes:
        snapshot: What it held.
        fix: What to do instead of changing it.
        kind: Its class, where it is a module; of a parameter group, its optimizer's.
        group: The parameter group.
        counters: Its numbers that are inputs and outputs of the graph.
    """

    snapshot: Snapshot
    fix: Fix
    kind: type | None = None
    group: dict[str, Any] | None = None
    counters: frozenset[str] = frozenset()

    def is_output(self, difference: Difference) -> bool:
        """Whether the program gives a number of a parameter group its new value."""
        if self.fix is not Fix.GROUP or difference.key is None:
            return False
        is_new = difference.before is MISSING and is_plain(difference.now)
        return is_new or difference.key in self.counters

    def counter(self, difference: Difference) -> Counter | None:
        """Which counter changed, of an optimizer that is not one of torch."""
        kind, values = self.kind, (difference.before, difference.now)
        if kind is None or not issubclass(kind, Optimizer) or _is_of_torch(kind):
            return None
        return (kind, difference.key) if all(map(_is_number, values)) else None

    def may_stay(self, difference: Difference) -> bool:
        """Whether a value is what a module or an object notes about itself in a first call.

        What stands in the place of None: a cache, the kind of task as seen from the labels.
        An attribute that is there for the first time, a plain one where a module's class
        has none of its name. Where the next capture has another value, that is a change.
        """
        key, before, now = difference.key, difference.before, difference.now
        if key is None or self.fix is Fix.GROUP or any(_traced_in(difference)):
            return False
        if isinstance(getattr(self.kind, str(key), None), functools.cached_property):
            return before is MISSING
        if before is MISSING and is_plain(now):
            return self.kind is not None and not hasattr(self.kind, key)
        return before is MISSING or (before is None and now is not MISSING)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) or isinstance(value, _torch.numbers.SYMBOLIC)


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _traced_in(difference: Difference) -> Iterator[str]:
    return find_traced(difference.now, difference.path, depth=_DEPTH)


@dataclass(frozen=True, slots=True)
class Stored:
    """What a step has stored in an attribute: where, its name, and the traced value.

    ``in_place``: it has filled the dict that was there.
    """

    address: Address
    key: str
    path: str
    value: Any
    in_place: bool = False


class PythonState:
    """All that a step could change in Python, as it was before it was traced.

    Attributes:
        kept: What it has stored in attributes, where each call can put it.
        stored: The names of other places where it has stored a tensor.
        created: What it has put into parameter groups: the group, the key and the value.
    """

    def __init__(
        self, inventory: Inventory, shown: list[torch.Tensor], arguments: Any
    ) -> None:
        self._inventory, self._arguments = inventory, arguments
        self._flat = [_torch.flatten_tree(each) for _, each in _named(arguments)]
        self._ambient = dict(ambient_facts())
        self._parameters = [
            (slot.name, slot.tensor, traced, slot.tensor.grad)
            for slot, traced in zip(inventory.slots, shown, strict=True)
            if slot.role is Role.PARAMETER
        ]
        self._watched = watch_python(inventory)
        self._watched += [
            Watched(
                Attributes(name, traced, matters=functools.partial(_is_public, own)),
                Fix.OBJECT,
            )
            for name, own, traced, _ in self._parameters
        ]
        self.kept: list[Stored] = []
        self.stored: list[str] = []
        self.created: list[tuple[Any, str, Any]] = []

    def changes(self) -> Iterator[Change]:
        """What is other than before; it is put back where it may not stay."""
        for watched in self._watched:
            for difference in list(watched.snapshot.differences()):
                yield from self._changed(difference, watched)
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

    def _changed(self, difference: Difference, watched: Watched) -> Iterator[Change]:
        key, before = difference.key, difference.before
        if (kept := self._kept(difference, watched)) is not None:
            self.kept.append(kept)
            watched.snapshot.put(key, before)
        elif not watched.is_output(difference):
            yield from self._describe(difference, watched)
            if not watched.may_stay(difference):
                watched.snapshot.put(key, before)
        elif before is MISSING:  # a counter is put back with what stands in for it
            self.created.append((watched.group, key, difference.now))
            watched.snapshot.put(key, before)

    def _kept(self, difference: Difference, watched: Watched) -> Stored | None:
        """What was stored, if each call can put such a value into that attribute."""
        key, holder = difference.key, watched.snapshot.holder
        if watched.fix is Fix.GROUP or not _is_tree(difference.now):
            return None
        if key is None:  # items of a dict; a list would grow with each step
            found = self._containers.get(id(holder))
            value = _torch.map_tree(lambda leaf: leaf, difference.now)
            return found and Stored(*found, difference.path, value, in_place=True)
        address = self._addresses.get(id(holder))
        if address is None or key not in attribute_of(holder, "__dict__", ()):
            return None
        return Stored(address, key, difference.path, difference.now)

    @functools.cached_property
    def _holders(self) -> list[tuple[Address, Any]]:
        found = self._inventory
        holders = holders_in(found.modules, found.leaves, found.names, found.function)
        return [(address, holder) for _, address, holder in holders]

    @functools.cached_property
    def _addresses(self) -> dict[int, Address]:
        return {id(holder): address for address, holder in self._holders}

    @functools.cached_property
    def _containers(self) -> dict[int, tuple[Address, str]]:
        return {
            id(value): (address, key)
            for address, holder in self._holders
            for key, value in vars(holder).items()
            if type(value) is dict and key not in _TABLES
        }

    def _describe(self, difference: Difference, watched: Watched) -> Iterator[Change]:
        fix, traced = watched.fix, list(_traced_in(difference))
        is_container = difference.key is None and fix is not Fix.OBJECT
        if fix is Fix.GROUP:
            counter = watched.counter(difference)
            yield Change(describe_change(difference), fix, counter)
        elif traced and not is_container:
            self.stored += traced
        elif traced:
            text = f"{', '.join(dict.fromkeys(traced))}: a tensor of the step"
            yield Change(text, fix)
        elif watched.may_stay(difference):
            yield Change(
                f"{difference.path} was set in this capture, and not again", None
            )
        else:
            yield Change(describe_change(difference), fix)


def _is_tree(value: Any) -> bool:
    """Whether a value is a traced tensor, or a tree of such and of plain values."""
    leaves = _torch.flatten_tree(value)[0]
    tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
    others = (each for each in leaves if not isinstance(each, torch.Tensor))
    return bool(tensors) and all(map(is_traced, tensors)) and all(map(is_plain, others))


def _is_public(own: torch.Tensor, key: str) -> bool:
    """Whether an attribute is the user's: there already, or not private."""
    return key in vars(own) or not key.startswith("_")


def _is_other(before: Any, now: Any) -> bool:
    return before is not now


def _named(arguments: Any) -> list[tuple[str, Any]]:
    args, kwargs = arguments
    return [
        *((f"args[{place}]", arg) for place, arg in enumerate(args)),
        *kwargs.items(),
    ]


# Tables of a module that capture itself works on.
_TABLES = ("_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs")


def watch_python(inventory: Inventory) -> list[Watched]:
    """All that a step could change in Python, as it is now."""
    return list(_watched_in(inventory))


def undo_python(
    watched: list[Watched], stored: Collection[tuple[int, str | None]] = ()
) -> list[str]:
    """Put back what was changed since; what may not stay, as text.

    Args:
        watched: All that could change.
        stored: What each call stores anew: the identity of a holder, and the attribute;
            of a dict that it fills, None.
    """
    texts = []
    for each in watched:
        holder = id(each.snapshot.holder)
        for difference in list(each.snapshot.differences()):
            is_known = (holder, difference.key) in stored or each.is_output(difference)
            if not (is_known or each.may_stay(difference)):
                texts.append(describe_change(difference))
            each.snapshot.put(difference.key, difference.before)
    return texts


def _watched_in(inventory: Inventory) -> Iterator[Watched]:
    for name, optimizer in inventory.optimizers:
        for number, group in enumerate(optimizer.param_groups):
            counters = frozenset(
                each.key
                for each in inventory.numbers
                if each.is_counter and each.holder is group
            )
            attributes = Attributes(f"{name}.group{number}", group, table=group)
            yield Watched(attributes, Fix.GROUP, type(optimizer), group, counters)
            yield from _watched_containers(f"{name}.group{number}", group, Fix.GROUP)
    for path, child in inventory.named_modules():
        yield from _watched_table(path, child, vars(child), Fix.ATTRIBUTE, _TABLES)
    for name, optimizer in inventory.optimizers:
        own, ignored = vars(optimizer), ("state", *_torch.OPTIMIZER_BOOKKEEPING)
        yield from _watched_table(name, optimizer, own, Fix.ATTRIBUTE, ignored)
    known = (nn.Module, Optimizer, GradScaler, torch.Tensor, type)
    for name, leaf in zip(inventory.names, inventory.leaves, strict=True):
        if attribute_of(leaf, "__dict__") is not None and not isinstance(leaf, known):
            yield Watched(Attributes(name, leaf), Fix.OBJECT)
    for each in walk_data(inventory).taken:
        is_random = isinstance(each, RandomState)
        yield Watched(each, Fix.RANDOM if is_random else Fix.OBJECT)
    for name, generator in _global_generators():
        yield Watched(RandomState(name, generator), Fix.RANDOM)


def _watched_table(
    path: str, holder: Any, table: dict[str, Any], fix: Fix, ignored: Any = ()
) -> Iterator[Watched]:
    """What a module, an optimizer or a group holds, and the containers it keeps."""
    kind = type(holder) if isinstance(holder, nn.Module) else None
    attributes = Attributes(
        path, holder, table=table, matters=lambda key: key not in ignored
    )
    yield Watched(attributes, fix, kind)
    yield from _watched_containers(path, table, fix, ignored)


def _watched_containers(
    path: str, table: dict[str, Any], fix: Fix, ignored: Any = ()
) -> Iterator[Watched]:
    for key, value in table.items():
        if key not in ignored and isinstance(value, (dict, list, set, deque)):
            yield Watched(Items(f"{path}.{key}", value), fix)


def _global_generators() -> Iterator[tuple[str, Any]]:
    yield "Python's random", random
    if (numpy := sys.modules.get("numpy.random")) is not None:
        yield "numpy.random", numpy


def state_of_torch() -> bytes:
    """The state of torch's random generator, which a trace does not draw from."""
    return bytes(torch.default_generator.get_state().numpy().tobytes())


def torch_changes(before: bytes) -> Iterator[Change]:
    """Whether torch's random generator has another state now than before."""
    if state_of_torch() != before:
        yield Change("the state of torch's generator", Fix.RANDOM)


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
    counters = [each.counter for each in changes if each.counter]
    if len(counters) == len(changes):
        raise CountersError(counters)
    lines = "\n".join(f"  * {change.text}" for change in changes)
    if any("_hooks: " in change.text for change in changes):
        fixes += f"\n{_HOOKS_FIX}"
    raise CaptureError(
        f"compile on {function!r}: the step changes what is no tensor of the graph\n\n"
        f"{lines}\n\nWhat the step changes in Python would happen once, at "
        f"capture.\n{fixes}"
    )


def refusing_schedulers(
    function: str, refused: list[Exception]
) -> contextlib.AbstractContextManager[None]:
    """Refuse ``scheduler.step()``, also of a scheduler that is in no argument."""

    def refuse(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        text = f"{type(scheduler).__name__}.step() at {calling_line()}"
        with noting_refusals(refused):
            refuse_changes(function, [Change(text, Fix.GROUP)])

    kinds = [kind for kind in _family(LRScheduler) if "step" in vars(kind)]
    return replaced(*((kind, "step", refuse) for kind in kinds))


def _family(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _family(child)
