"""Row-wise: every rank holds some input features of a layer, and its sums are added."""

from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchspmd.parallel.sharded import ShardedStyle, place_sharded, sharded_problems
from torchspmd.parallel.style import Place, one_layout


@dataclass(frozen=True, kw_only=True)
class RowwiseParallel(ShardedStyle):
    """Shard a Linear over its input features, or an Embedding over its rows.

    Each rank computes a term of the output; the terms are summed into the output's
    layout, by one all-reduce (``Replicate()``) or reduce-scatter (``Shard(dim)``). A
    bias is added once, after the sum.

    Args:
        input_layouts: Layout of an input that is a plain tensor; default ``Shard(-1)``.
            The indices of an Embedding are usually ``Replicate()``.
        output_layouts: Layout of the output; default ``Replicate()``.
        use_local_output: Return this rank's tensor (the default), or a DTensor.

    Example:
        >>> import torch
        >>> from torchspmd.testing import fake_mesh
        >>> from torchspmd.parallel import parallelize_module
        >>> with fake_mesh(4, ("tp",)) as mesh:
        ...     linear = parallelize_module(nn.Linear(8, 16), mesh, RowwiseParallel())
        ...     linear(torch.ones(2, 2)).shape
        torch.Size([2, 16])
    """

    def __post_init__(self) -> None:
        given = one_layout(self, "input_layouts", self.input_layouts, Shard(-1))
        wanted = one_layout(self, "output_layouts", self.output_layouts, Replicate())
        object.__setattr__(self, "input_layouts", given)
        object.__setattr__(self, "output_layouts", wanted)

    def desired_input_layouts(self, module: nn.Module) -> tuple[Placement]:
        """The layout that the computation of this module reads."""
        return (Replicate(),) if isinstance(module, nn.Embedding) else (Shard(-1),)

    def parameter_layouts(self, module: nn.Module) -> dict[str, Placement]:
        """Input features sharded: columns of a Linear's weight, rows of a table."""
        if isinstance(module, nn.Embedding):
            return {"weight": Shard(0)}
        names = [name for name, _ in module.named_parameters(recurse=False)]
        return {n: Replicate() if n == "bias" else Shard(1) for n in names}

    def find_problems(self, module: nn.Module) -> list[str]:
        """Only Linear and Embedding have rows, and only once."""
        return sharded_problems(self, module)

    def place(self, module: nn.Module, place: Place) -> nn.Module:
        """Shard the parameters and let the module compute on its shard."""
        (needed,) = self.desired_input_layouts(module)
        return place_sharded(self, module, place, needed=needed, made=Partial())
