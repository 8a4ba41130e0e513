"""Models of ``jobs.py``, as their users would write them."""

import itertools
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


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


class AudioEncoder(nn.Module):
    """Of wav2vec's kind: convolutions over samples, then a transformer over frames."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        sizes = [(10, 5), *[(3, 2)] * 4, *[(2, 2)] * 2]
        layers: list[nn.Module] = []
        for place, (kernel, stride) in enumerate(sizes):
            inputs = width if place else 1
            layers.append(nn.Conv1d(inputs, width, kernel, stride, bias=False))
            layers += [nn.GroupNorm(width, width)] if not place else []
            layers.append(nn.GELU())
        self.features = nn.Sequential(*layers)
        self.norm, self.project = nn.LayerNorm(width), nn.Linear(width, 768)
        self.hidden = nn.Parameter(torch.randn(768))
        self.places = nn.Conv1d(768, 768, 128, padding=64, groups=16)
        layer = nn.TransformerEncoderLayer(
            768, 12, 3072, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        self.head = nn.Linear(768, 320)

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        x = self.features(sound.unsqueeze(1)).transpose(1, 2)
        x = self.project(self.norm(x))
        hides = torch.rand(x.shape[:2], device=x.device) < 0.4
        x = torch.where(hides.unsqueeze(-1), self.hidden.to(x.dtype), x)
        places = self.places(x.transpose(1, 2))[..., : x.shape[1]]
        x = x + F.gelu(places).transpose(1, 2)
        return self.head(self.encoder(x))


class GraphLayer(nn.Module):
    """Messages along edges, added up at their ends."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU())
        self.update, self.norm = nn.Linear(2 * width, width), nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        start, end = edges
        messages = self.message(torch.cat((x[start], x[end]), dim=-1))
        total = torch.zeros_like(x).index_add(0, end, messages)
        ones = torch.ones_like(end, dtype=x.dtype)
        degree = torch.zeros_like(x[:, 0]).scatter_add(0, end, ones).clamp(min=1)
        mean = total / degree.unsqueeze(-1)
        return x + F.relu(self.norm(self.update(torch.cat((x, mean), dim=-1))))


class GraphNetwork(nn.Module):
    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GraphLayer(width) for _ in range(depth))
        self.head = nn.Linear(width, 40)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(layer(x, edges), 0.1, self.training)
        return self.head(x)


class MambaBlock(nn.Module):
    """A selective state space, token after token."""

    def __init__(self, width: int, states: int = 16) -> None:
        super().__init__()
        inner, self.rank, self.states = 2 * width, width // 16, states
        self.norm = nn.RMSNorm(width)
        self.inp = nn.Linear(width, 2 * inner, bias=False)
        self.filters = nn.Conv1d(inner, inner, 4, padding=3, groups=inner)
        self.x = nn.Linear(inner, self.rank + 2 * states, bias=False)
        self.dt = nn.Linear(self.rank, inner)
        decay = torch.arange(1, states + 1, dtype=torch.float32).repeat(inner, 1)
        self.a = nn.Parameter(decay.log())
        self.d = nn.Parameter(torch.ones(inner))
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        u, gate = self.inp(self.norm(x)).chunk(2, dim=-1)
        u = self.filters(u.transpose(1, 2))[..., :length].transpose(1, 2)
        return x + self.out(self.scan(F.silu(u)) * F.silu(gate))

    def scan(self, u: torch.Tensor) -> torch.Tensor:
        dt, b, c = self.x(u).split((self.rank, self.states, self.states), dim=-1)
        dt = F.softplus(self.dt(dt))
        decay = torch.exp(dt.unsqueeze(-1) * -self.a.exp())
        pushed = (dt * u).unsqueeze(-1) * b.unsqueeze(2)
        state, seen = torch.zeros_like(pushed[:, 0]), []
        for place in range(u.shape[1]):
            state = decay[:, place] * state + pushed[:, place]
            seen.append((state * c[:, place].unsqueeze(1)).sum(-1))
        return torch.stack(seen, dim=1) + u * self.d


