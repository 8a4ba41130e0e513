"""How much two right runs may differ: from dtype and depth."""

import math
from dataclasses import dataclass

import torch

# Parallel sums are taken in another order: each changes a few last bits, and errors of
# independent layers add up as a random walk does.
_ROUNDINGS = 16.0
_LOW_PRECISION_ROUNDINGS = 4.0  # bfloat16 and float16: sums inside kernels are wider


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest difference that counts as rounding, relative to a tensor's own size.

    ``dtype`` is that of the least exact value compared; 0 asks for equal bits.
    """

    relative: float
    reason: str

    def at(self, step: int) -> float:
        """In later steps the errors of earlier updates come in, and grow."""
        return min(self.relative * min(3.0**step, 100.0), max(self.relative, 0.3))

    @property
    def is_bitwise(self) -> bool:
        """Whether every bit must be the same."""
        return self.relative == 0.0


def choose_tolerance(dtype: torch.dtype, depth: int) -> Tolerance:
    """The tolerance for a model of this many module calls.

    >>> choose_tolerance(torch.float64, 9).relative < 1e-13
    True
    """
    epsilon = torch.finfo(dtype).eps
    roundings = _ROUNDINGS if epsilon < 1e-4 else _LOW_PRECISION_ROUNDINGS
    relative = min(roundings * math.sqrt(max(depth, 1)) * epsilon, 0.3)
    name = str(dtype).removeprefix("torch.")
    reason = f"{name}, {depth} module calls"
    return Tolerance(relative, reason)
