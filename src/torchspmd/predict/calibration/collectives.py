"""Times of collectives between the GPUs of this machine, with a process for each."""

import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from torchspmd.predict.hardware import Rows
from torchspmd.testing import Ranks

__all__ = ["group_sizes", "measure_collectives"]

_SMALLEST, _STEP = 1 << 13, 4  # bytes, and between two sizes
_BYTES_IN_A_ROW = 1 << 30  # of one measurement, in about so many bytes
_MOST_CALLS = 20
_ROUNDS = 3
_SECONDS = 300.0  # for all sizes of a kind


def group_sizes(devices: int) -> list[int]:
    """Powers of two, and all.

    >>> group_sizes(6)
    [2, 4, 6]
    """
    powers = [2**power for power in range(1, devices.bit_length())]
    return sorted({*(size for size in powers if size <= devices), devices} - {1})


def measure_collectives(
    ranks: Ranks, largest: float
) -> Iterator[tuple[str, Callable[[], Rows]]]:
    """The table of each kind, and what measures it: bytes of the whole tensor, and seconds.

    Args:
        ranks: With one device each.
        largest: Bytes of the largest tensor.
    """
    for kind in _CALLS:
        key = f"collectives.{kind}_1x{ranks.world_size}"

        def measure(kind: str = kind) -> Rows:
            found = ranks.run(_time_kind, kind, largest, timeout=_SECONDS)
            sizes = [size for size, _ in found[0]]
            slowest = [max(times) for times in zip(*map(_seconds, found), strict=True)]
            return tuple(zip(map(float, sizes), slowest, strict=True))

        yield key, measure


def _seconds(rows: list[tuple[int, float]]) -> list[float]:
    return [seconds for _, seconds in rows]


def _time_kind(kind: str, largest: float) -> list[tuple[int, float]]:
    """On one rank: bytes of the whole tensor, and seconds of a call among others."""
    ranks = dist.get_world_size()
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    rows, size = [], _SMALLEST
    while size <= largest:
        share = torch.zeros(size // 2 // ranks, dtype=torch.bfloat16, device=device)
        whole = torch.zeros(ranks * len(share), dtype=torch.bfloat16, device=device)
        calls = max(2, min(_MOST_CALLS, _BYTES_IN_A_ROW // size))
        rows.append((2 * len(whole), _time(_CALLS[kind], whole, share, calls)))
        size *= _STEP
    return rows


_Call = Callable[[torch.Tensor, torch.Tensor], object]
# Names of torch 2.13, and those before.
_gather: _Call = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_scatter: _Call = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_CALLS: dict[str, _Call] = {
    "all_reduce": lambda whole, share: dist.all_reduce(whole),
    "all_gather": _gather,
    "reduce_scatter": lambda whole, share: _scatter(share, whole),
    "all_to_all": lambda whole, share: dist.all_to_all_single(
        torch.empty_like(whole), whole
    ),
}


def _time(call: _Call, whole: torch.Tensor, share: torch.Tensor, calls: int) -> float:
    """Seconds of one call, the median of some rounds; the first is not counted."""
    times = []
    for _ in range(1 + _ROUNDS):
        dist.barrier()
        _synchronize(whole)
        start = time.perf_counter()
        for _ in range(calls):
            call(whole, share)
        _synchronize(whole)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times[1:])


def _synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()
