"""The mesh of a plan as numbers: no process group, no devices, any size."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from torchspmd.errors import UsageError
from torchspmd.layout.names import axis_names
from torchspmd.parallel.axis import Axis

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
