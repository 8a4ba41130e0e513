"""Where an iteration ends in which several optimizers step, as in a GAN."""

import weakref
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any
from unittest import mock

from torch.optim.optimizer import Optimizer

__all__ = ["Rounds", "Turn"]


class Turn(Enum):
    """The part of an optimizer's step in its iteration."""

    WITHIN = "within"  # others follow
    NEW = "new"  # its first one: the iterations before were parts of one
    LAST = "last"


class Rounds:
    """Tells iterations apart by the optimizer that made its first step last.

    >>> import torch
    >>> parameters = [torch.nn.Parameter(torch.zeros(()))]
    >>> critic, actor = (torch.optim.SGD(parameters, lr=0.1) for _ in range(2))
    >>> rounds = Rounds()
    >>> [rounds.after(each).value for each in (critic, critic, actor, critic, actor)]
    ['new', 'last', 'new', 'within', 'last']
    """

    def __init__(self) -> None:
        self._made: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._last: weakref.ref[Optimizer] | None = None

    def after(self, *optimizers: Optimizer) -> Turn:
        """Classify a step of one optimizer, or of several at once."""
        turns = {self._after(each) for each in optimizers} or {Turn.LAST}
        return max(turns, key=list(Turn).index)

    def _after(self, optimizer: Optimizer) -> Turn:
        last = None if self._last is None else self._last()
        if optimizer in self._seen:
            return Turn.LAST if optimizer is last else Turn.WITHIN
        self._seen.add(optimizer)
        is_heir = self._last is not None and last is None  # of one that was thrown away
        self._last = weakref.ref(optimizer)
        return Turn.LAST if is_heir else Turn.NEW

    def noticing(self) -> AbstractContextManager[Any]:
        """Optimizers that are made inside, and take no step, are named afterwards."""
        initialize = Optimizer.__init__

        def noticed(of: Optimizer, *args: Any, **kwargs: Any) -> None:
            initialize(of, *args, **kwargs)
            self._made.add(of)

        return mock.patch.object(Optimizer, "__init__", noticed)

    @property
    def idle(self) -> list[Optimizer]:
        """Living optimizers that made no step."""
        return [each for each in self._made if each not in self._seen]

    def idle_text(self) -> str:
        """Which optimizers made no step although others did; empty where all did."""
        idle = self.idle
        if not idle or self._last is None:
            return ""
        kinds = ", ".join(sorted({type(each).__name__ for each in idle}))
        return (
            f"{len(idle)} of {len(self._made)} optimizers ({kinds}) made no step in those "
            "that were run. If the script steps them in turn, run more (--skip, --steps)."
        )
