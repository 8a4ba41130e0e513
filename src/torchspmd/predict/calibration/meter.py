"""How long a call takes on a device, or the host to issue it."""

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias, TypeVar

import torch

__all__ = [
    "DTYPES",
    "Call",
    "Case",
    "Limits",
    "Measured",
    "Meter",
    "Section",
    "shuffled",
]

T = TypeVar("T")
Call: TypeAlias = Callable[[], object]
# A case gives figures: the key, and a number or a row with seconds last.
Measured: TypeAlias = Iterator[tuple[str, tuple[float, ...] | float]]
Case: TypeAlias = Callable[[], Measured]
_AHEAD = 4096  # side of the product that keeps the device busy while the host issues
_REPEATS = 3
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "tf32": torch.float32,
    "float32": torch.float32,
}


class Limits(NamedTuple):
    """The largest case that is measured.

    Attributes:
        flops: Operations of one call.
        nbytes: Bytes that one call moves.
        calls: Calls in a row, for a time of the host.
    """

    flops: float = 6e12
    nbytes: float = 3e9
    calls: int = 300


class Meter:
    """Times calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._ahead: Call = lambda: None
        self._ahead_seconds = 1.0
        if self.is_cuda:
            shape = (_AHEAD, _AHEAD)
            left, right = (self.random(*shape, dtype=torch.float32) for _ in range(2))
            self._ahead = lambda: torch.mm(left, right)
            self._ahead()
            self._ahead_seconds = self._events(self._ahead, 3)

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Normal values: products of zeros need less power, and are faster."""
        return torch.randn(shape, device=self.device, dtype=dtype)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def device_seconds(self, call: Call) -> float:
        """Of one call on the device, back to back with others as in a stream.

        A long product goes first, so that the device never waits for the host.
        """
        call()
        self.synchronize()
        start = time.perf_counter()
        call()
        issued = time.perf_counter() - start
        self.synchronize()
        if not self.is_cuda:
            return issued
        rough = self._events(call, 2)
        count = max(1, min(50, int(0.004 / max(rough, 1e-7))))
        ahead = 1 + int(1.5 * count * issued / self._ahead_seconds)
        times = []
        for _ in range(_REPEATS):
            for _ in range(min(ahead, 20)):
                self._ahead()
            times.append(self._events(call, count))
        return statistics.median(times)

    def _events(self, call: Call, count: int) -> float:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / count

    def host_seconds(self, call: Call, count: int) -> float:
        """Of the host for one call, which must be a small one.

        The middle of several: a step does not meet the host at its quickest either.
        """
        for _ in range(3):
            call()
        times = []
        for _ in range(_REPEATS):
            self.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                call()
            times.append((time.perf_counter() - start) / count)
            self.synchronize()
        return statistics.median(times)


Section: TypeAlias = Callable[[Meter, Limits], Iterator[Case]]


def shuffled(cases: Iterable[T]) -> list[T]:
    """In a fixed random order."""
    listed = list(cases)
    random.Random(0).shuffle(listed)
    return listed
