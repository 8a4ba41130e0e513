"""A small GPT with the parts that parallel training gets wrong, and its training step."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, HEAD, LENGTH, ROWS = 48, 32, 4, 8, 8


class Attention(nn.Module):
    """Causal attention over however many heads the projections give."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o"):
            setattr(self, name, nn.Linear(width, width, bias=bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend over the sequence."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Up, gelu, down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the two layers."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Pre-norm attention and MLP, with dropout on the stream."""

    def __init__(self, width: int, bias: bool, dropout: float, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, bias), MLP(width)
        self.drop = nn.Dropout(dropout)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """Add both parts to the stream."""
        x = x + self.attention(self.norm1(x))
        return self.drop(x + self.mlp(self.norm2(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block, with its activations thrown away if asked for."""
        if self.recompute:
            out: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return out
        return self.inner(x)


class GPT(nn.Module):
    """Embeddings, blocks, a norm and a head."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        width = options.get("width", WIDTH)
        self.embed = nn.Embedding(options.get("vocab", VOCAB), width)
        self.position = nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(
            Block(
                width,
                options.get("bias", True),
                options.get("dropout", 0.0),
                options.get("recompute", False),
            )
            for _ in range(options.get("layers", 2))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, options.get("vocab", VOCAB), bias=False)
        if options.get("tied"):
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits for every position."""
        places = torch.arange(tokens.shape[1])
        x = self.embed(tokens) + self.position(places)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Net(nn.Module):
    """Features in, classes out, with batch norm or without."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(12, 24)
        self.bn = nn.BatchNorm1d(24) if batch_norm else nn.Identity()
        self.second = nn.Linear(24, 12)
        self.last = nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        return self.last(F.gelu(self.second(F.gelu(self.bn(self.first(x))))))


def build_gpt(**options: Any) -> nn.Module:
    return GPT(options)


def build_net(batch_norm: bool = False) -> nn.Module:
    return Net(batch_norm)


def tokens(number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one step."""
    generator = torch.Generator().manual_seed(100 + number)
    drawn = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def features(number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and classes of one step."""
    generator = torch.Generator().manual_seed(200 + number)
    x = torch.randn(ROWS, 12, generator=generator)
    return x, torch.randint(6, (ROWS,), generator=generator)


def loss_of(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy and the scores; backward and update are left to the caller."""
    x, y = batch
    scores = model(x)
    return F.cross_entropy(scores.flatten(0, -2), y.flatten()), scores


def train_step(model: nn.Module, optim: Any, batch: Any) -> Any:
    """A whole step."""
    loss, scores = loss_of(model, batch)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss, scores
