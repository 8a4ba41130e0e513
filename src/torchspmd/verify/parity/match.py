"""Does what the ranks hold agree with the whole value of one device?

A DTensor says how it lies. A plain tensor does not: of the layouts that its shapes allow,
the one is taken under which the values agree best, and the verdict says which.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchspmd.verify.recording.files import Piece
from torchspmd.verify.recording.layouts import Grid, Layout, cut, join, positions

_BLOCKS = (2, 3)  # fused gate and up, fused query, key and value


@dataclass(frozen=True, slots=True)
class Match:
    """The ranks' values beside the parts of the reference that they should equal."""

    layout: Layout
    found: tuple[torch.Tensor, ...]
    expected: tuple[torch.Tensor, ...]
    # By rank: how far the worst element is over what is allowed.
    excess: tuple[float, ...]
    error: float  # largest absolute difference

    @property
    def agrees(self) -> bool:
        """Whether every element of every rank is within the tolerance."""
        return not any(value > 0 for value in self.excess)

    @property
    def wrong_ranks(self) -> tuple[int, ...]:
        """The ranks with an element outside of the tolerance."""
        return tuple(rank for rank, value in enumerate(self.excess) if value > 0)


def whole_values(pieces: Sequence[Piece]) -> tuple[torch.Tensor, ...] | None:
    """What each rank says the value is, DTensors put together; None if they do not fit."""
    first = pieces[0]
    if first.grid is None or first.layout is None:
        return tuple(piece.value for piece in pieces)
    found: dict[int, torch.Tensor] = {}
    for rank, piece in enumerate(pieces):
        if rank in found:
            continue
        if piece.grid is None or piece.layout is None or rank not in piece.grid.ranks:
            return None
        parts = {other: pieces[other].value for other in piece.grid.ranks}
        joined = _join(parts, piece)
        if joined is None:
            return None
        found.update(joined)
    return tuple(found[rank] for rank in range(len(pieces)))


def _join(
    parts: dict[int, torch.Tensor], piece: Piece
) -> dict[int, torch.Tensor] | None:
    assert piece.grid is not None and piece.layout is not None
    if not piece.is_sketch:
        return join(parts, piece.grid, piece.layout, piece.shape)
    # A sketch is linear: shards and partial values add up alike.
    layout = tuple("R" if text == "R" else "P(sum)" for text in piece.layout)
    shape = tuple(next(iter(parts.values())).shape)
    return join(parts, piece.grid, layout, shape)


def find_match(
    values: Sequence[torch.Tensor],
    reference: torch.Tensor,
    allowed: torch.Tensor,
    grid: Grid,
    blocks: tuple[int, ...] = (),
) -> Match | None:
    """The layout under which the values agree best; None where no layout has the shapes."""
    shapes = tuple(tuple(value.shape) for value in values)
    layouts = possible_layouts(shapes, tuple(reference.shape), grid, blocks)
    best: Match | None = None
    for layout in layouts:
        match = measure(values, reference, allowed, grid, layout)
        if match.agrees:
            return match
        if best is None or match.error < best.error:
            best = match
    return best


def measure(
    values: Sequence[torch.Tensor],
    reference: torch.Tensor,
    allowed: torch.Tensor,
    grid: Grid,
    layout: Layout,
) -> Match:
    """Compare every rank's value with its part of the reference."""
    expected, excess, error = [], [], 0.0
    for rank, value in enumerate(values):
        part = cut(reference, grid, layout, rank)
        expected.append(part)
        bound = cut(allowed, grid, layout, rank) if allowed.ndim else allowed
        gap = difference(value, part)
        excess.append(_max(gap - bound))
        error = max(error, _max(gap))
    return Match(layout, tuple(values), tuple(expected), tuple(excess), error)


def match_by_shard(
    match: Match, allowed: torch.Tensor, grid: Grid, pieces: Sequence[Piece]
) -> Match:
    """A match of whole DTensors as one of their shards, to tell which ranks are wrong."""
    layout = _common_layout(match.layout, grid, pieces[0])
    if layout is None:
        return match
    found, expected, excess = [], [], []
    for rank, piece in enumerate(pieces):
        assert piece.grid is not None and piece.layout is not None
        value = cut(match.found[rank], piece.grid, piece.layout, rank)
        part = cut(match.expected[rank], piece.grid, piece.layout, rank)
        bound = allowed
        if allowed.ndim:
            bound = cut(allowed, grid, match.layout, rank)
            bound = cut(bound, piece.grid, piece.layout, rank)
        found.append(value)
        expected.append(part)
        excess.append(_max(difference(value, part) - bound))
    return Match(layout, tuple(found), tuple(expected), tuple(excess), match.error)


