"""How fast these ranks really are, for schedules that are chosen by it."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from torchspmd.errors import UsageError
from torchspmd.step.graph.cost import CostModel

_MIB = 2**20
_SMALL, _LARGE = 2 * _MIB, 32 * _MIB  # bytes of a bucket, and of a large one
_IN_FLIGHT = 4  # collectives at once, as in a backward
_PRODUCTS = 8  # at once: long enough for ranks to be busy at the same time
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
    place = _check(device, dtype, group)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own_rates(place, dtype, None)
    if dist.get_backend(group) == "fake":
        raise UsageError(
            "measure_cost: the ranks of a fake process group send nothing, so there is "
            "nothing to measure. Start real ranks (torchrun), or give a CostModel."
        )
    dist.barrier()  # ranks that share a device or its memory must do so meanwhile
    own = own_rates(place, dtype, group or dist.group.WORLD)
    slowest = torch.tensor(_as_seconds(own), dtype=torch.float64, device=place)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)  # also of the other groups
    return _from_seconds(slowest.tolist())


def _check(
    device: torch.device | str, dtype: torch.dtype, group: dist.ProcessGroup | None
) -> torch.device:
    problems = []
    place = torch.device("cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        problems.append(f"device={device!r}: pass a device, such as 'cpu' or 'cuda'")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        problems.append(f"dtype={dtype!r}: pass a floating-point dtype of torch")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        problems.append(f"group={group!r}: pass a ProcessGroup, or None for all ranks")
    if problems:
        raise UsageError("measure_cost: " + "; ".join(problems) + ".")
    return place


def own_rates(
    device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup | None
) -> CostModel:
    """What this rank measures; guesses for the network where there is no group."""
    guess = CostModel.for_device(device.type)
    network, latency = guess.network_bytes, guess.latency_seconds
    flops, memory = _compute_rate(device, dtype), _memory_rate(device, dtype)
    launch = _launch_seconds(device)
    if group is not None and dist.get_world_size(group) > 1:
        network, latency = _network(device, dtype, group)
    return CostModel(flops, memory, network, launch, latency)


def slowest_of(rates: Sequence[CostModel]) -> CostModel:
    """The slowest rate of each kind.

    >>> slowest_of([CostModel(flops=2.0), CostModel(flops=4.0)]).flops
    2.0
    """
    return _from_seconds(
        [max(row) for row in zip(*map(_as_seconds, rates), strict=True)]
    )


def _as_seconds(cost: CostModel) -> list[float]:
    rates = (cost.flops, cost.memory_bytes, cost.network_bytes)
    return [*(1 / rate for rate in rates), cost.launch_seconds, cost.latency_seconds]


def _from_seconds(values: Sequence[float]) -> CostModel:
    by_flop, by_byte, by_sent, launch, latency = values
    return CostModel(1 / by_flop, 1 / by_byte, 1 / by_sent, launch, latency)


def _compute_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second in a matrix product."""
    width = 512 if device.type == "cpu" else 4096
    matrix = torch.ones(width, width, device=device, dtype=dtype)

    def run() -> None:
        for _ in range(_PRODUCTS):
            matrix @ matrix

    return _PRODUCTS * 2 * width**3 / _time(run, device)


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
    device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup
) -> tuple[float, float]:
    """Bytes that a rank sends in a second, and what a collective takes besides."""

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
    return sent / each, latency


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
