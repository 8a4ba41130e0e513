"""Styles, loss, clipping and manual regions on CUDA with NCCL, against one device."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torchspmd import clip_grad_norm_, local_map, parallelize_module
from torchspmd.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    vocab_parallel_cross_entropy,
)
from torchspmd.testing import run_ranks

VOCAB, WIDTH, HIDDEN = 32, 16, 22  # 22 does not divide by 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)
        )

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "blocks.*.norm": SequenceParallel(),
    "blocks.*.mlp": PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate()
    ),
    "blocks.*.mlp.0": ColwiseParallel(),
    "blocks.*.mlp.2": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
}


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train():
    """Two steps, parallel and on one device; raises where they differ."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    reference = Model().double().cuda()
    parallel = parallelize_module(copy.deepcopy(reference), mesh, PLAN)
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True)
        for m in (reference, parallel)
    ]
    tokens = torch.randint(VOCAB, (2, 4 * dist.get_world_size()), device="cuda")
    target = torch.randint(VOCAB, tokens.shape, device="cuda").flatten()
    for _ in range(2):
        expected = F.cross_entropy(
            reference(tokens).flatten(0, 1), target, label_smoothing=0.1
        )
        loss = vocab_parallel_cross_entropy(
            parallel(tokens).flatten(0, 1), target, label_smoothing=0.1
        )
        torch.testing.assert_close(full(loss), expected)
        expected.backward()
        loss.backward()
        torch.testing.assert_close(
            full(clip_grad_norm_(parallel.parameters(), 0.5)),
            nn.utils.clip_grad_norm_(reference.parameters(), 0.5),
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    names = dict(reference.named_parameters())
    for name, value in parallel.named_parameters():
        torch.testing.assert_close(
            full(value), names[name], msg=lambda m, n=name: f"{n}: {m}"
        )
    return True


def region():
    """A replicated weight used by split work: its gradient must be reduced."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    x, w = (torch.randn(8, 8, device="cuda", dtype=torch.float64) for _ in range(2))
    w.requires_grad_()
    (x @ w).square().sum().backward()
    layouts = ([Shard(0)], [Replicate()])
    mapped = local_map(torch.matmul, [Shard(0)], layouts, check=True)
    weight = distribute_tensor(w.detach(), mesh, [Replicate()]).requires_grad_()
    mapped(distribute_tensor(x, mesh, [Shard(0)]), weight).square().sum().backward()
    torch.testing.assert_close(full(weight.grad), w.grad)
    return True


def test_training_is_that_of_one_device():
    for world_size in (2, 4):
        assert all(run_ranks(train, world_size, backend="nccl", timeout=180))


def test_manual_region_has_the_right_gradient():
    assert all(run_ranks(region, 2, backend="nccl", timeout=120))
