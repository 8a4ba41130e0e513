"""Models of ``jobs.py``, as their users would write them."""

import torch
import torch.nn.functional as F
from torch import nn


class ResidualConvolutions(nn.Module):
    """Of a U-Net: two convolutions with group norms before them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(32, inputs), _conv3(inputs, outputs)
        self.n2, self.c2 = nn.GroupNorm(32, outputs), _conv3(outputs, outputs)
        same = inputs == outputs
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.c1(F.silu(self.n1(x)))
        h = self.c2(F.silu(self.n2(h)))
        return h + self.skip(x)


def _conv3(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


class PixelAttention(nn.Module):
    """Of a U-Net: every pixel attends to all."""

    def __init__(self, channels: int, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.n = nn.GroupNorm(32, channels)
        self.qkv, self.o = (nn.Conv2d(channels, n * channels, 1) for n in (3, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x.shape
        qkv = self.qkv(self.n(x)).reshape(b, 3, self.heads, c // self.heads, h * w)
        q, k, v = qkv.transpose(-1, -2).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.o(y.transpose(-1, -2).reshape(b, c, h, w))


class UNet(nn.Module):
    def __init__(self, c: int = 128) -> None:
        super().__init__()
        block, attention = ResidualConvolutions, PixelAttention
        self.inp = _conv3(4, c)
        self.d1 = nn.Sequential(block(c, c), block(c, c))
        self.down1 = nn.Conv2d(c, c, 3, stride=2, padding=1)
        self.d2 = nn.Sequential(
            block(c, 2 * c),
            attention(2 * c),
            block(2 * c, 2 * c),
            attention(2 * c),
        )
        self.down2 = nn.Conv2d(2 * c, 2 * c, 3, stride=2, padding=1)
        self.mid = nn.Sequential(
            block(2 * c, 4 * c), attention(4 * c), block(4 * c, 4 * c)
        )
        self.u2 = nn.Sequential(block(6 * c, 2 * c), attention(2 * c))
        self.u1 = nn.Sequential(block(3 * c, c), block(c, c))
        self.out = nn.Sequential(nn.GroupNorm(32, c), nn.SiLU(), _conv3(c, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s1 = self.d1(self.inp(x))
        s2 = self.d2(self.down1(s1))
        x = self.mid(self.down2(s2))
        x = self.u2(torch.cat([F.interpolate(x, scale_factor=2.0), s2], 1))
        return self.out(self.u1(torch.cat([F.interpolate(x, scale_factor=2.0), s1], 1)))


class ConvNextBlock(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.filters = nn.Conv2d(c, c, 7, padding=3, groups=c)
        self.n = nn.LayerNorm(c)
        self.a, self.b = nn.Linear(c, 4 * c), nn.Linear(4 * c, c)
        self.gamma = nn.Parameter(1e-6 * torch.ones(c))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.n(self.filters(x).permute(0, 2, 3, 1))
        return x + (self.gamma * self.b(F.gelu(self.a(h)))).permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, stride=4)]
        before = 0
        for depth, width in ((3, 96), (3, 192), (9, 384), (3, 768)):
            if before:
                layers.append(nn.Conv2d(before, width, 2, stride=2))
            layers += [ConvNextBlock(width) for _ in range(depth)]
            before = width
        self.body, self.head = nn.Sequential(*layers), nn.Linear(768, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean([-2, -1]))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(30000, 1024)
        self.l = nn.LSTM(1024, 1024, 2, batch_first=True)
        self.h = nn.Linear(1024, 30000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.h(self.l(self.e(x))[0])


class Classifier(nn.Module):
    """Patches of an image through torch's own encoder."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            1024, 16, 4096, batch_first=True, norm_first=True, activation="gelu"
        )
        self.p = nn.Conv2d(3, 1024, 16, stride=16)
        self.e = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.h = nn.Linear(1024, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.h(self.e(self.p(x).flatten(2).transpose(1, 2)).mean(1))


class Dlrm(nn.Module):
    """Recommendations: bags of embeddings, and two small networks."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(200_000, 64, mode="sum") for _ in range(26)
        )
        self.bottom = nn.Sequential(
            nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 64), nn.ReLU()
        )
        self.top = nn.Sequential(
            nn.Linear(64 * 27, 1024),
            nn.ReLU(),
            nn.Linear(1024, 256),
            nn.ReLU(),
            nn.Linear(256, 1),
        )

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        bags = [table(ids[place]) for place, table in enumerate(self.tables)]
        return self.top(torch.cat([self.bottom(dense), *bags], 1)).squeeze(1)


class SqueezeExcite(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(c, c // 16, 1), nn.Conv2d(c // 16, c, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.b(F.silu(self.a(x.mean((2, 3), keepdim=True)))))


class MobileBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        h = 4 * inputs
        self.f = nn.Sequential(
            nn.Conv2d(inputs, h, 1, bias=False),
            nn.BatchNorm2d(h),
            nn.SiLU(),
            nn.Conv2d(h, h, 3, stride=stride, padding=1, groups=h, bias=False),
            nn.BatchNorm2d(h),
            nn.SiLU(),
            SqueezeExcite(h),
            nn.Conv2d(h, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.skips = inputs == outputs and stride == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.f(x) if self.skips else self.f(x)


class EfficientNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, 32, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.SiLU(),
        ]
        c = 32
        for width, depth in ((48, 3), (96, 4), (192, 6), (384, 4)):
            for place in range(depth):
                layers.append(MobileBlock(c, width, 1 if place else 2))
                c = width
        self.body, self.head = nn.Sequential(*layers), nn.Linear(c, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.t = nn.Sequential(
            nn.Linear(tokens, 256), nn.GELU(), nn.Linear(256, tokens)
        )
        self.c = nn.Sequential(
            nn.Linear(width, 3072), nn.GELU(), nn.Linear(3072, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.t(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.c(self.n2(x))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Conv2d(3, 768, 16, stride=16)
        self.b = nn.Sequential(*[MixerBlock(196, 768) for _ in range(12)])
        self.h = nn.Linear(768, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.h(self.b(self.p(x).flatten(2).transpose(1, 2)).mean(1))


class DiTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.n1 = nn.LayerNorm(width, elementwise_affine=False)
        self.n2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.m = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
        )
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        s1, b1, g1, s2, b2, g2 = self.ada(c).unsqueeze(1).chunk(6, -1)
        b, length, d = x.shape
        qkv = self.qkv(self.n1(x) * (1 + s1) + b1)
        q, k, v = qkv.view(b, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = x + g1 * self.o(y.reshape(b, length, d))
        return x + g2 * self.m(self.n2(x) * (1 + s2) + b2)


class DiT(nn.Module):
    def __init__(self, width: int = 1024, depth: int = 16) -> None:
        super().__init__()
        self.p, self.c = nn.Linear(16, width), nn.Linear(256, width)
        self.b = nn.ModuleList([DiTBlock(width, 16) for _ in range(depth)])
        self.o = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        c, x = self.c(t), self.p(x)
        for block in self.b:
            x = block(x, c)
        return self.o(x)


class Lora(nn.Module):
    """A frozen layer with an adapter beside it."""

    def __init__(self, base: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x)) * 2.0


class NanoBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.l1, self.l2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.p = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (
            each.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for each in self.qkv(self.l1(x)).split(c, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.p(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.down(F.gelu(self.up(self.l2(x))))


class NanoGpt(nn.Module):
    """With tied embeddings."""

    def __init__(self, width: int = 768, depth: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.te, self.pe = nn.Embedding(50304, width), nn.Embedding(1024, width)
        self.b = nn.ModuleList([NanoBlock(width, heads) for _ in range(depth)])
        self.n = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50304, bias=False)
        self.te.weight = self.head.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.size(1), device=ids.device)
        x = self.te(ids) + self.pe(places)
        for block in self.b:
            x = block(x)
        logits = self.head(self.n(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
