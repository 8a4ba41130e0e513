"""How parts lie in a whole: placements as text, cut and join without a process group.

A recording is read in another process than the one that made it, so layouts are plain
values here: ``R``, ``S(0)``, ``P(sum)`` and ``_S(0, 2)``, as ``str`` writes placements.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchspmd.layout.shards import Cut, shard_positions

Layout = tuple[str, ...]

_SHARD = re.compile(r"_?S\((\d+)(?:, (\d+))?\)")
_PARTIAL = re.compile(r"P\((\w+)\)")


@dataclass(frozen=True, slots=True)
class Grid:
    """A mesh as plain numbers: names and sizes of its axes, and its ranks in order."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Where a rank is on each axis.

        >>> Grid(("dp", "tp"), (2, 2), (0, 1, 2, 3)).coordinate(2)
        (1, 0)
        """
        place, found = self.ranks.index(rank), []
        for size in reversed(self.shape):
            place, index = divmod(place, size)
            found.append(index)
        return tuple(reversed(found))

    def along(self, rank: int, axes: Sequence[str]) -> list[int]:
        """The ranks that differ from this one on these axes only, in order."""
        fixed = [place for place, name in enumerate(self.names) if name not in axes]
        own = self.coordinate(rank)
        return [
            other
            for other in self.ranks
            if all(self.coordinate(other)[place] == own[place] for place in fixed)
        ]

    def size(self, axes: Sequence[str]) -> int:
        """How many ranks lie along these axes together."""
        sizes = zip(self.names, self.shape, strict=True)
        return math.prod(size for name, size in sizes if name in axes)

    def describe(self) -> str:
        """The mesh in one word or two: ``dp=2, tp=2``."""
        pairs = zip(self.names, self.shape, strict=True)
        return ", ".join(f"{name}={size}" for name, size in pairs)


def grid_from_dict(data: Mapping[str, Any]) -> Grid:
    """A grid from plain JSON values."""
    return Grid(tuple(data["names"]), tuple(data["shape"]), tuple(data["ranks"]))


def describe_layout(grid: Grid, layout: Layout) -> str:
    """A layout for people: ``dp: Shard(0), tp: Replicate``."""
    pairs = zip(grid.names, layout, strict=True)
    return ", ".join(f"{name}: {_long(text)}" for name, text in pairs)


def _long(text: str) -> str:
    if text == "R":
        return "Replicate"
    if partial := _PARTIAL.fullmatch(text):
        return f"Partial({partial[1]})"
    if shard := _SHARD.fullmatch(text):
        return f"Shard({shard[1]})" + (f" in {shard[2]} blocks" if shard[2] else "")
    return text


def cut(whole: torch.Tensor, grid: Grid, layout: Layout, rank: int) -> torch.Tensor:
    """One rank's part of a whole, by DTensor's rules.

    >>> grid = Grid(("tp",), (2,), (0, 1))
    >>> cut(torch.arange(5), grid, ("S(0)",), 1)
    tensor([3, 4])
    """
    part = whole
    for dim, index in positions(tuple(whole.shape), grid, layout, rank).items():
        part = part.index_select(dim, index)
    return part


def join(
    parts: Mapping[int, torch.Tensor],
    grid: Grid,
    layout: Layout,
    shape: tuple[int, ...],
) -> dict[int, torch.Tensor] | None:
    """The whole that each rank's copy belongs to; None where the parts do not fit.

    Replicas are not merged: each rank gets the whole of the parts on its own side of the
    replicated axes, so that replicas that differ stay different.
    """
    wholes: dict[tuple[int, ...], torch.Tensor] = {}
    found = {}
    kept = [place for place, text in enumerate(layout) if text == "R"]
    for rank in grid.ranks:
        own = grid.coordinate(rank)
        side = tuple(own[place] for place in kept)
        if side not in wholes:
            team = [
                other
                for other in grid.ranks
                if tuple(grid.coordinate(other)[place] for place in kept) == side
            ]
            whole = _join_team(parts, team, grid, layout, shape)
            if whole is None:
                return None
            wholes[side] = whole
        found[rank] = wholes[side]
    return found


def _join_team(
    parts: Mapping[int, torch.Tensor],
    team: list[int],
    grid: Grid,
    layout: Layout,
    shape: tuple[int, ...],
) -> torch.Tensor | None:
    first = parts.get(team[0])
    operators = {match[1] for text in layout if (match := _PARTIAL.fullmatch(text))}
    if first is None or not operators <= {"sum", "avg"}:
        return None
    whole = torch.zeros(shape, dtype=first.dtype)
    for rank in team:
        index = positions(shape, grid, layout, rank)
        target = torch.Size(
            len(index[dim]) if dim in index else size for dim, size in enumerate(shape)
        )
        part = parts.get(rank)
        if part is None or part.shape != target:
            return None
        if part.dtype == torch.bool or not operators:
            _write(whole, index, part)
        else:
            grown = torch.zeros_like(whole)
            _write(grown, index, part)
            whole += grown
    if "avg" in operators:
        pairs = zip(grid.shape, layout, strict=True)
        whole = whole / math.prod(size for size, text in pairs if text == "P(avg)")
    return whole


def _write(
    whole: torch.Tensor, index: dict[int, torch.Tensor], part: torch.Tensor
) -> None:
    if not index:
        whole.copy_(part)
        return
    grids = []
    for dim, size in enumerate(whole.shape):
        places = index.get(dim, torch.arange(size))
        grids.append(places.view(-1, *[1] * (whole.ndim - dim - 1)))
    whole.index_put_(tuple(grids), part)


def positions(
    shape: tuple[int, ...], grid: Grid, layout: Layout, rank: int
) -> dict[int, torch.Tensor]:
    """For each sharded dimension, the places in the whole that the rank holds."""
    cuts: dict[int, list[Cut]] = {}
    coordinate = grid.coordinate(rank)
    for size, own, text in zip(grid.shape, coordinate, layout, strict=True):
        if match := _SHARD.fullmatch(text):
            cuts.setdefault(int(match[1]), []).append(
                Cut(size, own, int(match[2] or 1))
            )
    return {dim: shard_positions(shape[dim], by) for dim, by in cuts.items()}


# ----------------------------------------------------------------------------
# Large tensors in little memory: a sum of signed elements for each of 4096 buckets.
#
# Bucket and sign follow from an element's place in the whole tensor. A sketch is linear, so
# sketches of shards add up to that of the whole, those of terms to that of their sum, and
# the norm of the difference of two sketches is close to that of the tensors.

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
