"""One mesh axis as one rank sees it, and layouts of tensors on it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from torchspmd import _torch
from torchspmd.errors import LayoutError, UsageError, WorldError
from torchspmd.layout.names import axis_names, format_mesh
from torchspmd.layout.placements import REPLICATE
from torchspmd.parallel.replicas import Replicas

_MAX_SPECS = 256  # shapes of activations that one axis remembers


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """A mesh of one axis: its name, its group, and this rank's place in it.

    It is shared, never copied: a deep copy of a module keeps talking to the same ranks.
    ``replicas`` are those of the module that was laid over it, to be compared.
    """

    mesh: DeviceMesh
    name: str
    size: int
    rank: int
    group: str
    replicas: Replicas | None = field(default=None, repr=False)
    _specs: dict[tuple[Any, ...], Any] = field(default_factory=dict, repr=False)

    def spec(
        self, placement: Placement, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Any:
        """The description of a DTensor on this axis; built once, it costs much."""
        key = (placement, shape, dtype)
        found = self._specs.get(key)
        if found is None:
            if len(self._specs) >= _MAX_SPECS:
                self._specs.clear()
            found = _torch.build_spec(self.mesh, (placement,), shape, dtype)
            self._specs[key] = found
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return build_axis, (self.mesh,)

    def __str__(self) -> str:
        return f"mesh {self.name}={self.size}"


def build_axis(mesh: DeviceMesh, call: str = "parallelize_module") -> Axis:
    """The only axis of a mesh.

    Raises:
        LayoutError: It is not a mesh, or has several axes.
        WorldError: This rank is not part of the mesh.
    """
    if not isinstance(mesh, DeviceMesh):
        raise LayoutError(
            f"{call}: device_mesh is a {type(mesh).__name__}. Pass a DeviceMesh with one "
            'axis, such as init_device_mesh("cuda", (8,), mesh_dim_names=("tp",)).'
        )
    if mesh.ndim != 1:
        raise LayoutError(_several_axes(mesh, call))
    # Not from mesh.mesh: a captured step would read a tensor that is not its argument.
    if mesh.get_coordinate() is None:
        raise WorldError(
            f"{call}: rank {mesh.get_rank()} is not in the mesh {format_mesh(mesh)}, "
            f"which holds ranks {mesh.mesh.flatten().tolist()}. Build the mesh over all "
            "ranks of the job, or call this only on the ranks of the mesh."
        )
    return Axis(
        mesh=mesh,
        name=axis_names(mesh)[0],
        size=mesh.size(),
        rank=mesh.get_local_rank(),
        group=mesh.get_group().group_name,
    )


def _several_axes(mesh: DeviceMesh, call: str) -> str:
    names = mesh.mesh_dim_names
    example = f'mesh["{names[-1]}"]' if names else 'mesh["tp"]'
    fix = f"Pass one axis of it, such as {example}"
    if not names:
        fix += ', after giving its axes names with mesh_dim_names=("dp", "tp")'
    return (
        f"{call}: the mesh {format_mesh(mesh)} has {mesh.ndim} axes; styles lay a module "
        f"over one. {fix}."
    )


def gradient_layout(placement: Placement) -> Placement:
    """The layout of the gradient of a tensor with this layout, as DTensor has it.

    A partial value gets the gradient of the sum: whole on every rank.
    """
    return REPLICATE if type(placement) is Partial else placement


def global_shape(
    local_shape: tuple[int, ...], placement: Placement, num_ranks: int
) -> tuple[int, ...]:
    """Shape of the whole tensor, if all ranks hold as much as this one.

    >>> global_shape((2, 3), Shard(1), 4)
    (2, 12)
    """
    if type(placement) is not Shard:
        return tuple(local_shape)
    shape = list(local_shape)
    shape[placement.dim] *= num_ranks
    return tuple(shape)


def check_even(
    shape: tuple[int, ...], layout: Placement, axis: Axis, where: str
) -> None:
    """Raise where the shape of the whole does not follow from a plain part of it.

    The next layer takes a plain tensor for one of even parts. Only the last dimension may
    be uneven: layers know how many features they have.
    """
    if type(layout) is not Shard or layout.dim == len(shape) - 1:
        return
    dim, size = layout.dim, shape[layout.dim]
    if size % axis.size:
        raise LayoutError(
            f"{where}: the whole has shape {tuple(shape)}; the {size} elements of "
            f"dimension {dim} do not divide over {axis.size} ranks. A plain tensor is "
            "taken as one of even parts, so the next layer would mistake the size of the "
            "whole. Return a DTensor, with use_local_output=False, or pad the dimension "
            f"to a multiple of {axis.size}."
        )


def layout_of(tensor: DTensor, axis: Axis, where: str) -> Placement:
    """The placement of a DTensor that must live on exactly this axis."""
    mesh = tensor.device_mesh
    if mesh is not axis.mesh and mesh != axis.mesh:
        raise LayoutError(
            f"{where}: the input is a DTensor on the mesh {format_mesh(mesh)}, the module "
            f"is laid over the {axis}. Redistribute it to that mesh, or pass its local "
            "tensor."
        )
    return tensor.placements[0]


# ----------------------------------------------------------------------------
# The mesh of a plan as numbers: no process group, no devices, any size.

MeshLike = DeviceMesh | Axis | Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PlanMesh:
    """The axis that a plan lies on, and the whole mesh around it.

    Attributes:
        axis: Name of the axis that the plan shards over.
        size: How many ranks that axis has.
        axes: Every axis of the mesh with its size.
    """

    axis: str
    size: int
    axes: tuple[tuple[str, int], ...]

    @property
    def num_ranks(self) -> int:
        """How many ranks the whole mesh has."""
        return math.prod(size for _, size in self.axes)

    def __str__(self) -> str:
        return "mesh " + ", ".join(f"{name}={size}" for name, size in self.axes)


def describe_mesh_axis(mesh: MeshLike, axis: str | None = None) -> PlanMesh:
    """A mesh, or a description of one, as the numbers that a plan needs.

    Args:
        mesh: A ``DeviceMesh``, or sizes by name such as ``{"dp": 128, "tp": 8}``.
        axis: The axis to lay the plan on; default is the only one, else ``tp``.

    Example:
        >>> print(describe_mesh_axis({"dp": 128, "tp": 8}))
        mesh dp=128, tp=8
        >>> describe_mesh_axis({"dp": 128, "tp": 8}).size
        8
    """
    if isinstance(mesh, Axis):
        return PlanMesh(mesh.name, mesh.size, ((mesh.name, mesh.size),))
    axes = _axes(mesh)
    names = [name for name, _ in axes]
    chosen = axis or (names[0] if len(names) == 1 else "tp")
    if chosen not in names:
        raise UsageError(
            f"the mesh has the axes {', '.join(names)}; none is {chosen!r}. Pass axis= "
            "the name of the axis to lay the plan on."
        )
    return PlanMesh(chosen, dict(axes)[chosen], axes)


def _axes(mesh: object) -> tuple[tuple[str, int], ...]:
    if isinstance(mesh, DeviceMesh):
        return tuple(zip(axis_names(mesh), mesh.shape, strict=True))
    if not isinstance(mesh, Mapping) or not mesh:
        raise UsageError(
            f"the mesh is {mesh!r}. Pass a DeviceMesh, or sizes by name such as "
            '{"tp": 8}.'
        )
    for name, size in mesh.items():
        if not isinstance(name, str) or type(size) is not int or size < 1:
            raise UsageError(
                f"the mesh is {dict(mesh)!r}. Every axis needs a name and a number of "
                'ranks of at least 1, as in {"dp": 2, "tp": 8}.'
            )
    return tuple(mesh.items())