class Mamba(nn.Module):
    def __init__(self, width: int = 512, depth: int = 6) -> None:
        super().__init__()
        self.e = nn.Embedding(8192, width)
        self.b = nn.Sequential(*[MambaBlock(width) for _ in range(depth)])
        self.n, self.h = nn.RMSNorm(width), nn.Linear(width, 8192, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.h(self.n(self.b(self.e(ids))))


class ImageVae(nn.Module):
    """Convolutions down to a mean and a variance, transposed ones up again."""

    def __init__(self, latent: int = 256) -> None:
        super().__init__()
        widths = (3, 64, 128, 256, 512)
        down: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(widths):
            down.append(nn.Conv2d(inputs, outputs, 4, stride=2, padding=1))
            down += [nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2)]
        self.down = nn.Sequential(*down)
        self.moments = nn.Linear(512 * 64, 2 * latent)
        self.back = nn.Linear(latent, 512 * 64)
        up: list[nn.Module] = []
        for inputs, outputs in ((512, 256), (256, 128), (128, 64), (64, 32)):
            up.append(nn.ConvTranspose2d(inputs, outputs, 4, stride=2, padding=1))
            up += [nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2)]
        self.up = nn.Sequential(*up, nn.Conv2d(32, 3, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss: what was lost, and how far from normal the code is."""
        mean, spread = self.moments(self.down(x).flatten(1)).chunk(2, dim=-1)
        code = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        made = self.up(self.back(code).unflatten(1, (512, 8, 8)))
        far = -0.5 * (1 + spread - mean.pow(2) - spread.exp()).sum(-1).mean()
        return F.mse_loss(made, x) + 1e-4 * far


class ActorCritic(nn.Module):
    """Of proximal policy optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(
                nn.Linear(24, 64),
                nn.Tanh(),
                nn.Linear(64, 64),
                nn.Tanh(),
                nn.Linear(64, outputs),
            )
            for outputs in (6, 1)
        )

    def loss(
        self,
        seen: torch.Tensor,
        done: torch.Tensor,
        before: torch.Tensor,
        gains: torch.Tensor,
        returns: torch.Tensor,
    ) -> torch.Tensor:
        policy = torch.distributions.Categorical(logits=self.actor(seen))
        ratio = (policy.log_prob(done) - before).exp()
        gains = (gains - gains.mean()) / (gains.std() + 1e-8)
        kept = torch.clamp(ratio, 0.8, 1.2)
        gained = torch.min(ratio * gains, kept * gains).mean()
        missed = 0.5 * (self.critic(seen).flatten() - returns).pow(2).mean()
        return missed - gained - 0.01 * policy.entropy().mean()


# ----------------------------------------------------------------------------
# Of the fourth set.


class PlainBlock(nn.Module):
    """With dropout in attention and behind each half."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.p = heads, dropout
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )
        self.drop = nn.Dropout(dropout)

    def forward(
        self, x: torch.Tensor, causal: bool, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        b, t, c = x.shape
        h = self.n1(x)
        q, k, v = (
            each(h).view(b, t, self.heads, -1).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, dropout_p=p
        )
        x = x + self.drop(self.o(y.transpose(1, 2).reshape(b, t, c)))
        return x + self.mlp(self.n2(x))


class PlainGpt(nn.Module):
    def __init__(self, width: int = 512, depth: int = 6, words: int = 16384) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(512, width)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(PlainBlock(width, 8, 0.1) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.size(1), device=ids.device))
        x = self.drop(x)
        for block in self.blocks:
            x = block(x, causal=True)
        return self.head(self.norm(x))


class PlainBert(nn.Module):
    """Words of which some are padding, and a guess at each."""

    def __init__(self, width: int = 768, depth: int = 12, words: int = 30522) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(512, width)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.blocks = nn.ModuleList(PlainBlock(width, 12, 0.1) for _ in range(depth))
        self.guess = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)
        )
        self.head = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.size(1), device=ids.device)
        x = self.drop(self.norm(self.words(ids) + self.places(places)))
        mask = seen.bool()[:, None, None, :]
        for block in self.blocks:
            x = block(x, causal=False, mask=mask)
        return self.head(self.guess(x))


class PlainVit(nn.Module):
    def __init__(self, width: int = 768, depth: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.summary = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 197, width))
        self.blocks = nn.ModuleList(PlainBlock(width, 12, 0.0) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.summary.expand(x.size(0), -1, -1), x), 1) + self.places
        for block in self.blocks:
            x = block(x, causal=False)
        return self.head(self.norm(x)[:, 0])


class Bottleneck(nn.Module):
    """Of ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.c1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.c2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.c3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.n1, self.n2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.n3, self.relu = nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        self.skip: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            self.skip = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.relu(self.n1(self.c1(x)))
        h = self.relu(self.n2(self.c2(h)))
        return self.relu(self.n3(self.c3(h)) + self.skip(x))


class ResNet50(nn.Module):
    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )
        stages, c = [], 64
        for place, (width, depth) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
            blocks = []
            for block in range(depth):
                blocks.append(Bottleneck(c, width, 1 if block or not place else 2))
                c = 4 * width
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.ModuleList(stages)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(c, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = (
                checkpoint(stage, x, use_reentrant=False)
                if self.recomputes
                else stage(x)
            )
        return self.head(self.pool(x).flatten(1))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class LlamaBlock(nn.Module):
    """Few heads of keys, rotary places and a gate, by hand."""

    def __init__(self, width: int, heads: int, keys: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.keys, self.size = heads, keys, width // heads
        self.n1, self.n2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (
            nn.Linear(width, keys * self.size, bias=False) for _ in range(2)
        )
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        b, t, c = x.shape
        h = self.n1(x)
        q = self.q(h).view(b, t, self.heads, self.size).transpose(1, 2)
        k = self.k(h).view(b, t, self.keys, self.size).transpose(1, 2)
        v = self.v(h).view(b, t, self.keys, self.size).transpose(1, 2)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        k, v = (
            each.repeat_interleave(self.heads // self.keys, dim=1) for each in (k, v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, c))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class PlainLlama(nn.Module):
    def __init__(self, width: int = 1536, depth: int = 12, words: int = 32000) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            LlamaBlock(width, 12, 4, 4096) for _ in range(depth)
        )
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)
        rates = 10000.0 ** (-torch.arange(0, 128, 2) / 128)
        turns = torch.outer(torch.arange(2048), rates).repeat(1, 2)
        self.register_buffer("cos", turns.cos())
        self.register_buffer("sin", turns.sin())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, t = self.words(ids), ids.size(1)
        for block in self.blocks:
            x = checkpoint(block, x, self.cos[:t], self.sin[:t], use_reentrant=False)
        return self.head(self.norm(x))


class GatedBlock(nn.Module):
    """Of gMLP: a gate that mixes the places."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norm, self.inp = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.gate, self.mix = nn.LayerNorm(2 * width), nn.Conv1d(places, places, 1)
        self.out = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u, v = F.gelu(self.inp(self.norm(x))).chunk(2, dim=-1)
        return x + self.out(u * self.mix(self.gate(v)))


class GatedMlp(nn.Module):
    def __init__(self, width: int = 128, depth: int = 24) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(*[GatedBlock(64, width) for _ in range(depth)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.patches(x).flatten(2).transpose(1, 2))
        return self.head(x.mean(1))


def _volume(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before in (inputs, outputs):
        layers.append(nn.Conv3d(before, outputs, 3, padding=1))
        layers += [nn.InstanceNorm3d(outputs, affine=True), nn.LeakyReLU(0.01)]
    return nn.Sequential(*layers)


class VolumeUNet(nn.Module):
    """Of medical images, in three dimensions."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256)) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        self.first = _volume(1, widths[0])
        self.down = nn.ModuleList(_volume(a, b) for a, b in pairs)
        self.up = nn.ModuleList(
            nn.ConvTranspose3d(b, a, 2, stride=2) for a, b in reversed(pairs)
        )
        self.join = nn.ModuleList(_volume(2 * a, a) for a, _ in reversed(pairs))
        self.head = nn.Conv3d(widths[0], 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = [self.first(x)]
        for block in self.down:
            seen.append(block(F.max_pool3d(seen[-1], 2)))
        x = seen.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat((up(x), seen.pop()), dim=1))
        return self.head(x)


class Translator(nn.Module):
    """torch's own transformer, from one language to another."""

    def __init__(self, width: int = 512, words: int = 32000) -> None:
        super().__init__()
        self.here, self.there = nn.Embedding(words, width), nn.Embedding(words, width)
        self.places = nn.Parameter(0.02 * torch.randn(256, width))
        self.body = nn.Transformer(width, 8, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.here(source) + self.places[: source.size(1)]
        y = self.there(target) + self.places[: target.size(1)]
        later = self.body.generate_square_subsequent_mask(
            target.size(1), device=target.device
        )
        made = self.body(
            x,
            y,
            tgt_mask=later,
            src_key_padding_mask=source == 0,
            memory_key_padding_mask=source == 0,
            tgt_is_causal=True,
        )
        return self.head(made)


class CharLstm(nn.Module):
    def __init__(self, letters: int = 128, width: int = 512) -> None:
        super().__init__()
        self.e = nn.Embedding(letters, 128)
        self.l = nn.LSTM(128, width, 3, batch_first=True, dropout=0.2)
        self.h = nn.Linear(width, letters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.h(self.l(self.e(x))[0])


def wide_mlp() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(1024, 4096)]
    for _ in range(6):
        layers += [nn.BatchNorm1d(4096), nn.ReLU(), nn.Dropout(0.2)]
        layers.append(nn.Linear(4096, 4096))
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(4096, 512))


# ----------------------------------------------------------------------------
# Of the fifth set.


class RmsNorm(nn.Module):
    """In 32 bits, by hand."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return h.type_as(x) * self.weight


def turn_rates(size: int, length: int) -> torch.Tensor:
    """Angles of rotary places: one row a place."""
    rates = 1.0 / 10000.0 ** (torch.arange(0, size, 2).float() / size)
    return torch.outer(torch.arange(length).float(), rates)


def turned_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1)
    return pairs.flatten(-2).type_as(x)


class SwiGlu(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.both = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class GroupedBlock(nn.Module):
    """Queries, keys and values in one product; keys shared by ``enable_gqa``."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.size = width // heads
        self.sizes = [width, groups * self.size, groups * self.size]
        self.n1, self.n2 = RmsNorm(width), RmsNorm(width)
        self.qkv = nn.Linear(width, sum(self.sizes), bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.mlp = SwiGlu(width, hidden)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = (
            each.unflatten(-1, (-1, self.size))
            for each in self.qkv(self.n1(x)).split(self.sizes, dim=-1)
        )
        q, k = turned_pairs(q, cos, sin), turned_pairs(k, cos, sin)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.n2(x))


class GroupedGpt(nn.Module):
    def __init__(
        self, width: int, depth: int, heads: int, groups: int, hidden: int, length: int
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(32000, width)
        self.blocks = nn.ModuleList(
            GroupedBlock(width, heads, groups, hidden) for _ in range(depth)
        )
        self.norm, self.head = RmsNorm(width), nn.Linear(width, 32000, bias=False)
        turns = turn_rates(width // heads, length)[:, None]
        self.register_buffer("cos", turns.cos())
        self.register_buffer("sin", turns.sin())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(3).type_as(x)


class ComplexBlock(nn.Module):
    """Rotary places as complex numbers; keys and values repeated for their queries."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        kept = groups * self.size
        self.n1, self.n2 = RmsNorm(width), RmsNorm(width)
        self.wq, self.wo = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(width, kept, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, width, bias=False)

    def repeated(self, x: torch.Tensor) -> torch.Tensor:
        b, t, groups, size = x.shape
        times = self.heads // groups
        x = x[:, :, :, None, :].expand(b, t, groups, times, size)
        return x.reshape(b, t, self.heads, size)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        h = self.n1(x)
        q = turned(self.wq(h).view(b, t, self.heads, self.size), turns)
        k = turned(self.wk(h).view(b, t, self.groups, self.size), turns)
        v = self.wv(h).view(b, t, self.groups, self.size)
        k, v = self.repeated(k), self.repeated(v)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.wo(y.transpose(1, 2).contiguous().view(b, t, -1))
        h = self.n2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class HalfCheckpointedGpt(nn.Module):
    """Every second block is computed again in the backward pass."""

    def __init__(self, width: int = 1280, depth: int = 14, length: int = 1024) -> None:
        super().__init__()
        self.words = nn.Embedding(32000, width)
        self.blocks = nn.ModuleList(
            ComplexBlock(width, 20, 5, 3456) for _ in range(depth)
        )
        self.norm, self.head = RmsNorm(width), nn.Linear(width, 32000, bias=False)
        angles = turn_rates(width // 20, length)[:, None]
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for place, block in enumerate(self.blocks):
            if place % 2:
                x = checkpoint(block, x, self.turns, use_reentrant=False)
            else:
                x = block(x, self.turns)
        return self.head(self.norm(x))


class BasicBlock(nn.Module):
    """Of ResNet-18 and ResNet-34."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.c2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.n1, self.n2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.skip = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.n1(self.c1(x)))
        return F.relu(self.n2(self.c2(h)) + self.skip(x))


class GroupedBottleneck(nn.Module):
    """Of ResNeXt: the middle convolution in groups."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        h = outputs // 2
        self.body = nn.Sequential(
            nn.Conv2d(inputs, h, 1, bias=False),
            nn.BatchNorm2d(h),
            nn.ReLU(inplace=True),
            nn.Conv2d(h, h, 3, stride, padding=1, groups=32, bias=False),
            nn.BatchNorm2d(h),
            nn.ReLU(inplace=True),
            nn.Conv2d(h, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.skip = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.skip(x), inplace=True)


def _stages(
    block: type[nn.Module], c: int, widths: tuple[int, ...], depths: tuple[int, ...]
) -> nn.Sequential:
    layers = []
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        for place in range(depth):
            layers.append(block(c, width, 2 if stage and not place else 1))
            c = width
    return nn.Sequential(*layers)


def cifar_resnet18() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        _stages(BasicBlock, 64, (64, 128, 256, 512), (2, 2, 2, 2)),
        nn.AvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def image_net(block: type[nn.Module], widths: tuple[int, ...]) -> nn.Module:
    """ResNet-34 or ResNeXt-50."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
        _stages(block, 64, widths, (3, 4, 6, 3)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(widths[-1], 1000),
    )


class TimedResBlock(nn.Module):
    """Of DDPM: the time is added between two convolutions."""

    def __init__(self, inputs: int, outputs: int, times: int) -> None:
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(32, inputs), _conv3(inputs, outputs)
        self.time = nn.Linear(times, outputs)
        self.n2, self.c2 = nn.GroupNorm(32, outputs), _conv3(outputs, outputs)
        self.drop = nn.Dropout(0.1)
        same = inputs == outputs
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        h = self.c1(F.silu(self.n1(x)))
        h = h + self.time(F.silu(t))[:, :, None, None]
        h = self.c2(self.drop(F.silu(self.n2(h))))
        return self.skip(x) + h


class ImageAttention(nn.Module):
    """Of DDPM: one head, written as two products."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.norm, self.q = nn.GroupNorm(32, c), nn.Conv2d(c, c, 1)
        self.k, self.v, self.o = (nn.Conv2d(c, c, 1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x.shape
        n = self.norm(x)
        q, k, v = (each(n).view(b, c, h * w) for each in (self.q, self.k, self.v))
        weights = torch.einsum("bcq,bcs->bqs", q, k) * c**-0.5
        y = torch.einsum("bqs,bcs->bcq", weights.softmax(-1), v)
        return x + self.o(y.reshape(b, c, h, w))


class DdpmUNet(nn.Module):
    """Skips from every block; attention at the third resolution."""

    def __init__(self, c: int = 128, multiples: tuple[int, ...] = (1, 2, 2, 4)) -> None:
        super().__init__()
        self.c, times, last = c, 4 * c, len(multiples) - 1
        self.times = nn.Sequential(
            nn.Linear(c, times), nn.SiLU(), nn.Linear(times, times)
        )
        self.inp = _conv3(3, c)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        seen, now = [c], c
        for level, multiple in enumerate(multiples):
            for _ in range(2):
                self.down.append(TimedResBlock(now, multiple * c, times))
                now = multiple * c
                if level == 2:
                    self.down.append(ImageAttention(now))
                seen.append(now)
            if level != last:
                self.down.append(nn.Conv2d(now, now, 3, stride=2, padding=1))
                seen.append(now)
        self.mid = nn.ModuleList(
            [
                TimedResBlock(now, now, times),
                ImageAttention(now),
                TimedResBlock(now, now, times),
            ]
        )
        for level, multiple in reversed(list(enumerate(multiples))):
            for _ in range(3):
                self.up.append(TimedResBlock(now + seen.pop(), multiple * c, times))
                now = multiple * c
                if level == 2:
                    self.up.append(ImageAttention(now))
            if level:
                self.up.append(
                    nn.Sequential(nn.Upsample(scale_factor=2), _conv3(now, now))
                )
        self.out = nn.Sequential(nn.GroupNorm(32, c), nn.SiLU(), _conv3(c, 3))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        half = self.c // 2
        rates = torch.exp(torch.arange(half, device=x.device) * (-9.21 / (half - 1)))
        angles = t[:, None].float() * rates[None]
        times = self.times(torch.cat((angles.sin(), angles.cos()), dim=-1))
        x = self.inp(x)
        seen = [x]
        for layer in self.down:
            if isinstance(layer, ImageAttention):
                x = layer(x)
                seen[-1] = x
                continue
            x = layer(x, times) if isinstance(layer, TimedResBlock) else layer(x)
            seen.append(x)
        for layer in self.mid:
            x = layer(x, times) if isinstance(layer, TimedResBlock) else layer(x)
        for layer in self.up:
            if isinstance(layer, TimedResBlock):
                x = layer(torch.cat((x, seen.pop()), dim=1), times)
            else:
                x = layer(x)
        return self.out(x)


class Ddpm(nn.Module):
    """How well a network tells the noise that was added."""

    def __init__(self, steps: int = 1000) -> None:
        super().__init__()
        self.steps, self.net = steps, DdpmUNet()
        kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps), dim=0)
        self.register_buffer("kept", kept)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        t = torch.randint(0, self.steps, (x.shape[0],), device=x.device)
        noise = torch.randn_like(x)
        kept = self.kept[t][:, None, None, None]
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        return F.mse_loss(self.net(noisy, t).float(), noise)


def windows(x: torch.Tensor, size: int) -> torch.Tensor:
    b, h, w, c = x.shape
    x = x.view(b, h // size, size, w // size, size, c)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, size * size, c)


def joined(x: torch.Tensor, size: int, h: int, w: int) -> torch.Tensor:
    b = x.shape[0] * size * size // (h * w)
    x = x.view(b, h // size, w // size, size, size, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(b, h, w, -1)


class WindowAttention(nn.Module):
    """With a learned bias for each distance."""

    def __init__(self, width: int, heads: int, size: int) -> None:
        super().__init__()
        self.heads, self.n = heads, size * size
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros((2 * size - 1) ** 2, heads))
        axis = torch.arange(size)
        places = torch.stack(torch.meshgrid(axis, axis, indexing="ij")).flatten(1)
        apart = places[:, :, None] - places[:, None, :] + size - 1
        self.register_buffer("index", (apart[0] * (2 * size - 1) + apart[1]).flatten())

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * (c // self.heads) ** -0.5) @ k.transpose(-2, -1)
        bias = self.bias[self.index].view(n, n, self.heads).permute(2, 0, 1)
        scores = scores + bias.contiguous().unsqueeze(0)
        if mask is not None:
            count = mask.shape[0]
            scores = scores.view(b // count, count, self.heads, n, n)
            scores = (scores + mask[None, :, None]).view(-1, self.heads, n, n)
        y = scores.softmax(-1) @ v
        return self.o(y.transpose(1, 2).reshape(b, n, c))


class SwinBlock(nn.Module):
    def __init__(
        self, width: int, heads: int, side: int, shifts: bool, drops: float
    ) -> None:
        super().__init__()
        self.size, self.side, self.drops = 7, side, drops
        self.shift = self.size // 2 if shifts and side > self.size else 0
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = WindowAttention(width, heads, self.size)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.register_buffer("mask", self._mask() if self.shift else None)

    def _mask(self) -> torch.Tensor:
        parts = torch.zeros(1, self.side, self.side, 1)
        spans = (
            slice(0, -self.size),
            slice(-self.size, -self.shift),
            slice(-self.shift, None),
        )
        for number, (rows, columns) in enumerate(itertools.product(spans, spans)):
            parts[:, rows, columns, :] = number
        flat = windows(parts, self.size).squeeze(-1)
        apart = flat[:, None, :] - flat[:, :, None]
        return torch.zeros_like(apart).masked_fill(apart != 0, -100.0)

    def dropped(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.drops == 0.0:
            return x
        kept = x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(1 - self.drops)
        return x * kept.div_(1 - self.drops)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.n1(x)
        if self.shift:
            h = torch.roll(h, (-self.shift, -self.shift), dims=(1, 2))
        h = self.attention(windows(h, self.size), self.mask)
        h = joined(h, self.size, self.side, self.side)
        if self.shift:
            h = torch.roll(h, (self.shift, self.shift), dims=(1, 2))
        x = x + self.dropped(h)
        return x + self.dropped(self.mlp(self.n2(x)))


class Merge(nn.Module):
    """Four neighbours become one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.out = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        corners = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return self.out(self.norm(torch.cat(corners, dim=-1)))


class Swin(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.patches, self.first = nn.Conv2d(3, width, 4, stride=4), nn.LayerNorm(width)
        depths, layers, before = (2, 2, 6, 2), [], 0
        for stage, depth in enumerate(depths):
            c, side = width * 2**stage, 56 // 2**stage
            for place in range(depth):
                drops = 0.2 * before / (sum(depths) - 1)
                layers.append(SwinBlock(c, c // 32, side, place % 2 == 1, drops))
                before += 1
            if stage < 3:
                layers.append(Merge(c))
        self.body = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(8 * width), nn.Linear(8 * width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.patches(x).permute(0, 2, 3, 1))
        return self.head(self.norm(self.body(x)).mean((1, 2)))


class CausalAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        qkv = self.qkv(x).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, t, c))


class DenseExperts(nn.Module):
    """Two experts a token, by products with one-hot tensors; what overflows is dropped."""

    def __init__(self, width: int, hidden: int, experts: int, room: int) -> None:
        super().__init__()
        self.experts, self.room = experts, room
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(0.02 * torch.randn(experts, width, hidden))
        self.down = nn.Parameter(0.02 * torch.randn(experts, hidden, width))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        b, t, _ = x.shape
        chances = self.gate(x).float().softmax(-1)
        weights, chosen = chances.topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        takes = F.one_hot(chosen, self.experts).float()  # batch, token, choice, expert
        flat = takes.transpose(1, 2).reshape(b, 2 * t, self.experts)
        places = ((flat.cumsum(1) - 1) * flat).sum(-1).long()
        fits = places < self.room
        slots = F.one_hot(places.clamp(max=self.room - 1), self.room) * fits[..., None]
        slots = slots.view(b, 2, t, self.room).transpose(1, 2).float()
        combine = torch.einsum("btke,btks->btes", weights[..., None] * takes, slots)
        dispatch = (combine > 0).to(x.dtype)
        sent = torch.einsum("btes,btc->ebsc", dispatch, x)
        h = F.gelu(torch.einsum("ebsc,ech->ebsh", sent, self.up))
        made = torch.einsum("ebsh,ehc->ebsc", h, self.down)
        y = torch.einsum("btes,ebsc->btc", combine.to(x.dtype), made)
        busy = takes[:, :, 0].mean((0, 1)) * chances.mean((0, 1))
        return y, self.experts * busy.sum()


class ExpertGpt(nn.Module):
    """Every second block has experts."""

    def __init__(self, width: int = 1024, depth: int = 8, words: int = 32000) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(1024, width)
        self.attentions = nn.ModuleList(
            CausalAttention(width, 16) for _ in range(depth)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth + 1))
        self.mlps = nn.ModuleList(
            DenseExperts(width, 4 * width, 8, 320) if place % 2 else SwiGlu(width, 2816)
            for place in range(depth)
        )
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.size(1), device=ids.device))
        uneven = torch.zeros((), device=ids.device)
        for place, (attend, mlp) in enumerate(
            zip(self.attentions, self.mlps, strict=True)
        ):
            x = x + attend(self.norms[2 * place](x))
            h = mlp(self.norms[2 * place + 1](x))
            if isinstance(h, tuple):
                h, one = h
                uneven = uneven + one
            x = x + h
        logits = self.head(self.norms[-1](x)).flatten(0, 1).float()
        return F.cross_entropy(logits, targets.flatten()) + 0.01 * uneven


class SquaredGpt(nn.Module):
    """Norms without weights, queries and keys normed, squares behind the ReLU."""

    def __init__(self, width: int = 640, depth: int = 10, words: int = 50304) -> None:
        super().__init__()
        self.size = 64
        self.words = nn.Embedding(words, width)
        self.qkv, self.o, self.up, self.down = (
            nn.ModuleList(nn.Linear(a, b, bias=False) for _ in range(depth))
            for a, b in (
                (width, 3 * width),
                (width, width),
                (width, 4 * width),
                (4 * width, width),
            )
        )
        self.head = nn.Linear(width, words, bias=False)
        turns = turn_rates(self.size, 512).repeat(1, 2)
        self.register_buffer("cos", turns.cos())
        self.register_buffer("sin", turns.sin())

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        width = (x.size(-1),)
        x = F.rms_norm(x, width)
        for qkv, o, up, down in zip(self.qkv, self.o, self.up, self.down, strict=True):
            h = qkv(F.rms_norm(x, width)).unflatten(-1, (3, -1, self.size))
            q, k, v = h.transpose(1, 3).unbind(2)
            q, k = (
                rotated(F.rms_norm(each, (self.size,)), self.cos, self.sin).type_as(v)
                for each in (q, k)
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + o(y.transpose(1, 2).flatten(2))
            x = x + down(F.relu(up(F.rms_norm(x, width))).square())
        logits = self.head(F.rms_norm(x, width)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class BiasedBlock(nn.Module):
    """Attention with a bias that is added to the scores."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (
            each.reshape(b, t, self.heads, -1).transpose(1, 2)
            for each in self.qkv(self.n1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.n2(x)), approximate="tanh"))


class AlibiGpt(nn.Module):
    """Of BLOOM's kind: far words count less, and there are no places."""

    def __init__(
        self, width: int = 1024, depth: int = 12, heads: int = 16, length: int = 1024
    ) -> None:
        super().__init__()
        self.words, self.first = nn.Embedding(40000, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(BiasedBlock(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 40000, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)
        slopes = 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1))
        axis = torch.arange(length)
        apart = (axis[None, :] - axis[:, None]).float()
        bias = slopes[:, None, None] * apart
        later = torch.ones(length, length).triu(1).bool()
        bias = bias.masked_fill(later, float("-inf"))
        self.register_buffer("bias", bias[None], persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.first(self.words(ids))
        for block in self.blocks:
            x = block(x, self.bias)
        return self.head(self.norm(x))


class Summarizer(nn.Module):
    """torch's own transformer as it comes: the sequence first, norms last."""

    def __init__(self, width: int = 768, words: int = 24000) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=0)
        self.body = nn.Transformer(width, 12, 4, 4, 3072)
        self.head = nn.Linear(width, words)
        places = torch.zeros(512, 1, width)
        angles = turn_rates(width, 512)
        places[:, 0, 0::2], places[:, 0, 1::2] = angles.sin(), angles.cos()
        self.register_buffer("places", places)
        self.register_buffer(
            "later", nn.Transformer.generate_square_subsequent_mask(128)
        )

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.words(source) * 27.7 + self.places[: source.size(0)]
        y = self.words(target) * 27.7 + self.places[: target.size(0)]
        return self.head(self.body(x, y, tgt_mask=self.later))


_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def _products_are_kept(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in _KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class LongGpt(nn.Module):
    """Products and attentions are kept, all else is computed again."""

    def __init__(self, width: int = 1536, depth: int = 10, length: int = 16384) -> None:
        super().__init__()
        self.words = nn.Embedding(32000, width)
        self.blocks = nn.ModuleList(
            GroupedBlock(width, 12, 12, 4096) for _ in range(depth)
        )
        self.norm, self.head = RmsNorm(width), nn.Linear(width, 32000, bias=False)
        turns = turn_rates(width // 12, length)[:, None]
        self.register_buffer("cos", turns.cos())
        self.register_buffer("sin", turns.sin())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        kept = partial(create_selective_checkpoint_contexts, _products_are_kept)
        x = self.words(ids)
        for block in self.blocks:
            x = checkpoint(
                block, x, self.cos, self.sin, use_reentrant=False, context_fn=kept
            )
        return self.head(self.norm(x))


class WaveLayer(nn.Module):
    """A gate of dilated convolutions that see the past alone."""

    def __init__(self, width: int, skips: int, dilation: int) -> None:
        super().__init__()
        self.past = dilation
        self.gates = weight_norm(nn.Conv1d(width, 2 * width, 2, dilation=dilation))
        self.out = weight_norm(nn.Conv1d(width, width, 1))
        self.skip = weight_norm(nn.Conv1d(width, skips, 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = self.gates(F.pad(x, (self.past, 0))).chunk(2, dim=1)
        h = torch.tanh(a) * torch.sigmoid(b)
        return x + self.out(h), self.skip(h)


class WaveNet(nn.Module):
    """Samples of sound in 256 steps, each told from those before."""

    def __init__(self, width: int = 64, skips: int = 256, stacks: int = 3) -> None:
        super().__init__()
        self.first = nn.Embedding(256, width)
        self.layers = nn.ModuleList(
            WaveLayer(width, skips, 2**place)
            for _ in range(stacks)
            for place in range(10)
        )
        self.head = nn.Sequential(
            nn.ReLU(), nn.Conv1d(skips, skips, 1), nn.ReLU(), nn.Conv1d(skips, 256, 1)
        )

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        x = self.first(samples).transpose(1, 2)
        total: torch.Tensor | float = 0.0
        for layer in self.layers:
            x, skip = layer(x)
            total = total + skip
        return self.head(total)


class AttendingBlock(nn.Module):
    """torch's own attention, and norms before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        h = self.n1(x)
        h, _ = self.attend(h, h, h, attn_mask=later, is_causal=True, need_weights=False)
        x = x + h
        return x + self.mlp(self.n2(x))


class AttendingGpt(nn.Module):
    def __init__(self, width: int, depth: int, heads: int, words: int = 32000) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(512, width)
        self.blocks = nn.ModuleList(AttendingBlock(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        t = ids.size(1)
        later = torch.ones(t, t, dtype=torch.bool, device=ids.device).triu(1)
        x = self.words(ids) + self.places.weight[:t]
        for block in self.blocks:
            x = block(x, later)
        return self.head(self.norm(x))


class Distilled(nn.Module):
    """A small model that learns from the words and from a large one."""

    def __init__(self, heat: float = 2.0) -> None:
        super().__init__()
        self.heat = heat
        self.teacher = AttendingGpt(1024, 20, 16).requires_grad_(False).eval()
        self.student = AttendingGpt(640, 8, 10)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(ids).flatten(0, 1)
        logits = self.student(ids).flatten(0, 1)
        soft = F.kl_div(
            F.log_softmax(logits / self.heat, dim=-1),
            F.log_softmax(wanted / self.heat, dim=-1),
            reduction="batchmean",
            log_target=True,
        )
        hard = F.cross_entropy(logits, targets.flatten())
        return 0.5 * hard + 0.5 * self.heat**2 * soft


class WordyGpt(nn.Module):
    """Many words: their loss is taken piece by piece, and logits are not kept."""

    def __init__(
        self, width: int = 1536, depth: int = 8, words: int = 131072, pieces: int = 8
    ) -> None:
        super().__init__()
        self.pieces = pieces
        self.words = nn.Embedding(words, width)
        nn.init.normal_(self.words.weight, std=0.02)
        self.attentions = nn.ModuleList(
            CausalAttention(width, 12) for _ in range(depth)
        )
        self.mlps = nn.ModuleList(SwiGlu(width, 4096) for _ in range(depth))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * depth + 1))

    def piece(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = F.linear(x, self.words.weight).float()
        return F.cross_entropy(logits, targets, reduction="sum")

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for place, (attend, mlp) in enumerate(
            zip(self.attentions, self.mlps, strict=True)
        ):
            x = x + attend(self.norms[2 * place](x))
            x = x + mlp(self.norms[2 * place + 1](x))
        x = self.norms[-1](x).flatten(0, 1)
        loss = torch.zeros((), device=x.device)
        for part, wanted in zip(
            x.chunk(self.pieces), targets.flatten().chunk(self.pieces), strict=True
        ):
            loss = loss + checkpoint(self.piece, part, wanted, use_reentrant=False)
        return loss / targets.numel()


class Forecaster(nn.Module):
    """Of PatchTST's kind: pieces of many series, each on its own."""

    def __init__(self, width: int = 128, depth: int = 6, after: int = 96) -> None:
        super().__init__()
        self.piece = nn.Linear(16, width)
        self.places = nn.Parameter(0.02 * torch.randn(42, width))
        layer = nn.TransformerEncoderLayer(width, 8, 256, 0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth)
        self.head = nn.Linear(42 * width, after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, spread = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
        h = ((x - mean) / spread).transpose(1, 2)  # batch, series, time
        h = F.pad(h, (0, 8), mode="replicate").unfold(-1, 16, 8)
        b, series = h.shape[:2]
        h = self.encoder(self.piece(h).flatten(0, 1) + self.places)
        y = self.head(h.flatten(1)).view(b, series, -1).transpose(1, 2)
        return y * spread + mean


# ----------------------------------------------------------------------------
# Of the sixth set.


class DenseLayer(nn.Module):
    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(4 * growth)
        self.relu = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        x = self.conv1(self.relu(self.norm1(torch.cat(features, 1))))
        return self.conv2(self.relu(self.norm2(x)))


class DenseBlock(nn.Module):
    """Every layer reads what all before it gave."""

    def __init__(self, depth: int, inputs: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            DenseLayer(inputs + place * growth, growth) for place in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    """DenseNet-121."""

    def __init__(
        self, depths: tuple[int, ...] = (6, 12, 24, 16), growth: int = 32
    ) -> None:
        super().__init__()
        width = 2 * growth
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        for place, depth in enumerate(depths):
            layers.append(DenseBlock(depth, width, growth))
            width += depth * growth
            layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            if place < len(depths) - 1:
                half = width // 2
                layers += [nn.Conv2d(width, half, 1, bias=False), nn.AvgPool2d(2, 2)]
                width = half
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.adaptive_avg_pool2d(self.features(x), (1, 1))
        return self.classifier(torch.flatten(x, 1))


def _eights(channels: float) -> int:
    """The multiple of 8 next to it, not a tenth below it."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def _conv_norm(
    inputs: int,
    outputs: int,
    kernel: int = 1,
    stride: int = 1,
    groups: int = 1,
    activation: type[nn.Module] | None = None,
) -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Conv2d(
            inputs,
            outputs,
            kernel,
            stride=stride,
            padding=kernel // 2,
            groups=groups,
            bias=False,
        ),
        nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.01),
    ]
    if activation is not None:
        layers.append(activation(inplace=True))
    return nn.Sequential(*layers)


class HardSqueeze(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, _eights(channels / 4), 1)
        self.fc2 = nn.Conv2d(_eights(channels / 4), channels, 1)
        self.relu, self.gate = nn.ReLU(inplace=True), nn.Hardsigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gate(self.fc2(self.relu(self.fc1(self.pool(x)))))


class InvertedResidual(nn.Module):
    def __init__(
        self,
        inputs: int,
        kernel: int,
        hidden: int,
        outputs: int,
        squeezes: bool,
        activation: type[nn.Module],
        stride: int,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        if hidden != inputs:
            layers.append(_conv_norm(inputs, hidden, activation=activation))
        layers.append(_conv_norm(hidden, hidden, kernel, stride, hidden, activation))
        if squeezes:
            layers.append(HardSqueeze(hidden))
        layers.append(_conv_norm(hidden, outputs))
        self.block = nn.Sequential(*layers)
        self.skips = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.block(x)
        if self.skips:
            result += x
        return result


class MobileNetV3(nn.Module):
    """The large one."""

    def __init__(self) -> None:
        super().__init__()
        re, hs = nn.ReLU, nn.Hardswish
        rows: list[tuple[int, int, int, bool, type[nn.Module], int]] = [
            (3, 16, 16, False, re, 1),
            (3, 64, 24, False, re, 2),
            (3, 72, 24, False, re, 1),
            (5, 72, 40, True, re, 2),
            (5, 120, 40, True, re, 1),
            (5, 120, 40, True, re, 1),
            (3, 240, 80, False, hs, 2),
            (3, 200, 80, False, hs, 1),
            (3, 184, 80, False, hs, 1),
            (3, 184, 80, False, hs, 1),
            (3, 480, 112, True, hs, 1),
            (3, 672, 112, True, hs, 1),
            (5, 672, 160, True, hs, 2),
            (5, 960, 160, True, hs, 1),
            (5, 960, 160, True, hs, 1),
        ]
        layers: list[nn.Module] = [_conv_norm(3, 16, 3, 2, activation=hs)]
        channels = 16
        for kernel, hidden, outputs, squeezes, activation, stride in rows:
            layers.append(
                InvertedResidual(
                    channels, kernel, hidden, outputs, squeezes, activation, stride
                )
            )
            channels = outputs
        layers.append(_conv_norm(channels, 960, activation=hs))
        self.features, self.pool = nn.Sequential(*layers), nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Linear(960, 1280),
            nn.Hardswish(inplace=True),
            nn.Dropout(0.2, inplace=True),
            nn.Linear(1280, 1000),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.flatten(self.pool(self.features(x)), 1))


class DilatedBottleneck(nn.Module):
    def __init__(
        self, inputs: int, width: int, stride: int = 1, dilation: int = 1
    ) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.conv2 = nn.Conv2d(
            width, width, 3, stride, dilation, dilation=dilation, bias=False
        )
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.bn3, self.relu = nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        self.down = None
        if stride != 1 or inputs != outputs:
            self.down = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        same = x if self.down is None else self.down(x)
        h = self.relu(self.bn1(self.conv1(x)))
        h = self.relu(self.bn2(self.conv2(h)))
        h = self.bn3(self.conv3(h))
        h += same
        return self.relu(h)


def _dilated_stage(
    inputs: int, width: int, depth: int, stride: int = 1, dilation: int = 1
) -> nn.Sequential:
    return nn.Sequential(
        DilatedBottleneck(inputs, width, stride, dilation),
        *(DilatedBottleneck(4 * width, width, 1, dilation) for _ in range(depth - 1)),
    )


def _pyramid_conv(inputs: int, outputs: int, dilation: int = 0) -> nn.Sequential:
    """Of 3 x 3, or of 1 x 1 where it is not dilated."""
    conv = (
        nn.Conv2d(inputs, outputs, 3, padding=dilation, dilation=dilation, bias=False)
        if dilation
        else nn.Conv2d(inputs, outputs, 1, bias=False)
    )
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class AtrousPyramid(nn.Module):
    """Dilated convolutions beside one another, and the mean of the image."""

    def __init__(self, inputs: int, outputs: int = 256) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            _pyramid_conv(inputs, outputs, dilation) for dilation in (0, 6, 12, 18)
        )
        self.pooled = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), _pyramid_conv(inputs, outputs)
        )
        self.project = nn.Sequential(_pyramid_conv(5 * outputs, outputs), nn.Dropout())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [branch(x) for branch in self.branches]
        mean = F.interpolate(
            self.pooled(x), size=x.shape[-2:], mode="bilinear", align_corners=False
        )
        return self.project(torch.cat([*found, mean], dim=1))


class DeepLab(nn.Module):
    """DeepLabV3+ on a ResNet-50 of stride 16."""

    def __init__(self, classes: int = 21) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        self.layer1 = _dilated_stage(64, 64, 3)
        self.layer2 = _dilated_stage(256, 128, 4, stride=2)
        self.layer3 = _dilated_stage(512, 256, 6, stride=2)
        self.layer4 = _dilated_stage(1024, 512, 3, dilation=2)
        self.pyramid = AtrousPyramid(2048)
        self.low = _pyramid_conv(256, 48)
        self.decoder = nn.Sequential(
            _pyramid_conv(304, 256, 1),
            _pyramid_conv(256, 256, 1),
            nn.Conv2d(256, classes, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.layer1(self.stem(x))
        high = self.pyramid(self.layer4(self.layer3(self.layer2(low))))
        high = F.interpolate(
            high, size=low.shape[-2:], mode="bilinear", align_corners=False
        )
        out = self.decoder(torch.cat((high, self.low(low)), dim=1))
        return F.interpolate(
            out, size=x.shape[-2:], mode="bilinear", align_corners=False
        )


def gpt2_start(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, mean=0.0, std=0.02)


class BertLayer(nn.Module):
    """Norms behind each half, as in the first BERT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.norm1 = nn.Linear(width, width), nn.LayerNorm(width, eps=1e-12)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm2, self.drop = nn.LayerNorm(width, eps=1e-12), nn.Dropout(0.1)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        return x.view(b, t, self.heads, c // self.heads).transpose(1, 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = F.scaled_dot_product_attention(
            self.split(self.query(x)),
            self.split(self.key(x)),
            self.split(self.value(x)),
            attn_mask=mask,
            dropout_p=0.1 if self.training else 0.0,
        )
        y = self.out(y.transpose(1, 2).reshape(x.shape))
        x = self.norm1(x + self.drop(y))
        return self.norm2(x + self.drop(self.down(F.gelu(self.up(x)))))


class Bert(nn.Module):
    """Guesses of hidden words; the head's weight is the embedding's."""

    def __init__(self, width: int = 768, depth: int = 12, words: int = 30522) -> None:
        super().__init__()
        self.word = nn.Embedding(words, width, padding_idx=0)
        self.place, self.kind = nn.Embedding(512, width), nn.Embedding(2, width)
        self.norm, self.drop = nn.LayerNorm(width, eps=1e-12), nn.Dropout(0.1)
        self.layers = nn.ModuleList(BertLayer(width, width // 64) for _ in range(depth))
        self.transform = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, eps=1e-12)
        )
        self.decoder = nn.Linear(width, words)
        self.decoder.weight = self.word.weight
        self.register_buffer("places", torch.arange(512))
        self.apply(gpt2_start)

    def forward(
        self, ids: torch.Tensor, kinds: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        x = self.word(ids) + self.place(self.places[: ids.size(1)]) + self.kind(kinds)
        x = self.drop(self.norm(x))
        mask = (1.0 - seen[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, mask)
        return self.decoder(self.transform(x))


class Gpt2Block(nn.Module):
    """As in nanoGPT, with dropout."""

    def __init__(self, width: int, heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln_1 = nn.LayerNorm(width, bias=bias)
        self.ln_2 = nn.LayerNorm(width, bias=bias)
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)
        self.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.c_out = nn.Linear(4 * width, width, bias=bias)
        self.resid_dropout = nn.Dropout(dropout)
        self.mlp_dropout = nn.Dropout(dropout)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(c, dim=2)
        k = k.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        q = q.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        v = v.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0, is_causal=True
        )
        y = y.transpose(1, 2).contiguous().view(b, t, c)
        return self.resid_dropout(self.c_proj(y))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.ln_1(x))
        h = F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")
        return x + self.mlp_dropout(self.c_out(h))


class DropoutGpt(nn.Module):
    """With tied embeddings."""

    def __init__(
        self,
        width: int,
        depth: int,
        heads: int,
        words: int,
        length: int,
        dropout: float,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(
            Gpt2Block(width, heads, dropout, bias) for _ in range(depth)
        )
        self.ln_f = nn.LayerNorm(width, bias=bias)
        self.lm_head = nn.Linear(width, words, bias=False)
        self.wte.weight = self.lm_head.weight
        self.apply(gpt2_start)

    def forward(
        self, ids: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(0, ids.size(1), dtype=torch.long, device=ids.device)
        x = self.drop(self.wte(ids) + self.wpe(places))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = F.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1
        )
        return logits, loss


def turned_halves(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class HalvesBlock(nn.Module):
    """Of a Llama, with the norms of PyTorch."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-5)
        self.q, self.k, self.v, self.o = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        b, t, c = x.shape
        h = self.attention_norm(x)
        q = self.q(h).view(b, t, self.heads, -1).transpose(1, 2)
        k = self.k(h).view(b, t, self.heads, -1).transpose(1, 2)
        v = self.v(h).view(b, t, self.heads, -1).transpose(1, 2)
        q, k = turned_halves(q, cos, sin), turned_halves(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, c))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class HalvesLlama(nn.Module):
    """Every block is computed again in the backward pass."""

    def __init__(
        self,
        width: int = 2048,
        depth: int = 24,
        heads: int = 16,
        hidden: int = 5504,
        words: int = 32000,
        length: int = 4096,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            HalvesBlock(width, heads, hidden) for _ in range(depth)
        )
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, words, bias=False)
        size = width // heads
        rates = 1.0 / (10000.0 ** (torch.arange(0, size, 2).float() / size))
        angles = torch.outer(torch.arange(length).float(), rates)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, t = self.words(ids), ids.size(1)
        cos, sin = self.cos[:t], self.sin[:t]
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False)
        return self.head(self.norm(x))


class ConformerFeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.SiLU(),
            nn.Dropout(0.1),
            nn.Linear(4 * width, width),
            nn.Dropout(0.1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class ConformerConvolution(nn.Module):
    def __init__(self, width: int, kernel: int = 31) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Conv1d(width, 2 * width, 1)
        self.depth = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.batch, self.outer = nn.BatchNorm1d(width), nn.Conv1d(width, width, 1)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x).transpose(1, 2)
        h = F.glu(self.inner(h), dim=1)
        h = self.outer(F.silu(self.batch(self.depth(h))))
        return self.drop(h.transpose(1, 2))


class RelativeAttention(nn.Module):
    """Of Transformer-XL: how far a frame is adds to how it is."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.place = nn.Linear(width, width, bias=False)
        self.u = nn.Parameter(torch.zeros(heads, self.size))
        self.w = nn.Parameter(torch.zeros(heads, self.size))
        self.drop = nn.Dropout(0.1)

    @staticmethod
    def shifted(scores: torch.Tensor) -> torch.Tensor:
        """From distances to frames: (b, h, t, 2t - 1) becomes (b, h, t, t)."""
        b, h, t, distances = scores.shape
        padded = F.pad(scores, (1, 0)).view(b, h, distances + 1, t)
        return padded[:, :, 1:].reshape(b, h, t, distances)[..., :t]

    def forward(
        self, x: torch.Tensor, places: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        b, t, c = x.shape
        x = self.norm(x)
        q = self.q(x).view(b, t, self.heads, self.size)
        k = self.k(x).view(b, t, self.heads, self.size).permute(0, 2, 3, 1)
        v = self.v(x).view(b, t, self.heads, self.size).transpose(1, 2)
        p = self.place(places).view(-1, self.heads, self.size).permute(1, 2, 0)
        content = torch.matmul((q + self.u).transpose(1, 2), k)
        distance = self.shifted(torch.matmul((q + self.w).transpose(1, 2), p))
        scores = (content + distance) / self.size**0.5
        scores = scores.masked_fill(hidden[:, None, None, :], float("-inf"))
        y = torch.matmul(self.drop(torch.softmax(scores, dim=-1)), v)
        return self.drop(self.o(y.transpose(1, 2).reshape(b, t, c)))


class ConformerLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.last = ConformerFeedForward(width), ConformerFeedForward(width)
        self.attention = RelativeAttention(width, heads)
        self.convolution = ConformerConvolution(width)
        self.norm = nn.LayerNorm(width)

    def forward(
        self, x: torch.Tensor, places: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        x = x + 0.5 * self.first(x)
        x = x + self.attention(x, places, hidden)
        x = x + self.convolution(x)
        return self.norm(x + 0.5 * self.last(x))


class Conformer(nn.Module):
    """Frames of sound to letters: a quarter as many frames."""

    def __init__(
        self, width: int = 256, depth: int = 16, heads: int = 4, letters: int = 128
    ) -> None:
        super().__init__()
        self.width = width
        self.subsample = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.project, self.drop = nn.Linear(20 * width, width), nn.Dropout(0.1)
        self.layers = nn.ModuleList(ConformerLayer(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, letters)

    def places(self, t: int, device: torch.device) -> torch.Tensor:
        """Sines of the distances t - 1 ... 1 - t."""
        distances = torch.arange(t - 1, -t, -1, device=device, dtype=torch.float32)
        rates = torch.arange(0, self.width, 2, device=device, dtype=torch.float32)
        angles = torch.outer(distances, 10000.0 ** (-rates / self.width))
        return torch.cat((angles.sin(), angles.cos()), dim=-1)

    def forward(self, sound: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = self.subsample(sound.unsqueeze(1))
        b, c, t, f = x.shape
        x = self.drop(self.project(x.transpose(1, 2).reshape(b, t, c * f)))
        places = self.places(t, x.device)
        hidden = torch.arange(t, device=x.device)[None, :] >= lengths[:, None]
        for layer in self.layers:
            x = layer(x, places, hidden)
        return self.head(x).log_softmax(dim=-1)


def dcgan_start(module: nn.Module) -> None:
    name = type(module).__name__
    if "Conv" in name:
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif "BatchNorm" in name:
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.constant_(module.bias, 0)


def generator(noise: int = 100, width: int = 128) -> nn.Sequential:
    """Of the DCGAN tutorial: noise to images of 64 x 64."""
    layers: list[nn.Module] = [
        nn.ConvTranspose2d(noise, 8 * width, 4, 1, 0, bias=False),
        nn.BatchNorm2d(8 * width),
        nn.ReLU(True),
    ]
    for times in (8, 4, 2):
        layers += [
            nn.ConvTranspose2d(times * width, times * width // 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(times * width // 2),
            nn.ReLU(True),
        ]
    layers += [nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh()]
    return nn.Sequential(*layers)


def discriminator(width: int = 128) -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
    ]
    for times in (1, 2, 4):
        layers += [
            nn.Conv2d(times * width, 2 * times * width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * times * width),
            nn.LeakyReLU(0.2, inplace=True),
        ]
    layers += [nn.Conv2d(8 * width, 1, 4, 1, 0, bias=False), nn.Sigmoid()]
    return nn.Sequential(*layers)


def waves(x: torch.Tensor, count: int) -> torch.Tensor:
    """Of NeRF: each coordinate, and its sines and cosines at ``count`` octaves."""
    found = [x]
    for octave in range(count):
        found += [torch.sin(2.0**octave * x), torch.cos(2.0**octave * x)]
    return torch.cat(found, dim=-1)


class NerfMlp(nn.Module):
    """Eight layers; what came in comes in again at the fifth."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.points = nn.ModuleList(
            nn.Linear(63 if not i else width + 63 if i == 5 else width, width)
            for i in range(8)
        )
        self.density, self.feature = nn.Linear(width, 1), nn.Linear(width, width)
        self.view = nn.Linear(width + 27, width // 2)
        self.color = nn.Linear(width // 2, 3)

    def forward(
        self, points: torch.Tensor, directions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seen, turned = waves(points, 10), waves(directions, 4)
        h = seen
        for i, layer in enumerate(self.points):
            if i == 5:
                h = torch.cat([seen, h], -1)
            h = F.relu(layer(h))
        density = self.density(h)
        h = F.relu(self.view(torch.cat([self.feature(h), turned], -1)))
        return torch.sigmoid(self.color(h)), density[..., 0]


def composed(
    colors: torch.Tensor, density: torch.Tensor, depths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The color of each ray, and the weight of each of its samples."""
    steps = depths[..., 1:] - depths[..., :-1]
    steps = torch.cat([steps, torch.full_like(steps[..., :1], 1e10)], -1)
    alpha = 1.0 - torch.exp(-F.relu(density) * steps)
    clear = torch.cumprod(
        torch.cat([torch.ones_like(alpha[:, :1]), 1.0 - alpha + 1e-10], -1), -1
    )
    weights = alpha * clear[:, :-1]
    return torch.sum(weights[..., None] * colors, -2), weights


def drawn_depths(
    middles: torch.Tensor, weights: torch.Tensor, count: int
) -> torch.Tensor:
    """More samples where the weights are."""
    weights = weights + 1e-5
    sums = torch.cumsum(weights / weights.sum(-1, keepdim=True), -1)
    sums = torch.cat([torch.zeros_like(sums[..., :1]), sums], -1)
    u = torch.rand(sums.size(0), count, device=sums.device)
    above = torch.searchsorted(sums, u, right=True)
    below = torch.clamp(above - 1, min=0)
    above = torch.clamp(above, max=sums.size(-1) - 1)
    low, high = torch.gather(sums, 1, below), torch.gather(sums, 1, above)
    start, end = torch.gather(middles, 1, below), torch.gather(middles, 1, above)
    width = high - low
    width = torch.where(width < 1e-5, torch.ones_like(width), width)
    return start + (u - low) / width * (end - start)


class Nerf(nn.Module):
    """A coarse network, and a fine one where the coarse one saw something."""

    def __init__(self, width: int = 256, coarse: int = 64, fine: int = 128) -> None:
        super().__init__()
        self.samples, self.more = coarse, fine
        self.coarse, self.fine = NerfMlp(width), NerfMlp(width)

    def colored(
        self,
        network: nn.Module,
        starts: torch.Tensor,
        directions: torch.Tensor,
        depths: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        points = starts[:, None] + directions[:, None] * depths[..., None]
        views = F.normalize(directions, dim=-1)[:, None].expand(points.shape)
        colors, density = network(points.reshape(-1, 3), views.reshape(-1, 3))
        shape = points.shape[:2]
        return composed(colors.view(*shape, 3), density.view(shape), depths)

    def forward(
        self, starts: torch.Tensor, directions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        even = torch.linspace(2.0, 6.0, self.samples, device=starts.device)
        depths = even.expand(starts.size(0), self.samples)
        middles = 0.5 * (depths[..., 1:] + depths[..., :-1])
        upper = torch.cat([middles, depths[..., -1:]], -1)
        lower = torch.cat([depths[..., :1], middles], -1)
        depths = lower + (upper - lower) * torch.rand_like(lower)
        rough, weights = self.colored(self.coarse, starts, directions, depths)
        middles = 0.5 * (depths[..., 1:] + depths[..., :-1])
        more = drawn_depths(middles, weights[..., 1:-1].detach(), self.more)
        depths, _ = torch.sort(torch.cat([depths, more], -1), -1)
        sharp, _ = self.colored(self.fine, starts, directions, depths)
        return rough, sharp


class DropPath(nn.Module):
    """Leaves the branch out of some images."""

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.chance = chance

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.chance == 0.0:
            return x
        kept = 1.0 - self.chance
        mask = x.new_empty(x.shape[0], *([1] * (x.dim() - 1))).bernoulli_(kept)
        return x * mask.div_(kept)


class DeitBlock(nn.Module):
    def __init__(self, width: int, heads: int, drop: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma1, self.gamma2 = (
            nn.Parameter(torch.full((width,), 1e-4)) for _ in range(2)
        )
        self.drop_path = DropPath(drop)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(b, n, c))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop_path(self.gamma1 * self.attend(self.norm1(x)))
        h = self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return x + self.drop_path(self.gamma2 * h)


class Deit(nn.Module):
    """A ViT-B with layer scale and stochastic depth."""

    def __init__(
        self, width: int = 768, depth: int = 12, heads: int = 12, image: int = 224
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, (image // 16) ** 2, width))
        rates = torch.linspace(0, 0.1, depth).tolist()
        self.blocks = nn.ModuleList(DeitBlock(width, heads, rate) for rate in rates)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = (
            each.view(b, n, self.heads, -1).transpose(1, 2)
            for each in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(b, n, c))


class SpaceTimeBlock(nn.Module):
    """Of TimeSformer: a patch attends to its past and future, then to its frame."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.time, self.space = (SelfAttention(width, heads) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.mix = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, n, c = x.shape
        h = self.norms[0](x).transpose(1, 2).reshape(b * n, t, c)
        x = x + self.mix(self.time(h)).view(b, n, t, c).transpose(1, 2)
        h = self.norms[1](x).reshape(b * t, n, c)
        x = x + self.space(h).view(b, t, n, c)
        return x + self.mlp(self.norms[2](x))


class VideoTransformer(nn.Module):
    def __init__(
        self,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        frames: int = 16,
        image: int = 224,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv3d(3, width, (2, 16, 16), stride=(2, 16, 16))
        self.times = nn.Parameter(torch.zeros(1, frames // 2, 1, width))
        self.places = nn.Parameter(torch.zeros(1, 1, (image // 16) ** 2, width))
        self.blocks = nn.ModuleList(SpaceTimeBlock(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 400)

    def forward(self, video: torch.Tensor) -> torch.Tensor:
        x = self.patches(video).flatten(3).permute(0, 2, 3, 1)
        x = x + self.times + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=(1, 2)))


class CappedBlock(nn.Module):
    """Queries and keys are normed; the MLP squares what its ReLU leaves."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.mixed = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(
        self,
        x: torch.Tensor,
        first: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        x = self.mixed[0] * x + self.mixed[1] * first
        b, t, c = x.shape
        qkv = self.qkv(F.rms_norm(x, (c,))).view(b, t, 3 * self.heads, -1)
        q, k, v = qkv.chunk(3, dim=2)
        q, k = (F.rms_norm(each, (each.size(-1),)) for each in (q, k))
        q, k = (turned_halves(each.transpose(1, 2), cos, sin) for each in (q, k))
        y = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.relu(self.up(F.rms_norm(x, (c,)))).square())


class CappedGpt(nn.Module):
    """As in speed runs of nanoGPT: its logits do not exceed 15."""

    def __init__(
        self,
        width: int = 768,
        depth: int = 12,
        heads: int = 6,
        words: int = 50304,
        length: int = 1024,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(CappedBlock(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, words, bias=False)
        size = width // heads
        rates = (1 / 1024) ** torch.linspace(0, 1, size // 2)
        angles = torch.outer(torch.arange(length).float(), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos().bfloat16(), persistent=False)
        self.register_buffer("sin", angles.sin().bfloat16(), persistent=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = first = F.rms_norm(self.words(ids), (self.words.embedding_dim,))
        for block in self.blocks:
            x = block(x, first, self.cos, self.sin)
        logits = self.head(F.rms_norm(x, (x.size(-1),))).float()
        logits = 15 * torch.tanh(logits / 15)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class Retention(nn.Module):
    """Chunks of a sentence; what came before one is a matrix that decays."""

    def __init__(self, width: int, heads: int, chunk: int) -> None:
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.q, self.k, self.v, self.gate, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(5)
        )
        self.norm = nn.GroupNorm(heads, width)
        decay = torch.log(1 - 2.0 ** (-5 - torch.arange(heads).float()))[:, None]
        place = torch.arange(chunk).float()
        apart = place[:, None] - place[None, :]
        within = torch.exp(decay[..., None] * apart).tril()
        self.register_buffer("within", within)
        self.register_buffer("since", torch.exp(decay * (place + 1))[..., None])
        self.register_buffer("until", torch.exp(decay * (chunk - 1 - place))[..., None])
        self.register_buffer("over", torch.exp(decay * chunk)[..., None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        shape = (b, t // self.chunk, self.chunk, self.heads, -1)
        q, k, v = (
            each(x).view(shape).permute(1, 0, 3, 2, 4)
            for each in (self.q, self.k, self.v)
        )
        k = k * k.size(-1) ** -0.5
        inner = ((q @ k.transpose(-1, -2)) * self.within) @ v
        state, outer = q.new_zeros(b, self.heads, q.size(-1), v.size(-1)), []
        for n in range(shape[1]):
            outer.append((q[n] @ state) * self.since)
            state = state * self.over + (k[n] * self.until).transpose(-1, -2) @ v[n]
        y = (inner + torch.stack(outer)).permute(1, 0, 3, 2, 4).reshape(b * t, c)
        y = self.norm(y).view(b, t, c)
        return self.out(F.silu(self.gate(x)) * y)


class RetNet(nn.Module):
    def __init__(
        self,
        width: int = 1024,
        depth: int = 8,
        heads: int = 8,
        words: int = 32000,
        chunk: int = 512,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.retentions = nn.ModuleList(
            Retention(width, heads, chunk) for _ in range(depth)
        )
        self.mlps = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )
            for _ in range(depth)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth + 1))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for i, (retain, mlp) in enumerate(zip(self.retentions, self.mlps, strict=True)):
            x = x + retain(self.norms[2 * i](x))
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))


class ChannelAttention(nn.Module):
    """Of RCAN: two convolutions, and a weight for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _conv3(channels, channels), nn.ReLU(True), _conv3(channels, channels)
        )
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, channels // 16, 1),
            nn.ReLU(True),
            nn.Conv2d(channels // 16, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        return x + h * self.weigh(h)


class SuperResolution(nn.Module):
    """Images four times as wide and as high."""

    def __init__(self, channels: int = 192, depth: int = 24) -> None:
        super().__init__()
        self.start = _conv3(3, channels)
        self.body = nn.Sequential(
            *(ChannelAttention(channels) for _ in range(depth)),
            _conv3(channels, channels),
        )
        self.grow = nn.Sequential(
            _conv3(channels, 4 * channels),
            nn.PixelShuffle(2),
            _conv3(channels, 4 * channels),
            nn.PixelShuffle(2),
            _conv3(channels, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        return self.grow(x + self.body(x))


def neighbours(x: torch.Tensor, k: int) -> torch.Tensor:
    """Of each point, its features less those of the ``k`` nearest, and its own."""
    b, c, n = x.shape
    with torch.no_grad():
        squares = (x**2).sum(dim=1, keepdim=True)
        nearness = 2 * torch.matmul(x.transpose(2, 1), x) - squares
        nearness = nearness - squares.transpose(2, 1)
        near = nearness.topk(k=k, dim=-1)[1]
        near = (near + torch.arange(b, device=x.device).view(-1, 1, 1) * n).view(-1)
    rows = x.transpose(2, 1).contiguous()
    found = rows.view(b * n, c)[near].view(b, n, k, c)
    own = rows.view(b, n, 1, c).expand(b, n, k, c)
    return torch.cat((found - own, own), dim=3).permute(0, 3, 1, 2).contiguous()


def _edge_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.LeakyReLU(0.2),
    )


class PointCloudNet(nn.Module):
    """DGCNN: who is near is found again before each layer."""

    def __init__(self, k: int = 20, classes: int = 40) -> None:
        super().__init__()
        self.k = k
        pairs = ((6, 64), (128, 64), (128, 128), (256, 256))
        self.layers = nn.ModuleList(_edge_conv(*pair) for pair in pairs)
        self.joined = nn.Sequential(
            nn.Conv1d(512, 1024, 1, bias=False), nn.BatchNorm1d(1024), nn.LeakyReLU(0.2)
        )
        self.head = nn.Sequential(
            nn.Linear(2048, 512, bias=False),
            nn.BatchNorm1d(512),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.5),
            nn.Linear(512, 256),
            nn.BatchNorm1d(256),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.5),
            nn.Linear(256, classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = []
        for layer in self.layers:
            x = layer(neighbours(x, self.k)).max(dim=-1)[0]
            found.append(x)
        x = self.joined(torch.cat(found, dim=1))
        largest = F.adaptive_max_pool1d(x, 1).squeeze(-1)
        mean = F.adaptive_avg_pool1d(x, 1).squeeze(-1)
        return self.head(torch.cat((largest, mean), dim=1))


class SortedExperts(nn.Module):
    """Two experts a token: tokens in the order of their experts, each of which runs."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(SwiGlu(width, hidden) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1, x.size(-1))
        chances = F.softmax(self.gate(flat), dim=-1, dtype=torch.float32)
        weights, chosen = chances.topk(2, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        order = chosen.view(-1).argsort()
        counts = torch.bincount(chosen.view(-1), minlength=len(self.experts)).tolist()
        rows = order // 2
        parts = flat[rows].split(counts)
        made = [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
        scaled = torch.cat(made) * weights.view(-1)[order, None]
        return torch.zeros_like(flat).index_add_(0, rows, scaled).view_as(x)


class SortedExpertsGpt(nn.Module):
    def __init__(
        self,
        width: int = 1024,
        depth: int = 8,
        heads: int = 16,
        hidden: int = 2816,
        experts: int = 8,
        words: int = 32000,
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(1024, width)
        self.attentions = nn.ModuleList(
            CausalAttention(width, heads) for _ in range(depth)
        )
        self.experts = nn.ModuleList(
            SortedExperts(width, hidden, experts) for _ in range(depth)
        )
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * depth + 1))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.size(1), device=ids.device))
        for i, (attend, mlp) in enumerate(
            zip(self.attentions, self.experts, strict=True)
        ):
            x = x + attend(self.norms[2 * i](x))
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))


class SpectralConv(nn.Module):
    """A product with each of the lowest frequencies."""

    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        shape = (channels, channels, modes, modes)
        self.low, self.high = (
            nn.Parameter(torch.rand(shape, dtype=torch.cfloat) / channels**2)
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x.shape
        m = self.modes
        seen = torch.fft.rfft2(x)
        out = torch.zeros(b, c, h, w // 2 + 1, dtype=torch.cfloat, device=x.device)
        out[:, :, :m, :m] = torch.einsum(
            "bixy,ioxy->boxy", seen[:, :, :m, :m], self.low
        )
        out[:, :, -m:, :m] = torch.einsum(
            "bixy,ioxy->boxy", seen[:, :, -m:, :m], self.high
        )
        return torch.fft.irfft2(out, s=(h, w))


class FourierOperator(nn.Module):
    """From one field to the next, as in FNO."""

    def __init__(self, channels: int = 64, modes: int = 24, depth: int = 4) -> None:
        super().__init__()
        self.lift, self.fall = nn.Linear(3, channels), nn.Linear(channels, 128)
        self.spectral = nn.ModuleList(
            SpectralConv(channels, modes) for _ in range(depth)
        )
        self.pointwise = nn.ModuleList(
            nn.Conv2d(channels, channels, 1) for _ in range(depth)
        )
        self.last = nn.Linear(128, 1)

    def forward(self, field: torch.Tensor) -> torch.Tensor:
        b, h, w, _ = field.shape
        rows = torch.linspace(0, 1, h, device=field.device).view(1, h, 1, 1)
        columns = torch.linspace(0, 1, w, device=field.device).view(1, 1, w, 1)
        grid = (rows.expand(b, h, w, 1), columns.expand(b, h, w, 1))
        x = self.lift(torch.cat((field, *grid), dim=-1)).permute(0, 3, 1, 2)
        for i, (far, near) in enumerate(
            zip(self.spectral, self.pointwise, strict=True)
        ):
            x = far(x) + near(x)
            if i + 1 < len(self.spectral):
                x = F.gelu(x)
        x = F.gelu(self.fall(x.permute(0, 2, 3, 1)))
        return self.last(x)


class AttendingGru(nn.Module):
    """A word at a time; before each, a look at the sentence to translate."""

    def __init__(self, words: int = 10000, size: int = 256, hidden: int = 512) -> None:
        super().__init__()
        self.hidden = hidden
        self.source, self.target = (nn.Embedding(words, size) for _ in range(2))
        self.encoder = nn.GRU(size, hidden, bidirectional=True, batch_first=True)
        self.start = nn.Linear(2 * hidden, hidden)
        self.keys = nn.Linear(2 * hidden, hidden, bias=False)
        self.query, self.energy = nn.Linear(hidden, hidden), nn.Linear(hidden, 1)
        self.cell = nn.GRUCell(size + 2 * hidden, hidden)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(3 * hidden + size, words)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen, last = self.encoder(self.drop(self.source(source)))
        keys = self.keys(seen)
        state = torch.tanh(self.start(torch.cat((last[0], last[1]), dim=-1)))
        hidden = source.eq(0)
        found = []
        for word in self.drop(self.target(target)).unbind(1):
            energy = self.energy(torch.tanh(keys + self.query(state)[:, None]))
            energy = energy.squeeze(-1).masked_fill(hidden, -1e9)
            look = torch.bmm(energy.softmax(-1)[:, None], seen).squeeze(1)
            state = self.cell(torch.cat((word, look), dim=-1), state)
            found.append(self.out(torch.cat((state, look, word), dim=-1)))
        return torch.stack(found, dim=1)


def _two_hidden(inputs: int, outputs: int, width: int = 256) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, outputs),
    )


class SoftActor(nn.Module):
    """An action and its logarithmic chance, by the normal law, with a gradient."""

    def __init__(self, seen: int, actions: int) -> None:
        super().__init__()
        self.body = _two_hidden(seen, 2 * actions)

    def forward(self, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, spread = self.body(seen).chunk(2, dim=-1)
        law = torch.distributions.Normal(mean, spread.clamp(-20, 2).exp())
        drawn = law.rsample()
        action = torch.tanh(drawn)
        chance = law.log_prob(drawn) - torch.log(1 - action.pow(2) + 1e-6)
        return action, chance.sum(-1, keepdim=True)


class TwinCritic(nn.Module):
    def __init__(self, seen: int, actions: int) -> None:
        super().__init__()
        self.one, self.two = (_two_hidden(seen + actions, 1) for _ in range(2))

    def forward(
        self, seen: torch.Tensor, action: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.cat((seen, action), dim=-1)
        return self.one(both), self.two(both)


def plain_critic(width: int = 64) -> nn.Sequential:
    """Of WGAN-GP: no batch norms, for each image has a penalty of its own."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 5, 2, 2), nn.LeakyReLU(0.2)]
    for times in (1, 2, 4):
        layers += [
            nn.Conv2d(times * width, 2 * times * width, 5, 2, 2),
            nn.GroupNorm(1, 2 * times * width),
            nn.LeakyReLU(0.2),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 8 * width, 1))
