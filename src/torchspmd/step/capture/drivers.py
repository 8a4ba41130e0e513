"""Objects that drive a model, such as a trainer: they hold it, and say nothing about it."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

_MOST_LOOKS = 1000


def drives(value: Any) -> bool:
    """Whether an object holds modules or optimizers, itself or through what it holds.

    Its counters change with every step; guarded by value, each step would be another
    program.

    >>> class Trainer:
    ...     def __init__(self, model):
    ...         self.loop = {"model": model}
    >>> drives(Trainer(nn.Linear(1, 1))), drives([1, 2])
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
