"""Models of ``jobs.py``, as their users would write them."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


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
