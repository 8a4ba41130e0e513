"""Column-wise: every rank holds some output features of a layer."""

from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from torchspmd.parallel.sharded import ShardedStyle, place_sharded, sharded_problems
from torchspmd.parallel.style import Place, one_layout


@dataclass(frozen=True, kw_only=True)
class ColwiseParallel(ShardedStyle):
    """Shard a Linear or an Embedding over its output features.

    The input is needed whole; each rank computes its part of the last dimension of the
    output. Forward sends nothing when the input is replicated and the output stays
    sharded; backward sums the input's gradient.

    Args:
        input_layouts: Layout of an input that is a plain tensor; default
            ``Replicate()``.
        output_layouts: Layout of the output; default ``Shard(-1)``.
        use_local_output: Return this rank's tensor (the default), or a DTensor.

    Example:
        >>> import torch
        >>> from torchspmd.testing import fake_mesh
        >>> from torchspmd.parallel import parallelize_module
        >>> with fake_mesh(4, ("tp",)) as mesh:
        ...     linear = parallelize_module(nn.Linear(8, 16), mesh, ColwiseParallel())
        ...     linear(torch.ones(2, 8)).shape
        torch.Size([2, 4])
    """

    def __post_init__(self) -> None:
        given = one_layout(self, "input_layouts", self.input_layouts, Replicate())
        wanted = one_layout(self, "output_layouts", self.output_layouts, Shard(-1))
        object.__setattr__(self, "input_layouts", given)
        object.__setattr__(self, "output_layouts", wanted)

    @property
    def desired_input_layouts(self) -> tuple[Placement]:
        """The layout that the computation reads."""
        return (Replicate(),)

    def parameter_layouts(self, module: nn.Module) -> dict[str, Placement]:
        """Output features sharded: rows of a Linear's weight, columns of a table."""
        dim = 1 if isinstance(module, nn.Embedding) else 0
        names = (name for name, _ in module.named_parameters(recurse=False))
        return dict.fromkeys(names, Shard(dim))

    def find_problems(self, module: nn.Module) -> list[str]:
        """Only Linear and Embedding have columns, and only once."""
        return sharded_problems(self, module)

    def place(self, module: nn.Module, place: Place) -> nn.Module:
        """Shard the parameters and let the module compute on its shard."""
        return place_sharded(self, module, place, needed=Replicate(), made=Shard(-1))
