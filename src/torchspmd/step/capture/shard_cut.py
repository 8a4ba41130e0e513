"""How a tensor is cut over the data axis: what a rank keeps, and of which whole.

A plain tensor is cut by rows. Of a tensor that lies over another axis already (tensor
parallel) each rank cuts the rows of its own part, as torch's ``fully_shard`` does.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from torchspmd import _torch


@dataclass(frozen=True, slots=True)
class Cut:
    """One tensor over the data axis, and over one other axis where it has one.

    Attributes:
        layout: Of the shard.
        whole: Of the gathered tensor over its other axis; None where that is plain.
        mesh: The data axis.
        rows: Of the gathered tensor on this rank.
        is_sharded: Ranks keep rows; otherwise every rank keeps all of them.
        is_even: No rank of any axis has fewer rows than another.
    """

    layout: Any
    whole: Any
    mesh: DeviceMesh
    rows: int
    is_sharded: bool
    is_even: bool

    @property
    def is_same_beside(self) -> bool:
        """Whether the ranks of every other axis hold the same values."""
        return self.whole is None or bool(self.whole.placements[0].is_replicate())

    @property
    def share(self) -> int:
        """The rows of the first ranks; the last ones may have fewer, or none."""
        return -(-self.rows // self.mesh.size())

    @property
    def kept(self) -> tuple[int, int]:
        """First and last row (excluded) of the gathered tensor that this rank keeps."""
        return rows_of(self.rows, self.mesh.size(), self.mesh.get_local_rank())


def plan_cut(layout: Any, shape: tuple[int, ...], dtype: Any, mesh: DeviceMesh) -> Cut:
    """The cut of a tensor that lies so far over no axis, or over one other axis.

    ``find_layout_problem`` must have found nothing.
    """
    placements = [_data_placement(layout, shape)]
    joined = mesh
    if layout is not None:
        placements += layout.placements
        axis = _torch.sister_axis(mesh, layout.mesh)
        assert axis is not None
        joined = _torch.join_axes(mesh, axis)
    cut = read_cut(_torch.build_spec(joined, tuple(placements), shape, dtype), mesh)
    assert cut is not None
    return cut


def read_cut(layout: Any, mesh: DeviceMesh) -> Cut | None:
    """The cut that a layout describes; None when this mode does not make such a layout."""
    if layout.mesh.ndim == 2:
        return _read_two_axes(layout, mesh)
    if not is_over(layout, mesh):
        return None
    found = layout.placements[0]
    if not found.is_replicate() and not found.is_shard(0):
        return None
    rows = layout.shape[0] if layout.shape else 0
    is_even = rows % mesh.size() == 0
    return Cut(layout, None, mesh, rows, not found.is_replicate(), is_even)


def is_over(layout: Any, mesh: DeviceMesh) -> bool:
    """Whether a layout is one over the ranks of the data axis, and over no other axis."""
    same_ranks = bool(layout.mesh.mesh.tolist() == mesh.mesh.tolist())
    # Axes of one rank each have the same ranks.
    return same_ranks and _torch.sister_axis(mesh, layout.mesh) is None


def _read_two_axes(layout: Any, mesh: DeviceMesh) -> Cut | None:
    shape, dtype = tuple(layout.shape), layout.tensor_meta.dtype
    found, beside = layout.placements
    names = layout.mesh.mesh_dim_names
    axis = names and _torch.sister_axis(mesh, layout.mesh[names[1]])
    if not axis or not _is_known(beside):
        return None
    joined = _torch.join_axes(mesh, axis)
    if joined != layout.mesh:
        return None
    whole = _torch.build_spec(axis, (beside,), shape, dtype)
    if not found.is_replicate() and found != _data_placement(whole, shape):
        return None
    layout = _torch.build_spec(joined, layout.placements, shape, dtype)
    rows = (shape or (0,))[0]
    is_even = rows % mesh.size() == 0
    if beside.is_shard(0):
        coordinate = joined.get_coordinate()
        assert coordinate is not None
        size = joined.size(1)
        is_even = rows % (mesh.size() * size) == 0
        rows = _length(rows, size, coordinate[1])
    return Cut(layout, whole, mesh, rows, not found.is_replicate(), is_even)


def _data_placement(whole: Any, shape: tuple[int, ...]) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    if not shape or not prod(shape) or _leaves_a_rank_empty(whole, shape):
        return Replicate()
    if _cuts_rows(whole) and whole.mesh.size() > 1:
        return _torch.strided_shard(0, whole.mesh.size())
    return Shard(0)


def _leaves_a_rank_empty(whole: Any, shape: tuple[int, ...]) -> bool:
    """Whether some rank of the other axis has nothing that could be gathered."""
    if whole is None or not whole.placements[0].is_shard():
        return False
    size = whole.mesh.size()
    first, last = rows_of(shape[whole.placements[0].dim], size, size - 1)
    return first == last


def _cuts_rows(whole: Any) -> bool:
    return whole is not None and bool(whole.placements[0].is_shard(0))


def _is_known(placement: Any) -> bool:
    from torch.distributed.tensor import Replicate, Shard

    return type(placement) in (Replicate, Shard)


def find_layout_problem(layout: Any, mesh: DeviceMesh) -> str:
    """Why a tensor with this layout cannot be cut over the data axis; empty: it can."""
    what = f"is a DTensor {list(layout.placements)} on {layout.mesh}: "
    if layout.mesh.ndim != 1 or not _is_known(layout.placements[0]):
        return what + (
            "only Shard(dim) or Replicate() over one other axis can be sharded over the "
            "data axis besides. Use DataParallel('replicate') with such layouts"
        )
    if _torch.sister_axis(mesh, layout.mesh) is None:
        return what + (
            "its axis and the data axis are not two axes of one mesh. Make both from one, "
            "mesh = init_device_mesh(..., mesh_dim_names=('dp', 'tp')), lay the model out "
            "over mesh['tp'] and pass mesh=mesh['dp']"
        )
    rows, beside = (layout.shape or (0,))[0], layout.mesh.size()
    if _cuts_rows(layout) and not can_describe(rows, mesh.size(), beside):
        return what + (
            f"{rows} rows over {beside} ranks, and each part again over {mesh.size()}, is "
            f"a layout that DTensor cannot describe. Pad it to a multiple of {beside} "
            "rows, or use DataParallel('replicate')"
        )
    return ""


def can_describe(rows: int, num_data: int, num_beside: int) -> bool:
    """Whether DTensor has a layout for rows that two axes cut, the data axis last.

    It takes the rows of one data rank as a block and cuts that evenly over the other
    axis; this must give the parts that the ranks really have.

    >>> can_describe(9, 2, 2), can_describe(7, 3, 2)
    (True, False)
    """
    parts = [_length(rows, num_beside, rank) for rank in range(num_beside)]
    for data_rank in range(num_data):
        held = [_length(part, num_data, data_rank) for part in parts]
        block = sum(held)
        if held != [_length(block, num_beside, rank) for rank in range(num_beside)]:
            return False
    return True


def _length(rows: int, num_ranks: int, rank: int) -> int:
    first, last = rows_of(rows, num_ranks, rank)
    return last - first


def rows_of(rows: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """First and last row (excluded) of a rank: full shares first, as DTensor has it.

    >>> [rows_of(5, 4, rank) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    share = -(-rows // num_ranks)
    return min(rank * share, rows), min((rank + 1) * share, rows)
