"""How fast these ranks really are, for schedules that are chosen by it."""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from torchspmd.errors import UsageError
from torchspmd.step.graph.cost import CostModel

_MIB = 2**20
_SMALL, _LARGE = 2 * _MIB, 32 * _MIB  # bytes of a bucket, and of a large one
_IN_FLIGHT = 4  # collectives at once, as in a backward
_TRIES = 5


def measure_cost(
    device: torch.device | str = "cpu",
    *,
    dtype: torch.dtype = torch.float32,
    group: dist.ProcessGroup | None = None,
) -> CostModel:
    """Measure what a ``CostModel`` holds; takes about a second on a fast network.

    All ranks of the world call it at the same point. All get the same numbers, those of
    the slowest: a schedule must not differ between ranks. Two measurements differ a
    little, and so may the buckets that are chosen by them; where runs must agree bit for
    bit on more than two ranks, keep the numbers of the first.

    Args:
        device: Where the model is.
        dtype: What it computes and sends in.
        group: The ranks that reduce gradients together, as this rank knows them; all by
            default. In a world of one, or without one, the figures of the network are
            guesses.

    Example:
        >>> cost = measure_cost("cpu")
        >>> cost.flops > 1e6 and cost.memory_bytes > 1e6
        True
    """
    place = torch.device(device)
    guess = CostModel.for_device(place.type)
    flops, memory = _compute_rate(place, dtype), _memory_rate(place, dtype)
    launch = _launch_seconds(place)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return CostModel(
            flops, memory, guess.network_bytes, launch, guess.latency_seconds
        )
    if dist.get_backend(group) == "fake":
        raise UsageError(
            "measure_cost: the ranks of a fake process group send nothing, so there is "
            "nothing to measure. Start real ranks (torchrun), or give a CostModel."
        )
    each_byte, latency = 1 / guess.network_bytes, guess.latency_seconds
    if dist.get_world_size(group) > 1:
        each_byte, latency = _network(place, dtype, group)
    slowest = torch.tensor(
        [1 / flops, 1 / memory, each_byte, launch, latency],
        dtype=torch.float64,
        device=place,
    )
    dist.all_reduce(slowest, dist.ReduceOp.MAX)  # also of the other groups
    by_flop, by_byte, by_sent, launch, latency = slowest.tolist()
    return CostModel(1 / by_flop, 1 / by_byte, 1 / by_sent, launch, latency)


def _compute_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second in a matrix product."""
    width = 512 if device.type == "cpu" else 4096
    matrix = torch.ones(width, width, device=device, dtype=dtype)
    return 2 * width**3 / _time(lambda: matrix @ matrix, device)


def _memory_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Bytes a second that are read and written one by one."""
    size = (16 if device.type == "cpu" else 256) * _MIB
    values = torch.ones(size // dtype.itemsize, device=device, dtype=dtype)
    return 2 * size / _time(lambda: values + 1, device)


def _launch_seconds(device: torch.device) -> float:
    """What the smallest operator takes."""
    one, count = torch.ones(1, device=device), 100

    def run() -> None:
        for _ in range(count):
            one.add_(1)

    return _time(run, device) / count


def _network(
    device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup | None
) -> tuple[float, float]:
    """Seconds for a byte that a rank sends, and for a collective besides its bytes."""

    def reduce(size: int) -> float:
        tensors = [
            torch.zeros(size // dtype.itemsize, device=device, dtype=dtype)
            for _ in range(_IN_FLIGHT)
        ]

        def run() -> None:
            works = [dist.all_reduce(t, group=group, async_op=True) for t in tensors]
            for work in works:
                if work is not None:
                    work.wait()

        return _time(run, device) / _IN_FLIGHT

    ranks = dist.get_world_size(group)
    sent = 2 * (ranks - 1) / ranks
    small, large = reduce(_SMALL), reduce(_LARGE)
    each = max((large - small) / (_LARGE - _SMALL), 1e-15)
    latency = max(small - _SMALL * each, reduce(dtype.itemsize), 1e-9)
    return each / sent, latency


def _time(run: Callable[[], object], device: torch.device) -> float:
    """The median of some runs, after one that nobody counts."""
    times = []
    for _ in range(1 + _TRIES):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
