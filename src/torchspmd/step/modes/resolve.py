"""From the arguments of ``compile`` to the mode of a step."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchspmd.errors import UsageError, WorldError
from torchspmd.step.capture.spread import Spread
from torchspmd.step.modes.data_parallel import DataParallel, Replicated
from torchspmd.step.modes.fully_shard import FullySharded
from torchspmd.step.modes.global_batch import GlobalBatch


def resolve_spread(
    parallel_mode: DataParallel | None, mesh: DeviceMesh | None, device: torch.device
) -> Spread:
    """The mode and the mesh that a call of ``compile`` asks for."""
    if parallel_mode is not None and not isinstance(parallel_mode, DataParallel):
        raise UsageError(
            f"compile(parallel_mode={parallel_mode!r}): pass a DataParallel, or None for "
            "the global batch of all ranks."
        )
    if mesh is not None and mesh.ndim != 1:
        raise UsageError(
            f"compile(mesh=...): the mesh has {mesh.ndim} axes {mesh.mesh_dim_names}; "
            "pass its data axis alone, for instance mesh['dp']."
        )
    if mesh is None and dist.is_initialized():
        names = ("data",)
        mesh = init_device_mesh(
            device.type, (dist.get_world_size(),), mesh_dim_names=names
        )
    if parallel_mode is not None:
        if mesh is None:
            raise WorldError(
                f"compile(parallel_mode={parallel_mode}): there is no process group. "
                "Call torch.distributed.init_process_group() first."
            )
        if parallel_mode.parallel_style == "replicate":
            return Replicated(mesh, parallel_mode.reduce)
        return FullySharded(
            mesh,
            parallel_mode.reduce,
            reshard_after_forward=parallel_mode.reshard_after_forward,
            sync_each_backward=parallel_mode.sync_each_backward,
        )
    return Spread() if mesh is None else GlobalBatch(mesh)
