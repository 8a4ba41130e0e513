"""Five architectures, each a module that takes a batch and gives the loss."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Batch = tuple[torch.Tensor, torch.Tensor]


def _run(
    blocks: nn.ModuleList, x: torch.Tensor, *, recompute: bool, rest: tuple = ()
) -> torch.Tensor:
    for block in blocks:
        if recompute:
            x = checkpoint(block, x, *rest, use_reentrant=False)
        else:
            x = block(x, *rest)
    return x


class Attention(nn.Module):
    """Fused projection of queries, keys and values."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix positions."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm attention and a GELU MLP."""

    def __init__(
        self, width: int, heads: int, *, causal: bool, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to the residual stream."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """GPT-2: learned positions, tied head, dropout."""

    def __init__(
        self, *, layers: int, width: int, sequence: int, recompute: bool
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(50304, width)
        self.positions = nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(
            Block(width, width // 64, causal=True, dropout=0.1) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50304, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss."""
        where = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.positions(where)
        x = _run(self.blocks, x, recompute=self.recompute)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary positions, and SwiGLU."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        kv_width = kv_heads * self.head_dim
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_width, bias=False)
        self.v = nn.Linear(width, kv_width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Add to the residual stream."""
        y = self.norm1(x)
        q, k, v = (
            part(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Llama 3: RMS norms, rotary positions, grouped queries, untied head."""

    def __init__(
        self, *, layers: int, width: int, sequence: int, recompute: bool
    ) -> None:
        super().__init__()
        self.recompute = recompute
        heads = width // 64
        self.embed = nn.Embedding(32000, width)
        self.blocks = nn.ModuleList(
            LlamaBlock(width, heads, heads // 4, 7 * width // 2) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 32000, bias=False)
        angles = torch.outer(
            torch.arange(sequence), 500000.0 ** (-torch.arange(0, 64, 2) / 64)
        )
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.embed(tokens)
        rotary = (self.cos.to(x.dtype), self.sin.to(x.dtype))
        x = _run(self.blocks, x, recompute=self.recompute, rest=rotary)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class ViT(nn.Module):
    """Patches, a class token, and GPT's blocks without the mask."""

    def __init__(
        self, *, layers: int, width: int, sequence: int, recompute: bool
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.patches = nn.Conv2d(3, width, kernel_size=16, stride=16)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, sequence + 1, width))
        self.blocks = nn.ModuleList(
            Block(width, width // 64, causal=False) for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), dim=1) + self.positions
        x = _run(self.blocks, x, recompute=self.recompute)
        return F.cross_entropy(self.head(self.norm(x[:, 0])), labels)


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block with its shortcut."""
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """ResNet-50; ``layers`` is the depth of its third stage."""

    def __init__(
        self, *, layers: int, width: int, sequence: int, recompute: bool
    ) -> None:
        super().__init__()
        del sequence
        self.recompute = recompute
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.blocks = nn.ModuleList()
        inputs = width
        for stage, depth in enumerate((3, 4, layers, 3)):
            for place in range(depth):
                stride = 2 if stage and not place else 1
                self.blocks.append(Bottleneck(inputs, width << stage, stride))
                inputs = 4 * width << stage
        self.head = nn.Linear(inputs, 1000)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = _run(self.blocks, self.stem(images), recompute=self.recompute)
        return F.cross_entropy(self.head(x.mean(dim=(2, 3))), labels)


class MoEBlock(nn.Module):
    """Attention, then experts that choose their tokens, so that all shapes are fixed."""

    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=True)
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(0.02 * torch.randn(experts, width, 4 * width))
        self.down = nn.Parameter(0.02 * torch.randn(experts, 4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to the residual stream."""
        x = x + self.attention(self.norm1(x))
        tokens = self.norm2(x).flatten(0, 1)
        scores = self.router(tokens).float().softmax(dim=-1)
        capacity = 2 * len(tokens) // self.experts
        weights, chosen = scores.t().topk(capacity, dim=-1)
        y = tokens[chosen.flatten()].unflatten(0, chosen.shape)
        y = torch.bmm(F.silu(torch.bmm(y, self.up.to(y.dtype))), self.down.to(y.dtype))
        y = (y * weights.unsqueeze(-1).to(y.dtype)).flatten(0, 1)
        y = torch.zeros_like(tokens).index_add(0, chosen.flatten(), y.to(tokens.dtype))
        return x + y.view_as(x)


class MoE(nn.Module):
    """A decoder with eight experts in each block."""

    def __init__(
        self, *, layers: int, width: int, sequence: int, recompute: bool
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(32000, width)
        self.positions = nn.Parameter(torch.zeros(sequence, width))
        self.blocks = nn.ModuleList(
            MoEBlock(width, width // 64, 8) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 32000, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.embed(tokens) + self.positions
        x = _run(self.blocks, x, recompute=self.recompute)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def text_batch(
    batch: int, sequence: int, device: torch.device, dtype: torch.dtype
) -> Batch:
    """Random tokens, and the next ones."""
    del dtype
    tokens = torch.randint(32000, (batch, sequence + 1), device=device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def image_batch(
    batch: int, sequence: int, device: torch.device, dtype: torch.dtype
) -> Batch:
    """Random images whose patches of 16 x 16 number ``sequence``, and labels."""
    side = 16 * round(sequence**0.5)
    images = torch.randn(batch, 3, side, side, device=device, dtype=dtype)
    return images, torch.randint(1000, (batch,), device=device)


MODELS: dict[str, tuple[type[nn.Module], Callable[..., Batch]]] = {
    "gpt": (GPT, text_batch),
    "llama": (Llama, text_batch),
    "vit": (ViT, image_batch),
    "resnet": (ResNet, image_batch),
    "moe": (MoE, text_batch),
}
