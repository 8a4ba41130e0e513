"""Figures of a GPU for the prediction of time, and a note of those that were used.

A file may lack measured tables. Those of the reference GPU then stand in: as ratios of
measured to ideal seconds, so that they carry over to a chip of other rates.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from torchspmd.errors import UsageError
from torchspmd.predict.hardware import (
    Figure,
    Hardware,
    Rows,
    load_gpu,
    load_network,
)

__all__ = ["Correction", "Figures"]

REFERENCE = "h200"
REFERENCE_NETWORK = "ib-ndr400"
_NEAREST = 6


@lru_cache(maxsize=1)
def _reference() -> Hardware:
    return load_gpu(REFERENCE)


@lru_cache(maxsize=1)
def _reference_network() -> Hardware:
    return load_network(REFERENCE_NETWORK)


class Figures:
    """Figures by ``table.key``: of the GPU, or else of the reference.

    Attributes:
        gpu: The device.
        network: Between nodes.
        used: Every figure that was asked for, with the hardware that it is of.
    """

    def __init__(self, gpu: Hardware, network: Hardware | None = None) -> None:
        self.gpu, self.network = gpu, network
        self.used: dict[str, tuple[Hardware, Figure]] = {}

    def number(self, key: str, *others: str) -> float:
        """The first of these that a file has.

        Raises:
            UsageError: No file has one.
        """
        for hardware in (self.gpu, _reference()):
            for name in (key, *others):
                figure = hardware.figures.get(name)
                if figure is not None and not isinstance(figure.value, tuple):
                    self.used[name] = (hardware, figure)
                    return figure.value
        self.gpu.number(key)  # says what is missing
        raise UsageError(f"The hardware file of {self.gpu.name} has no {key}.")

    def network_number(self, key: str) -> float:
        """A figure of the network, or else of the reference.

        Raises:
            UsageError: No network was named, or no file has the figure.
        """
        return self._network(key).number(f"network.{key}")

    def network_rows(self, key: str) -> Rows:
        """Rows of the network, or else of the reference.

        Raises:
            UsageError: No network was named.
        """
        return self._network(key).rows(f"network.{key}")

    def _network(self, key: str) -> Hardware:
        if self.network is None:
            raise UsageError(
                f"The ranks are on several nodes and no network was named ({key}): give "
                "--network, as in --network ib-ndr400."
            )
        name = f"network.{key}"
        hardware = self.network
        if not hardware.has(name) and _reference_network().has(name):
            hardware = _reference_network()
        if hardware.has(name):
            self.used[name] = (hardware, hardware.figures[name])
        return hardware

    def optional(self, key: str, default: float) -> float:
        """The GPU's own figure, where its file has one; never that of the reference."""
        return self.number(key) if self.gpu.has(key) else default

    def has_number(self, key: str) -> bool:
        """Whether a file has a number of this key."""
        return any(key in hardware.figures for hardware in (self.gpu, _reference()))

    def has(self, key: str) -> bool:
        """Whether a file has rows of this key."""
        return any(hardware.rows(key) for hardware in (self.gpu, _reference()))

    def table(self, key: str) -> tuple[Hardware, Rows]:
        """Rows, and the hardware that they were measured on; none where no file has any."""
        for hardware in (self.gpu, _reference()):
            rows = hardware.rows(key)
            if rows:
                self.used[key] = (hardware, hardware.figures[key])
                return hardware.measured_on(key), rows
        return self.gpu, ()

    def assumptions(self) -> list[dict[str, Any]]:
        """Every figure that was used, for the report."""
        listed = []
        for key, (hardware, figure) in sorted(self.used.items()):
            value: object = figure.value
            if isinstance(figure.value, tuple):
                value = f"{len(figure.value)} rows"
            source = figure.source
            if self._is_taken(hardware):
                where = "network" if key.startswith("network.") else "GPU"
                source = (
                    f"taken from {hardware.title}, not measured on this {where}: "
                    f"{source}"
                )
            listed.append(
                {"what": key, "value": value, "source": source, "error": None}
            )
        return listed

    def notes(self) -> list[str]:
        """What a reader of the text must know of them; each is in ``assumptions``."""
        own = {k: v for k, v in self.used.items() if not k.startswith("network.")}
        taken = sum(self._is_taken(hardware) for hardware, _ in own.values())
        ratios = sum(key.startswith("kernels.") for key in own)
        counts = {
            f"measured on {_reference().title}, not on {self.gpu.title}": taken,
            "for kernels that no table covers": ratios,
        }
        told = [f"{what}: {count}" for what, count in counts.items() if count]
        if not told:
            return []
        return [
            f"Figures of the GPU that were used: {len(own)}; {'; '.join(told)}. --json and "
            "--html list each with its source."
        ]

    def _is_taken(self, hardware: Hardware) -> bool:
        return hardware is not self.gpu and hardware is not self.network


class Correction:
    """Measured over ideal seconds, between measured cases by their distance.

    Args:
        points: Coordinates of the cases.
        ratios: Measured over ideal seconds of each.
        distance: Squared, of two points.
    """

    def __init__(
        self,
        points: Sequence[Sequence[float]],
        ratios: Sequence[float],
        distance: Callable[[Sequence[float], Sequence[float]], float] | None = None,
    ) -> None:
        self.points = list(points)
        self.logs = [math.log(ratio) for ratio in ratios]
        self.distance = distance or _squared

    def at(self, point: Sequence[float]) -> float:
        """The ratio there: of a case itself, or of those near it; 1 without cases."""
        if not self.points:
            return 1.0
        nearest = sorted(
            (self.distance(point, each), place)
            for place, each in enumerate(self.points)
        )[:_NEAREST]
        weights = [1 / (squared + 1e-4) ** 2 for squared, _ in nearest]
        logs = [self.logs[place] for _, place in nearest]
        total = sum(w * log for w, log in zip(weights, logs, strict=True))
        return math.exp(total / sum(weights))


def _squared(one: Sequence[float], other: Sequence[float]) -> float:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))


class Line:
    """Ratios over one coordinate: straight between cases, level outside of them."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        merged = dict(sorted(points))
        self.xs = list(merged)
        self.logs = [math.log(ratio) for ratio in merged.values()]

    def at(self, x: float) -> float:
        """The ratio there; 1 without cases."""
        if not self.xs:
            return 1.0
        right = bisect_left(self.xs, x)
        if right == 0:
            return math.exp(self.logs[0])
        if right == len(self.xs):
            return math.exp(self.logs[-1])
        left = right - 1
        part = (x - self.xs[left]) / (self.xs[right] - self.xs[left])
        return math.exp(self.logs[left] + part * (self.logs[right] - self.logs[left]))