def _common_layout(layout: Layout, grid: Grid, piece: Piece) -> Layout | None:
    """The layout over the whole mesh: a DTensor's own axes, and the others as found."""
    if piece.grid is None or piece.layout is None or piece.is_sketch:
        return None
    own = dict(zip(piece.grid.names, piece.layout, strict=True))
    if not set(own) <= set(grid.names):
        return None
    found = dict(zip(grid.names, layout, strict=True))
    if any(found[name] != "R" for name in own):
        return None
    sharded = [text for text in (*own.values(), *layout) if "S(" in text]
    if len(sharded) > 1:  # on one dimension, their order would matter
        return None
    return tuple(own.get(name, found[name]) for name in grid.names)


def sums_along(
    values: Sequence[torch.Tensor], grid: Grid, axes: Sequence[str]
) -> list[torch.Tensor] | None:
    """For each rank the sum over the ranks along some axes; None if shapes differ."""
    sums = []
    for rank in range(len(values)):
        team = [values[other].double() for other in grid.along(rank, axes)]
        if any(part.shape != team[0].shape for part in team):
            return None
        sums.append(torch.stack(team).sum(0))
    return sums


def largest(value: torch.Tensor) -> float:
    """The size of the largest finite element; 0 for an empty tensor."""
    sizes = value.double().abs()
    return _max(sizes[sizes.isfinite()])


def _max(value: torch.Tensor) -> float:
    return float(value.max()) if value.numel() else 0.0


def difference(value: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Absolute differences; infinite where one of the two is not a number."""
    left, right = value.double(), expected.double()
    gap = (left - right).abs()
    return torch.where(left == right, 0.0, gap.nan_to_num(math.inf, math.inf))


@functools.lru_cache(maxsize=4096)
def possible_layouts(
    shapes: tuple[tuple[int, ...], ...],
    whole: tuple[int, ...],
    grid: Grid,
    blocks: tuple[int, ...] = (),
) -> tuple[Layout, ...]:
    """The layouts under which parts of a whole have these shapes, simple ones first.

    >>> grid = Grid(("tp",), (2,), (0, 1))
    >>> possible_layouts(((4, 3), (4, 3)), (4, 6), grid)[0]
    ('S(1)',)
    """
    everywhere = ("R",) * len(grid.shape)
    if all(shape == whole for shape in shapes):
        return (everywhere,)
    if any(len(shape) != len(whole) for shape in shapes):
        return ()
    cuttable = [
        dim
        for dim, size in enumerate(whole)
        if any(shape[dim] != size for shape in shapes)
    ]
    if not all(_divides(shapes[0][dim], whole[dim], grid) for dim in cuttable):
        return ()
    plain = ["R", *(f"S({dim})" for dim in cuttable)]
    blocked = [f"_S({dim}, {n})" for dim in cuttable for n in (*_BLOCKS, *blocks)]
    options = [plain + blocked if size > 1 else ["R"] for size in grid.shape]
    found = []
    for layout in itertools.product(*options):
        if all(
            _part_shape(whole, grid, layout, rank) == shape
            for rank, shape in enumerate(shapes)
        ):
            found.append(layout)
    return tuple(sorted(found, key=_complexity))


def _divides(part: int, whole: int, grid: Grid) -> bool:
    """Quickly: could a dimension of the first rank's part come from cutting the whole?"""
    return whole > part and part * math.prod(grid.shape) >= whole


def _part_shape(
    whole: tuple[int, ...], grid: Grid, layout: Layout, rank: int
) -> tuple[int, ...]:
    index = positions(whole, grid, layout, rank)
    return tuple(
        len(index[dim]) if dim in index else size for dim, size in enumerate(whole)
    )


def _complexity(layout: Layout) -> tuple[int, int]:
    blocked = sum(text.startswith("_") for text in layout)
    return blocked, sum(text != "R" for text in layout)
