"""The clock that a power limit leaves.

Tensor cores at the highest clock draw more than a chip may for long: within a second, its
clock falls until the average is at the limit. A short measurement does not see that; a
training run does. A slower product takes less energy, bytes and leakage do not change; so
a step that waits, or moves bytes, keeps more of its clock than one that only multiplies.
"""

import statistics
from collections.abc import Iterable
from typing import NamedTuple

from torchspmd.predict.figures import Figures
from torchspmd.predict.forms import reached_bandwidth
from torchspmd.predict.operators import Cost
from torchspmd.predict.timeline import Item

__all__ = ["Power", "at_clock", "power_of"]

_LOWEST = 0.3
_HALVINGS = 30


class Power(NamedTuple):
    """What a step draws, and the rate of products that the limit leaves.

    Attributes:
        seconds: Of the step, with products at the rate of a short run.
        bound_by_clock: Seconds of it in kernels that follow the clock.
        products: Joules of them.
        bytes: Joules for bytes.
        idle: Watts of the chip without work.
        limit: Watts that it may draw for long; 0: as many as it wants.
        behind: How much slower the slowest of the ranks is, as a part of its clock.
        exponent: Watts of products, above those of an idle chip, grow as this power of
            their rate.
    """

    seconds: float = 0.0
    bound_by_clock: float = 0.0
    products: float = 0.0
    bytes: float = 0.0
    idle: float = 0.0
    limit: float = 0.0
    behind: float = 0.0
    exponent: float = 1.0

    @property
    def clock(self) -> float:
        """The rate of products, of that of a short run; 1 where the power suffices."""
        if not self.limit or self._is_within(1.0):
            return 1.0
        low, high = _LOWEST, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._is_within(middle) else (low, middle)
        return low

    @property
    def slowest(self) -> float:
        """The clock of the slowest rank, for whom the others wait."""
        clock = self.clock
        return clock / (1 + self.behind) if clock < 1 else 1.0

    @property
    def lost(self) -> float:
        """Seconds that the step takes more than with the rates of a short run."""
        return self.bound_by_clock * (1 / self.slowest - 1)

    def _is_within(self, clock: float) -> bool:
        seconds = self.seconds + self.bound_by_clock * (1 / clock - 1)
        products = self.products * clock ** (self.exponent - 1)
        return bool(self.idle * seconds + products + self.bytes <= self.limit * seconds)


def power_of(
    figures: Figures, costs: Iterable[Cost], seconds: float, ranks: int
) -> Power:
    """What a step draws.

    Args:
        figures: Of the GPU. One without a sustained rate keeps its clock.
        costs: Of every operator of the step.
        seconds: That the step takes with the rates of a short run.
        ranks: That wait for each other.
    """
    if not figures.gpu.has("flops.bfloat16_sustained", "power.limit"):
        return Power()
    limit, idle = figures.number("power.limit"), figures.number("power.idle")
    short = figures.number("flops.bfloat16_achieved")
    sustained = figures.number("flops.bfloat16_sustained")
    exponent = figures.number("power.exponent")
    reached_at = figures.gpu.measured_on("flops.bfloat16_sustained")
    measured_limit = reached_at.number("power.limit")
    highest = (measured_limit - idle) * (short / sustained) ** exponent
    for_byte = (figures.number("power.memory") - idle) / reached_bandwidth(figures)
    costs = list(costs)
    return Power(
        seconds=seconds,
        bound_by_clock=sum(cost.seconds for cost in costs if cost.busy),
        products=highest * sum(cost.busy for cost in costs),
        bytes=for_byte * sum(cost.nbytes for cost in costs),
        idle=idle,
        limit=limit,
        behind=figures.number("power.spread") * _worst_of(ranks),
        exponent=exponent,
    )


def _worst_of(ranks: int) -> float:
    """How many standard deviations the slowest of so many chips is off (Blom)."""
    if ranks <= 1:
        return 0.0
    return statistics.NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def at_clock(item: Item, cost: Cost | None, clock: float) -> Item:
    """The same work at a part of the clock."""
    if cost is None or not cost.busy or not item.work:
        return item
    return item._replace(work=item.work / clock)
