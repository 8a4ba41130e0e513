"""Seconds of kernels that memory bounds, by the bytes that they move.

Tables of hardware files have measured seconds by bytes. Between their rows, and on other
chips, it is the ratio of measured to ideal seconds that counts.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

from torchspmd.predict.figures import Figures, Line
from torchspmd.predict.forms import clocks, reached_bandwidth
from torchspmd.predict.hardware import Hardware

__all__ = ["ITEM", "ROW", "ByteTables", "roofline"]

ITEM = 2  # bytes of an element in most tables of hardware files
ROW = 1024  # elements of a row in those of norms and of sums of columns
# How sharp the corner of the roofline is; infinite would be the ideal one.
_CORNER = 1.5

# Seconds of a kernel by the bytes that it moves, by a GPU's figures.
Form: TypeAlias = Callable[[Figures, float], float]


class ByteTables:
    """Tables of one GPU, or else of the reference.

    Attributes:
        figures: Of the GPU.
        floor: Seconds of the shortest kernel.
    """

    def __init__(self, figures: Figures) -> None:
        self.figures = figures
        self.floor = figures.number("launch.kernel")
        self._lines: dict[str, tuple[Hardware, Line]] = {}
        self._reshapes: dict[str, tuple[float, Line]] = {}

    def has(self, key: str) -> bool:
        """Whether a file has this table."""
        return self.figures.has(f"operators.{key}")

    def by_bytes(self, key: str, nbytes: int) -> float:
        """Seconds of a kernel that moves these bytes."""
        table = f"operators.{key}"
        if table not in self._lines:
            hardware, rows = self.figures.table(table)
            line = Line(
                [
                    (math.log2(max(size, 1)), seconds / self._ideal(hardware, size))
                    for size, seconds in rows
                ]
            )
            self._lines[table] = hardware, line
        hardware, line = self._lines[table]
        ratio = line.at(math.log2(max(nbytes, 1)))
        seconds = self._ideal(self.figures.gpu, nbytes) * ratio
        if hardware is not self.figures.gpu and ratio > 1:
            seconds = self._carried_over(hardware, nbytes, ratio)
        seconds = max(self.floor, seconds)
        is_cached = nbytes < self.figures.number("chip.l2_bytes") / 4
        if not is_cached and not key.startswith("nll_loss"):  # reads one of each row
            # What is measured over and over again comes from the cache; in a step, others
            # have used it meanwhile.
            seconds = max(seconds, nbytes / reached_bandwidth(self.figures))
        return seconds

    def reshaped(self, key: str, nbytes: int, here: float, form: Form) -> float:
        """A closed form of a shape, corrected by what was measured of another one.

        Args:
            key: Of the table.
            nbytes: That are moved.
            here: Seconds by the form, beside those of the shortest kernel.
            form: The same of the measured shape with some bytes.
        """
        if key not in self._reshapes:
            hardware, rows = self.figures.table(f"operators.{key}")
            figures = Figures(hardware)
            shortest = min(seconds for _, seconds in rows)
            line = Line(
                [
                    (math.log2(size), seconds / (shortest + form(figures, size)))
                    for size, seconds in rows
                ]
            )
            self._reshapes[key] = shortest, line
        shortest, line = self._reshapes[key]
        return (shortest + here) * line.at(math.log2(max(nbytes, 1)))

    def shortest(self, hardware: Hardware) -> float:
        """Seconds of a kernel that does nothing."""
        floor = hardware.figures.get("launch.kernel")
        least = self.floor if floor is None else floor.value
        assert not isinstance(least, tuple)
        return least

    def _carried_over(self, hardware: Hardware, nbytes: int, ratio: float) -> float:
        """What takes longer elsewhere than its bytes: the rest is up to multiprocessors.

        A norm reaches a third of the memory's rate on a chip with much of it; on one with
        less memory for each multiprocessor it reaches more.
        """
        ideal, here = (
            self._ideal(each, nbytes) for each in (hardware, self.figures.gpu)
        )
        computing = ideal * (ratio**_CORNER - 1) ** (1 / _CORNER)
        computing *= clocks(self.figures, hardware)
        computing /= clocks(self.figures, self.figures.gpu)
        return roofline(computing, here)

    def _ideal(self, hardware: Hardware, nbytes: float) -> float:
        return self.shortest(hardware) + nbytes / hardware.number("bandwidth.memory")


def roofline(computing: float, moving: float, corner: float = _CORNER) -> float:
    """Seconds of a kernel that computes and moves bytes at the same time."""
    return float((computing**corner + moving**corner) ** (1 / corner))
