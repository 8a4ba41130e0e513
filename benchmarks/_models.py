"""The models that the benchmarks share, laid out by torch's own styles."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class MLP(nn.Module):
    """Up, relu, down."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


class MLPStack(nn.Module):
    """Twelve MLPs in a row."""

    def __init__(
        self, num_layers: int = 12, width: int = 64, hidden: int = 256
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(MLP(width, hidden) for _ in range(num_layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Attention(nn.Module):
    """Causal self-attention on however many heads are local."""

    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, hidden: int, head_dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, head_dim)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Blocks in a row, on embeddings."""

    def __init__(
        self,
        num_layers: int = 4,
        width: int = 64,
        hidden: int = 256,
        head_dim: int = 8,
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(Block(width, hidden, head_dim) for _ in range(num_layers))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class GPT(nn.Module):
    """A decoder with learned positions; gives the loss. Its head is tied if told."""

    def __init__(
        self,
        num_layers: int = 12,
        width: int = 768,
        vocabulary: int = 50304,
        *,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(1024, width))
        self.body = Transformer(num_layers, width, 4 * width, 64)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        logits = self.head(self.norm(self.body(x)))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


_COLWISE = ("up", "q", "k", "v")
_ROWWISE = ("down", "o")


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard every projection over the mesh, in and out."""
    plan = {}
    for name, _ in model.named_modules():
        last = name.rpartition(".")[2]
        if last in _COLWISE:
            plan[name] = ColwiseParallel()
        elif last in _ROWWISE:
            plan[name] = RowwiseParallel()
    return parallelize_module(model, mesh, plan)
