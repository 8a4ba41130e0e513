"""Where a region runs: a mesh, the axes it is local over, and sizes of tensors on them.

The size of a whole tensor is derived from what one rank sees, without communication. A dim
that divides evenly is multiplied. An uneven one is recognised by an argument that is
sharded over the same axes and has the same size here; anything else is refused, as each
rank would guess another size. What one rank could not tell is refused on all of them.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from torchspmd.layout.names import axis_names
from torchspmd.layout.placements import Layout, shard_dim
from torchspmd.layout.shards import shard_size

Axes: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LocalAxis:
    """One mesh axis that the region is local over."""

    index: int
    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Grid:
    """The axes that a region is local over: how many ranks, and which one this is."""

    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """A mesh as one region sees it.

    Attributes:
        mesh: The whole mesh.
        axes: The axes that the region is local over.
        others: Numbers of the axes that are left alone.
        rest: The mesh of those axes; None when there are none.
        grid: Sizes and coordinates of ``axes``.
    """

    mesh: DeviceMesh
    axes: tuple[LocalAxis, ...]
    others: tuple[int, ...]
    rest: DeviceMesh | None
    grid: Grid

    def pick(self, placements: Sequence[Placement]) -> Layout:
        """The entries of the axes that the region is local over."""
        if self.rest is None:
            return tuple(placements)
        return tuple(placements[axis.index] for axis in self.axes)

    def pick_rest(self, placements: Sequence[Placement]) -> Layout:
        """The entries of the axes that are left alone."""
        return tuple(placements[index] for index in self.others)

    def merge(self, layout: Layout, rest: Sequence[Placement]) -> Layout:
        """One layout for the whole mesh out of the two parts."""
        if self.rest is None:
            return layout
        entries = dict(zip(self.others, rest, strict=True))
        for axis, entry in zip(self.axes, layout, strict=True):
            entries[axis.index] = entry
        return tuple(entries[index] for index in range(self.mesh.ndim))

    def crossed_dim(self, placements: Sequence[Placement]) -> str | None:
        """Why the part along the region's axes is not one piece; None when it is.

        Where an axis that is left alone cuts a dim and a local axis cuts the pieces
        again, the ranks of the local axis hold every other piece.
        """
        names = axis_names(self.mesh)
        for axis in self.axes:
            dim = shard_dim(placements[axis.index])
            for other in self.others if dim is not None else ():
                entry = placements[other]
                is_outer = other < axis.index or type(entry) is not Shard
                if shard_dim(entry) == dim and is_outer:
                    return (
                        f"dim {dim} is cut over {names[other]!r}, which is left alone, "
                        f"and its pieces again over {axis.name!r}"
                    )
        return None


def unknown_axes(mesh: DeviceMesh, axes: Sequence[str] | None) -> list[str]:
    """The names among ``axes`` that the mesh does not have."""
    return [name for name in axes or () if name not in axis_names(mesh)]


def build_frame(mesh: DeviceMesh, axes: tuple[str, ...] | None) -> Frame:
    """The frame of a mesh whose ``axes`` (all when None) are local."""
    names = axis_names(mesh)
    chosen = [i for i, name in enumerate(names) if axes is None or name in axes]
    others = tuple(i for i in range(mesh.ndim) if i not in chosen)
    # A rank outside of the mesh holds empty tensors; any place in the grid will do.
    place = mesh.get_coordinate() or [0] * mesh.ndim
    return Frame(
        mesh,
        tuple(LocalAxis(i, names[i], mesh.size(i)) for i in chosen),
        others,
        mesh[tuple(names[i] for i in others)] if others else None,
        Grid(tuple(mesh.size(i) for i in chosen), tuple(place[i] for i in chosen)),
    )


# ----------------------------------------------------------------------------
# From the part of a tensor that is on this rank to the whole, and back.


class UnknownSizeError(Exception):
    """The size of the whole does not follow from the arguments; the text says why."""


@dataclass(frozen=True, slots=True)
class Source:
    """A dim of an argument: its whole size and the axes that shard it (none: whole)."""

    size: int
    axes: Axes


def size_here(size: int, axes: Axes, grid: Grid) -> int:
    """How much of a dim that these axes shard is here."""
    for axis in axes:
        size = shard_size(size, grid.sizes[axis], grid.coordinate[axis])
    return size


def axes_of_dim(layout: Layout, dim: int) -> Axes:
    """The axes that shard a dim."""
    return tuple(axis for axis, entry in enumerate(layout) if shard_dim(entry) == dim)


def list_sources(shape: Sequence[int], layout: Layout) -> list[Source]:
    """Every dim of an argument."""
    return [Source(size, axes_of_dim(layout, dim)) for dim, size in enumerate(shape)]


def num_parts(axes: Axes, grid: Grid) -> int:
    """Into how many parts these axes cut a dim."""
    parts = 1
    for axis in axes:
        parts *= grid.sizes[axis]
    return parts


def is_even(source: Source, grid: Grid) -> bool:
    """Whether every rank holds the same amount of a dim."""
    return source.size % num_parts(source.axes, grid) == 0


def whole_size(here: int, axes: Axes, sources: Iterable[Source], grid: Grid) -> int:
    """The whole size of an output's dim of which ``here`` is on this rank.

    >>> grid = Grid(sizes=(3,), coordinate=(0,))
    >>> whole_size(3, (0,), [Source(7, (0,))], grid)
    7
    >>> whole_size(4, (0,), [Source(6, (0,))], grid)
    12
    """
    sources = list(sources)
    whole = _size_seen_by(here, axes, sources, grid)
    if type(whole) is not int:
        return whole  # symbolic: each further comparison would be one more guard
    # Another rank that cannot tell raises, while this one would wait for it.
    for other in _ranks_of(axes, grid):
        there = size_here(whole, axes, other)
        try:
            seen = _size_seen_by(there, axes, sources, other)
        except UnknownSizeError as error:
            place = ",".join(map(str, other.coordinate))
            raise UnknownSizeError(f"as rank {place} sees it: {error}") from None
        if seen != whole:
            raise UnknownSizeError(
                f"{here} here makes {whole}, {there} on another rank makes {seen}"
            )
    return whole


def _ranks_of(axes: Axes, grid: Grid) -> Iterator[Grid]:
    """The grid as every rank along these axes sees it."""
    choices = [
        range(size) if axis in axes else (grid.coordinate[axis],)
        for axis, size in enumerate(grid.sizes)
    ]
    for coordinate in itertools.product(*choices):
        yield Grid(grid.sizes, coordinate)


def _size_seen_by(here: int, axes: Axes, sources: list[Source], grid: Grid) -> int:
    """The whole size as one rank derives it from its own part."""
    even = here * num_parts(axes, grid)
    same = _distinct(
        s.size for s in sources if s.axes == axes and _is_here(s, here, grid)
    )
    if len(same) == 1:
        return same[0]
    if same:
        raise UnknownSizeError(f"it may be any of {_listed(same)}")
    uneven = _distinct(s.size for s in sources if _may_be_uneven(s, here, axes, grid))
    if uneven:
        raise UnknownSizeError(
            f"{here} here, while a dim of {_listed(uneven)} is split unevenly"
        )
    return even


def _distinct(sizes: Iterable[int]) -> list[int]:
    """Each size once; no set, as symbolic sizes have no hash."""
    result: list[int] = []
    for size in sizes:
        if all(size != other for other in result):
            result.append(size)
    return result


def _is_here(source: Source, here: int, grid: Grid) -> bool:
    return size_here(source.size, source.axes, grid) == here


def _may_be_uneven(source: Source, here: int, axes: Axes, grid: Grid) -> bool:
    """Whether an output may have got its size from a dim that does not divide.

    A dim that is sharded over one of the axes may be the source whatever its size; a whole
    one only if this rank's chunk of it is what the output has here.
    """
    if set(source.axes) & set(axes):
        return not is_even(source, grid)
    split = Source(source.size, axes)
    return not is_even(split, grid) and _is_here(split, here, grid)


def _listed(sizes: Iterable[int]) -> str:
    return " or ".join(str(size) for size in sorted(sizes))


def whole_shape(
    here: Sequence[int], layout: Layout, sources: Sequence[Source], grid: Grid
) -> tuple[int, ...]:
    """The whole shape of an output of which ``here`` is on this rank."""
    shape = list(here)
    for dim, size in enumerate(here):
        axes = axes_of_dim(layout, dim)
        if axes and num_parts(axes, grid) > 1:
            try:
                shape[dim] = whole_size(size, axes, sources, grid)
            except UnknownSizeError as error:
                raise UnknownSizeError(f"dim {dim}: {error}") from None
    return tuple(shape)


def shape_here(shape: Sequence[int], layout: Layout, grid: Grid) -> tuple[int, ...]:
    """The part of a whole shape that is on this rank."""
    return tuple(
        size_here(size, axes_of_dim(layout, dim), grid)
        for dim, size in enumerate(shape)
    )


def whole_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Dense strides of a whole tensor whose part has the given strides.

    >>> whole_stride((8, 4), (1, 2))
    (1, 8)
    """
    order = sorted(range(len(shape)), key=lambda dim: (stride[dim], -dim))
    result = [1] * len(shape)
    step = 1
    for dim in order:
        result[dim] = step
        step *= max(shape[dim], 1)
    return tuple(result)
