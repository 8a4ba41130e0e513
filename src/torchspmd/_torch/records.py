"""Dataclasses as nodes of a tree, without a registration of the user's own class."""

import functools
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch.utils._pytree as pytree


class Record:
    """Stands for a dataclass in a tree; put together again, the tree has a dataclass."""

    def __init__(self, original: Any, values: list[Any]) -> None:
        _register()
        self.original, self.values = original, values


def record_fields(value: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a dataclass that have a value."""
    for field in fields(value):
        if hasattr(value, field.name):
            yield field.name, getattr(value, field.name)


@functools.cache
def _register() -> None:
    pytree.register_pytree_node(
        Record, lambda record: (record.values, record.original), _build
    )


def _build(values: Any, original: Any) -> Any:
    # Not by its constructor: that may compute, check or fill in, as it did already.
    made = object.__new__(type(original))
    for name, value in getattr(original, "__dict__", {}).items():
        object.__setattr__(made, name, value)
    names = (name for name, _ in record_fields(original))
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made
