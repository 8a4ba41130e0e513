"""Hand-written tensor-parallel layers, right by default, with a switch for each mistake."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


class SumForward(torch.autograd.Function):
    """Sum over ranks; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, times: int) -> torch.Tensor:
        x = x.clone()
        for _ in range(times):
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient, None, None


class SumBackward(torch.autograd.Function):
    """The value passes as it is; the gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, times: int) -> torch.Tensor:
        ctx.group, ctx.times = group, times
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        gradient = gradient.clone()
        for _ in range(ctx.times):
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None, None


class ColumnLinear(nn.Module):
    """Output features over the ranks.

    ``times``: how often the input's gradient is reduced. ``shift``: whose shard is taken.
    """

    def __init__(
        self, linear: nn.Linear, mesh: DeviceMesh, times: int = 1, shift: int = 0
    ) -> None:
        super().__init__()
        self.group, self.times = mesh.get_group(), times
        place = (mesh.get_local_rank() + shift) % mesh.size()
        self.weight = nn.Parameter(
            linear.weight.detach().chunk(mesh.size())[place].clone()
        )
        self.bias = None
        if linear.bias is not None:
            self.bias = nn.Parameter(
                linear.bias.detach().chunk(mesh.size())[place].clone()
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's features."""
        return F.linear(
            SumBackward.apply(x, self.group, self.times), self.weight, self.bias
        )


class RowLinear(nn.Module):
    """Input features over the ranks.

    ``times``: how often the output is reduced. ``early_bias``: add it before the sum.
    ``narrow``: reduce in bfloat16. ``transposed``: take the shard of the wrong dim.
    """

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh, **mistakes: Any) -> None:
        super().__init__()
        self.group, self.mistakes = mesh.get_group(), mistakes
        weight = linear.weight.detach()
        rank, size = mesh.get_local_rank(), mesh.size()
        shard = weight.chunk(size, 1)[rank]
        if mistakes.get("transposed"):
            shard = weight.chunk(size, 0)[rank].T
        self.weight = nn.Parameter(shard.clone())
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The whole features, on every rank."""
        out = F.linear(x, self.weight)
        if self.mistakes.get("early_bias"):
            return SumForward.apply(out + self.bias, self.group, 1)
        if self.mistakes.get("narrow"):
            out = SumForward.apply(out.bfloat16(), self.group, 1).float()
        else:
            out = SumForward.apply(out, self.group, self.mistakes.get("times", 1))
        return out if self.bias is None else out + self.bias


class VocabEmbedding(nn.Module):
    """Rows of the table over the ranks. ``slip``: where the last rank's rows begin."""

    def __init__(self, table: nn.Embedding, mesh: DeviceMesh, slip: int = 0) -> None:
        super().__init__()
        self.group = mesh.get_group()
        rank, size = mesh.get_local_rank(), mesh.size()
        each = table.num_embeddings // size
        self.first = each * rank + (slip if rank == size - 1 else 0)
        self.weight = nn.Parameter(table.weight.detach().chunk(size)[rank].clone())

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """The rows of all words, on every rank."""
        local = words - self.first
        is_mine = (local >= 0) & (local < self.weight.shape[0])
        rows = F.embedding(local.where(is_mine, 0), self.weight)
        return SumForward.apply(rows * is_mine.unsqueeze(-1), self.group, 1)


def by_hand(
    model: Any, mesh: DeviceMesh, mistakes: dict[str, dict[str, Any]] | None = None
) -> None:
    """Lay the attention and MLP of every block out, with mistakes by module path."""
    mistakes = mistakes or {}
    for number, block in enumerate(model.layers):
        for parent, names, kind in (
            ("attention", ("q", "k", "v"), ColumnLinear),
            ("attention", ("o",), RowLinear),
            ("mlp", ("up",), ColumnLinear),
            ("mlp", ("down",), RowLinear),
        ):
            module = getattr(block, parent)
            for name in names:
                wrong = mistakes.get(f"layers.{number}.{parent}.{name}", {})
                setattr(module, name, kind(getattr(module, name), mesh, **wrong))
    if "embed" in mistakes:
        model.embed = VocabEmbedding(model.embed, mesh, **mistakes["embed"])
