"""Large tensors in little memory: a sum of signed elements for each of 4096 buckets.

Bucket and sign follow from an element's place in the whole tensor. A sketch is linear, so
sketches of shards add up to that of the whole, those of terms to that of their sum, and
the norm of the difference of two sketches is close to that of the tensors.
"""

import torch

from torchspmd.verify.recording.layouts import Grid, Layout, positions

BUCKETS = 4096
_PIECE = 1 << 20  # elements worked on at a time: a few temporary tensors of 8 MiB


def sketch(
    local: torch.Tensor,
    shape: tuple[int, ...],
    grid: Grid | None = None,
    layout: Layout | None = None,
    rank: int = 0,
) -> torch.Tensor:
    """The sketch of a rank's part of a whole tensor of this shape.

    >>> whole = torch.arange(6.0).view(2, 3)
    >>> grid = Grid(("tp",), (2,), (0, 1))
    >>> parts = [sketch(whole[[r]], (2, 3), grid, ("S(0)",), r) for r in (0, 1)]
    >>> torch.equal(parts[0] + parts[1], sketch(whole, (2, 3)))
    True
    """
    index = positions(shape, grid, layout, rank) if grid and layout else {}
    result = torch.zeros(BUCKETS, dtype=torch.float64)
    rows = local.detach().reshape(1, 1) if local.ndim == 0 else local.detach()
    whole = (1, 1) if local.ndim == 0 else shape
    first = index.get(0, torch.arange(whole[0]))
    inner = _inner_places(whole, index)
    step = max(1, _PIECE // max(1, inner.numel()))
    stride = 1
    for size in whole[1:]:
        stride *= size
    for start in range(0, rows.shape[0], step):
        places = first[start : start + step, None] * stride + inner
        values = rows[start : start + step].reshape(places.shape).cpu().double()
        hashed = _mix(places.flatten())
        signs = (hashed >> 40 & 1).double() * 2 - 1
        result.index_add_(0, hashed & (BUCKETS - 1), values.flatten() * signs)
    return result


def _inner_places(
    shape: tuple[int, ...], index: dict[int, torch.Tensor]
) -> torch.Tensor:
    """Places of one row's elements, relative to the start of the row."""
    places = torch.zeros(1, dtype=torch.long)
    for dim in range(1, len(shape)):
        own = index.get(dim, torch.arange(shape[dim]))
        places = (places[:, None] * shape[dim] + own).flatten()
    return places


def _mix(places: torch.Tensor) -> torch.Tensor:
    """Scatter consecutive numbers; the products wrap around, which is wanted."""
    mixed = (places ^ (places >> 15)) * 0x2C1B3C6D
    mixed = (mixed ^ (mixed >> 12)) * 0x297A2D39
    return (mixed ^ (mixed >> 15)) & 0x7FFFFFFFFFFFFFFF
