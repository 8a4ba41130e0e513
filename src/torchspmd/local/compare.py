"""Compare a tensor across the ranks of one mesh axis.

Every rank takes the same path through here and gets the same answer; the communication
is marked as a check.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchspmd import _torch
from torchspmd.comm import marked_as_check
from torchspmd.local.frame import Frame
from torchspmd.local.gradient import Axis

# Ranks that do the same work in another order may differ by a few roundings.
_ROUNDINGS = 16
_MAX_DIMS = 16


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the ranks of an axis compare with the first of them.

    Attributes:
        rank: The first that differs; None when all hold the same.
        size: Largest absolute difference of an element; infinite for other shapes.
        scale: Largest absolute element on the first rank.
        has_contrast: The first rank's values are not all alike: equal constants on all
            ranks prove nothing.
    """

    rank: int | None
    size: float = 0.0
    scale: float = 0.0
    has_contrast: bool = False

    @property
    def is_same(self) -> bool:
        """All ranks hold the same values, but for a few roundings."""
        return self.rank is None

    @property
    def is_nonzero(self) -> bool:
        """The first rank holds something else than zeros."""
        return self.scale > 0


def can_compare(local: torch.Tensor, frame: Frame, axis: Axis) -> bool:
    """Whether there are values and ranks to compare: not under fake tensors or groups."""
    group = frame.mesh.get_group(axis.index)
    return not _torch.is_fake(local) and str(dist.get_backend(group)) != "fake"


def compare(local: torch.Tensor, frame: Frame, axis: Axis) -> Comparison:
    """Compare every rank along an axis with its rank 0."""
    rows = _gather_meta(local, frame, axis)
    for rank, row in enumerate(rows):
        if row != rows[0]:
            return Comparison(rank, math.inf)
    if local.numel() == 0:
        return Comparison(None)
    group = frame.mesh.get_group(axis.index)
    mine = _comparable(local)
    first = mine.clone()
    with marked_as_check():
        dist.broadcast(first, src=dist.get_global_rank(group, 0), group=group)
    scale = float(first.abs().max())
    figures = torch.tensor([_distance(mine, first)], dtype=torch.float64)
    sizes = [row[0] for row in _all_gather(figures, frame, axis)]
    return Comparison(
        _first_beyond(sizes, scale, local.dtype),
        max(sizes),
        scale,
        bool((first != first.flatten()[0]).any()),
    )


def gather_shapes(local: torch.Tensor, frame: Frame, axis: Axis) -> list[list[int]]:
    """The shape on every rank along an axis."""
    return [row[2 : 2 + row[0]] for row in _gather_meta(local, frame, axis)]


def _first_beyond(
    sizes: Sequence[float], scale: float, dtype: torch.dtype
) -> int | None:
    is_float = dtype.is_floating_point or dtype.is_complex
    tolerance = _ROUNDINGS * torch.finfo(dtype).eps if is_float else 0.0
    bound = tolerance * scale if math.isfinite(scale) else 0.0
    return next((rank for rank, size in enumerate(sizes) if size > bound), None)


def _comparable(local: torch.Tensor) -> torch.Tensor:
    """The values as doubles: every backend can send them, every dtype fits."""
    plain = torch.view_as_real(local) if local.is_complex() else local
    return plain.detach().to(torch.float64).contiguous()


def _distance(mine: torch.Tensor, first: torch.Tensor) -> float:
    same = (mine == first) | (mine.isnan() & first.isnan())
    distance = torch.where(same, 0.0, (mine - first).abs())
    return float(distance.nan_to_num(nan=math.inf, posinf=math.inf).max())


def _gather_meta(local: torch.Tensor, frame: Frame, axis: Axis) -> list[list[int]]:
    """Number of dims, dtype and shape of every rank along an axis."""
    dtype = sum(str(local.dtype).encode())
    row = [local.ndim, dtype, *local.shape] + [0] * _MAX_DIMS
    numbers = torch.tensor(row[: _MAX_DIMS + 2], dtype=torch.float64)
    return [[int(n) for n in other] for other in _all_gather(numbers, frame, axis)]


def _all_gather(numbers: torch.Tensor, frame: Frame, axis: Axis) -> list[list[float]]:
    group = frame.mesh.get_group(axis.index)
    mine = numbers.to(frame.mesh.device_type)
    rows = [torch.empty_like(mine) for _ in range(axis.size)]
    with marked_as_check():
        dist.all_gather(rows, mine, group=group)
    return [row.tolist() for row in rows]
