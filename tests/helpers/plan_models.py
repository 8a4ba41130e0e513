"""Small models that the tests of plans share."""

import torch
import torch.nn.functional as F
from torch import nn


class MLP(nn.Module):
    def __init__(self, width=8, hidden=16):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    def __init__(self, width=8, head_dim=2, num_key_value_heads=2):
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, num_key_value_heads * head_dim)
        self.v = nn.Linear(width, num_key_value_heads * head_dim)
        self.o = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for p in (self.q, self.k, self.v)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = Attention()
        self.mlp = MLP()

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class GPT(nn.Module):
    """Two blocks between an embedding and a head, which may be tied to it."""

    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def fingerprint(model):
    """What must not change: classes, hooks, and the parameters as objects."""
    return [
        (
            name,
            type(m),
            len(m._forward_hooks),
            len(m._forward_pre_hooks),
            sorted(vars(m)),
        )
        for name, m in model.named_modules()
    ] + [(name, id(p), type(p)) for name, p in model.named_parameters()]


def tokens(batch=2, seq=6):
    return torch.zeros(batch, seq, dtype=torch.long)
