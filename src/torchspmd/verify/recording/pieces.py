"""From a live tensor to what is kept of it."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchspmd import _torch
from torchspmd.verify.recording.files import Piece
from torchspmd.verify.recording.layouts import Grid
from torchspmd.verify.recording.sketch import sketch

MAX_BYTES = 16 << 20


def grid_of(mesh: DeviceMesh) -> Grid:
    """A mesh as plain numbers."""
    names = mesh.mesh_dim_names or tuple(f"axis{place}" for place in range(mesh.ndim))
    return Grid(tuple(names), tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()))


def take(value: torch.Tensor, rank: int, max_bytes: int) -> Piece:
    """A copy of this rank's part of a tensor; a sketch of it where it is large."""
    grid, layout, shape = None, None, tuple(value.shape)
    local = value.detach()
    if isinstance(local, DTensor):
        grid = grid_of(local.device_mesh)
        layout = tuple(str(placement) for placement in local.placements)
        local = _torch.local_tensor(local)
    local = _torch.finished(local)
    dtype = str(local.dtype).removeprefix("torch.")
    if local.numel() * local.element_size() <= max_bytes:
        copy = local.to("cpu", copy=True).contiguous()
        return Piece(copy, shape, dtype, grid, layout)
    small = sketch(local, shape, grid, layout, rank)
    return Piece(small, shape, dtype, grid, layout, is_sketch=True)
