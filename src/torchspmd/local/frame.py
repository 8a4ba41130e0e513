"""Where a region runs: a mesh, the axes it is local over, and this rank's place."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from torchspmd.layout.names import axis_names
from torchspmd.local.gradient import Axis
from torchspmd.local.layout import Layout, shard_dim
from torchspmd.local.shapes import Grid


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
    axes: tuple[Axis, ...]
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
        tuple(Axis(i, names[i], mesh.size(i)) for i in chosen),
        others,
        mesh[tuple(names[i] for i in others)] if others else None,
        Grid(tuple(mesh.size(i) for i in chosen), tuple(place[i] for i in chosen)),
    )
