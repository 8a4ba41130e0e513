"""Parameters and their shards: versions, views, layouts over two axes."""

from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written in place; views and detached twins count too."""
    return int(tensor._version)


def is_view(operator: Any) -> bool:
    """Whether an operator looks at its argument's memory in another shape."""
    return isinstance(operator, OpOverload) and bool(operator.is_view)


def sister_axis(mesh: DeviceMesh, other: DeviceMesh) -> DeviceMesh | None:
    """``other``, if it is another axis of the mesh that ``mesh`` is an axis of.

    The axis of the living mesh: DTensor may hand out an equal one of a world that is gone,
    from its cache.
    """
    held: Any = mesh
    root = held._get_root_mesh()
    name = (other.mesh_dim_names or ("",))[0]
    if name in (mesh.mesh_dim_names or ()) or name not in (root.mesh_dim_names or ()):
        return None
    axis: DeviceMesh = root[name]
    return axis if axis == other else None


def join_axes(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """The mesh that has two axes of one mesh."""
    maker: Any = DeviceMesh
    joined: DeviceMesh = maker._concatenate([first, second])
    return joined


def strided_shard(dim: int, num_parts: int) -> Any:
    """The placement of an axis that cuts each of the parts that a later axis makes."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=num_parts)


def free_shard(tensor: torch.Tensor) -> None:
    """Give the memory of a DTensor's shard back; the DTensor has no values after this."""
    held: Any = tensor
    held._local_tensor = held._local_tensor.detach().new_empty(0)
