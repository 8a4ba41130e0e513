"""A question about a random number that has one answer, whatever is drawn.

Models that may skip layers ask ``torch.rand([]) < self.layerdrop`` for each of them, also
where ``layerdrop`` is 0. A number of ``torch.rand`` is never below 0, so that the answer
needs no value; the number is still drawn, as in eager.
"""

from collections.abc import Callable
from typing import Any, final

import torch
from torch.overrides import TorchFunctionMode

from torchspmd import _torch

_ASKS = (torch.Tensor.__lt__, torch.Tensor.lt, torch.lt)


@final
class CertainDraws(TorchFunctionMode):
    """Answers this question while a step is traced; others are left to be refused."""

    def __init__(self) -> None:
        super().__init__()
        # Each with its version: a write changes what is known about it.
        self._drawn: dict[int, tuple[torch.Tensor, int]] = {}
        self._never: dict[int, tuple[torch.Tensor, int]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.__bool__ and _is_in(self._never, args[0]):
            return False
        made = func(*args, **(kwargs or {}))
        if func is torch.rand and made.ndim == 0:
            self._drawn[id(made)] = (made, _torch.version_of(made))
        elif func in _ASKS and len(args) == 2 and _is_in(self._drawn, args[0]):
            if type(args[1]) in (int, float) and args[1] <= 0:
                self._never[id(made)] = (made, _torch.version_of(made))
        return made


def _is_in(known: dict[int, tuple[torch.Tensor, int]], value: Any) -> bool:
    entry = known.get(id(value))
    return entry is not None and entry[1] == _torch.version_of(value)
