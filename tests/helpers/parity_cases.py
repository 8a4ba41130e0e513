"""Models and steps for the tests of check_parity; ranks import them by name."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torchspmd.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, LENGTH, ROWS = 8, 4, 4


class Pair(nn.Module):
    """Two layers around an activation function."""

    def __init__(self, hidden, bias):
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden, bias=bias)
        self.down = nn.Linear(hidden, WIDTH, bias=bias)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Attention(nn.Module):
    """Attention over heads of two features."""

    def __init__(self, bias):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in "qkv")
        self.o = nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, 2)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(mixed.transpose(1, 2).flatten(2))


class Stack(nn.Module):
    """Any sequence of blocks over features of sequences."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(make_block(*block) for block in blocks)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_block(kind, hidden=8, bias=True):
    if kind == "norm":
        return nn.LayerNorm(WIDTH)
    return Attention(bias) if kind == "attention" else Pair(hidden, bias)


def build(blocks=(("norm",), ("pair", 12), ("attention",))):
    return Stack(blocks)


def batch(number=0):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=generator)
    return x, torch.randint(5, (ROWS, LENGTH), generator=generator)


def loss(model, given):
    x, y = given
    scores = model(x)
    return F.cross_entropy(scores.flatten(0, 1), y.flatten()), scores


def step(model, optim, given):
    found, scores = loss(model, given)
    found.backward()
    optim.step()
    optim.zero_grad()
    return found, scores


def plan_for(blocks, layouts):
    """Styles of the blocks that are laid out; norms stay whole on every rank."""
    styles = {}
    for place, (block, is_laid_out) in enumerate(zip(blocks, layouts, strict=True)):
        names = {"pair": ("up", "down"), "attention": ("[qkv]", "o")}.get(block[0])
        if names and is_laid_out:
            styles[f"blocks.{place}.{names[0]}"] = ColwiseParallel()
            styles[f"blocks.{place}.{names[1]}"] = RowwiseParallel()
    return styles


def spread(model, mesh, blocks=(), layouts=(), data="", bug=""):
    """Lay the blocks out over tp, plant a bug, lay the data out over dp."""
    styles = plan_for(blocks, layouts)
    if styles and "tp" in mesh.mesh_dim_names:
        parallelize_module(model, mesh["tp"], styles)
    if bug:
        model.get_submodule(bug).register_forward_hook(scale)
    if data == "ddp":
        return DistributedDataParallel(model, device_mesh=mesh["dp"])
    if data == "fsdp":
        fully_shard(model, mesh=mesh["dp"])
    return model


def scale(module, args, output):
    return output * 1.5
