"""Data parallelism: what a user can choose, and the mode that replicates parameters."""

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchspmd import _torch
from torchspmd.errors import UsageError
from torchspmd.step.capture.spread import Spread


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

    Example:
        >>> DataParallel("fully_shard").reduce
        'avg'
    """

    parallel_style: str = "replicate"
    reduce: Literal["avg", "sum"] = "avg"
    reshard_after_forward: bool = True
    sync_each_backward: bool = True

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


@final
class Replicated(Spread):
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
