"""Data parallelism: what a user can choose, and the mode that each choice gives."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchspmd import _torch
from torchspmd.errors import UsageError, WorldError
from torchspmd.step.capture.parallel_mode import ParallelMode
from torchspmd.step.modes.fully_shard import FullySharded
from torchspmd.step.modes.global_batch import GlobalBatch
from torchspmd.step.modes.precision import Precision, policy_problems
from torchspmd.step.modes.shard_layout import DataAxes

if TYPE_CHECKING:  # importing it registers operators
    from torch.distributed.fsdp import MixedPrecisionPolicy


@final
@dataclass(frozen=True, slots=True)
class DataParallel:
    """Each rank computes on its own batch; gradients are reduced explicitly.

    Args:
        parallel_style: ``"replicate"``: every rank holds all parameters.
            ``"fully_shard"``: each rank holds a share of every parameter and of its
            optimizer state, and gathers the whole where the step uses it.
        reduce: ``"avg"`` divides the sum of the gradients by the number of ranks, as
            DistributedDataParallel does; ``"sum"`` does not.
        reshard_after_forward: Of ``"fully_shard"``: gather again in backward, instead of
            keeping the whole parameters from forward on.
        sync_each_backward: Of ``"fully_shard"``: reduce gradients in each backward. False
            reduces once what several backwards add up (micro-batches), and keeps whole
            gradients until then; parameters that are kept whole are gathered once.
        mp_policy: Of ``"fully_shard"``: torch's ``MixedPrecisionPolicy``, with the meaning
            that ``fully_shard(model, mp_policy=...)`` gives to it. Shards and optimizer
            state keep their dtype; ``param_dtype`` is gathered and computed in,
            ``reduce_dtype`` reduced in. Arguments and results are cast at the models that
            the step itself calls.

    Example:
        >>> DataParallel("fully_shard").reduce
        'avg'
    """

    parallel_style: str = "replicate"
    reduce: Literal["avg", "sum"] = "avg"
    reshard_after_forward: bool = True
    sync_each_backward: bool = True
    mp_policy: "MixedPrecisionPolicy | None" = None

    def __post_init__(self) -> None:
        if self.parallel_style not in ("replicate", "fully_shard"):
            raise UsageError(
                f"DataParallel: Unknown parallel style: {self.parallel_style!r}. "
                "Choose 'replicate' or 'fully_shard'."
            )
        if self.reduce not in ("avg", "sum"):
            raise UsageError(
                f"DataParallel(reduce={self.reduce!r}): choose 'avg' or 'sum'."
            )
        if self.parallel_style == "replicate" and not self.sync_each_backward:
            raise UsageError(
                "DataParallel('replicate', sync_each_backward=False): this style reduces "
                "micro-batches once by itself; leave the argument out."
            )
        if self.parallel_style == "replicate" and not self.reshard_after_forward:
            raise UsageError(
                "DataParallel('replicate', reshard_after_forward=False) would have no "
                "effect: this style keeps whole parameters at all times; leave the "
                "argument out."
            )
        if self.mp_policy is not None:
            if self.parallel_style == "replicate":
                raise UsageError(
                    "DataParallel('replicate', mp_policy=...): the policy is for sharded "
                    "parameters. Choose 'fully_shard', or run the step under "
                    "torch.autocast."
                )
            if problems := "; ".join(policy_problems(self.mp_policy)):
                raise UsageError(f"DataParallel('fully_shard'): {problems}.")


@final
class Replicated(ParallelMode):
    """Ranks compute on plain tensors; gradients are summed over the mesh, or averaged."""

    reduces = has_own_batches = True

    def __init__(self, mesh: DeviceMesh, reduce: Literal["avg", "sum"]) -> None:
        self.mesh: DeviceMesh = mesh
        self.averages = reduce == "avg"

    def reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """Sum the gradient over the data axis; divide where an average was asked for."""
        layout = _torch.layout_of(gradient)
        total = _torch.sum_over(_torch.plain_tensor(gradient), self.mesh.get_group())
        if self.averages:  # gloo has no average: the sum is scaled everywhere
            total = total / self.mesh.size()
        return total if layout is None else _torch.wrap_local(total, layout)


def resolve_mode(
    parallel_mode: DataParallel | None, mesh: DeviceMesh | None, device: torch.device
) -> ParallelMode:
    """The mode and the mesh that a call of ``compile`` asks for."""
    is_sharded = (
        parallel_mode is not None and parallel_mode.parallel_style == "fully_shard"
    )
    if mesh is not None and mesh.ndim != 1:
        is_hybrid = is_sharded and mesh.ndim == 2
        if not is_hybrid:
            raise UsageError(
                f"compile(mesh=...): the mesh has {mesh.ndim} axes {mesh.mesh_dim_names}; "
                "pass its data axis alone, for instance mesh['dp']. Only 'fully_shard' "
                "takes two, the first with replicas of shards, the second with shards."
            )
        if mesh.mesh_dim_names is None:
            raise UsageError(
                "compile(mesh=...): the axes of the mesh have no names. Make it with "
                "mesh_dim_names=('replicate', 'shard'): the first has replicas of shards, "
                "the second shards."
            )
    if mesh is None and dist.is_initialized():
        names = ("data",)
        mesh = init_device_mesh(
            device.type, (dist.get_world_size(),), mesh_dim_names=names
        )
    if parallel_mode is not None:
        if mesh is None:
            raise WorldError(
                f"compile(parallel={parallel_mode.parallel_style!r}, or parallel_mode): "
                "there is no process group. Call torch.distributed.init_process_group() "
                "first."
            )
        if parallel_mode.parallel_style == "replicate":
            return Replicated(mesh, parallel_mode.reduce)
        return FullySharded(
            DataAxes.of(mesh),
            parallel_mode.reduce,
            reshard_after_forward=parallel_mode.reshard_after_forward,
            sync_each_backward=parallel_mode.sync_each_backward,
            precision=Precision.of(parallel_mode.mp_policy),
        )
    return ParallelMode() if mesh is None else GlobalBatch(mesh)
