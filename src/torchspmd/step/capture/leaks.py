"""Traced tensors in places where a captured step cannot put their values."""

import inspect
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchspmd import _torch
from torchspmd.errors import CaptureError
from torchspmd.step.capture.inventory import Inventory
from torchspmd.step.capture.shard_retired import is_retired

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
    for root, module in inventory.modules:
        for prefix, child in module.named_modules():
            for key in vars(child):
                path = f"{root}.{prefix}" if prefix else root
                yield f"{path}.{key}", vars(child), key
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
