"""Hooks on gradients over ranks: numbers against one device."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from training import train_keeping_gradients

from torchspmd.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchspmd.step import DataParallel, compile


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def worst(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((full(p) - q).abs().max().item() for p, q in pairs)


def rows(step, index, count):
    torch.manual_seed(70 + step)
    whole = torch.randn(8, 8, dtype=torch.float64)
    return whole.chunk(count)[index].clone(), whole


def clamp(gradient):
    return gradient.clamp(-0.001, 0.002)


def decay(parameter):
    parameter.grad.add_(parameter.detach(), alpha=0.1)


def run_hooks(mode):
    """Hooks get the reduced gradient: of a clamp, the order matters."""
    torch.manual_seed(0)
    pairs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)).double()
        model[0].weight.register_hook(clamp)
        model[2].weight.register_post_accumulate_grad_hook(decay)
        pairs.append((model, torch.optim.SGD(model.parameters(), lr=0.1)))
    step = compile(parallel_mode=mode)(train_keeping_gradients)
    for number in range(3):
        mine, whole = rows(number, dist.get_rank(), dist.get_world_size())
        step(*pairs[0], mine)
        train_keeping_gradients(*pairs[1], whole)
    return worst(pairs[0][0], pairs[1][0])


@pytest.mark.parametrize("mode", (None, DataParallel("replicate")))
def test_hooks_get_reduced_gradients(mode, ranks2):
    for found in ranks2.run(run_hooks, mode):
        assert found < 1e-12


class Linear(nn.Linear):
    """A type without a local form: its parameters get hooks of ours."""


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 0.1).rsqrt() * self.weight


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = Linear(8, 12), Linear(12, 6), Scale()
        self.last = Linear(6, 5)

    def forward(self, x):
        return self.last(self.norm(self.down(torch.tanh(self.up(x)))))


PLAN = {
    "up": ColwiseParallel(),
    "down": RowwiseParallel(output_layouts=Shard(0)),
    "norm": SequenceParallel(sequence_dim=0, use_local_output=True),
    "last": ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0)),
}


def summed(model, optim, batch):
    """A loss over this rank's tokens; the sum over ranks is that of all tokens."""
    optim.zero_grad()
    model(batch).square().sum().backward()
    optim.step()


def run_styles(mode):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    reference = Net().double()
    model = parallelize_module(copy.deepcopy(reference), mesh["tp"], PLAN)
    optim = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    other = torch.optim.SGD(reference.parameters(), lr=0.01, momentum=0.9)
    step = compile(parallel_mode=mode, mesh=mesh["dp"], shadow=2)(summed)
    hooked = all(p._backward_hooks for p in model.parameters())
    for number in range(3):
        mine, whole = rows(number, mesh.get_local_rank("dp"), 2)
        step(model, optim, mine)
        summed(reference, other, whole)
    return hooked, worst(model, reference)


@pytest.mark.parametrize("style", ("replicate", "fully_shard"))
def test_styles_that_put_hooks_on_parameters(style, ranks4):
    for hooked, found in ranks4.run(run_styles, DataParallel(style, reduce="sum")):
        assert hooked
        assert found < 1e-12


def old_and_new(model, optim, batch):
    first, second = gradients(model, batch)
    for p, a, b in zip(model.parameters(), first, second, strict=True):
        p.grad = a + b
    optim.step()


def new_and_old(model, optim, batch):
    first, second = gradients(model, batch)
    for p, a, b in zip(model.parameters(), first, second, strict=True):
        p.grad = b + a
    optim.step()


def gradients(model, batch):
    parameters = list(model.parameters())
    return [
        torch.autograd.grad(model(part).square().mean(), parameters)
        for part in (batch[::2], batch[1::2])
    ]


MODES = (
    DataParallel("replicate"),
    DataParallel("fully_shard", sync_each_backward=False),
)


def run_sums(function, mode):
    torch.manual_seed(0)
    reference = nn.Linear(8, 6).double()
    model = copy.deepcopy(reference)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(reference.parameters(), lr=0.1)
    step = compile(parallel_mode=mode)(function)
    for number in range(2):
        mine, whole = rows(number, dist.get_rank(), dist.get_world_size())
        step(model, optim, mine)
        function(reference, other, whole)
    ledger = step.programs[0].ledger
    kind = "all_reduce" if mode.parallel_style == "replicate" else "reduce_scatter"
    return worst(model, reference), ledger.total(kind=kind).count


@pytest.mark.parametrize("function", (old_and_new, new_and_old))
@pytest.mark.parametrize("mode", MODES)
def test_gradients_added_in_both_orders(mode, function, ranks2):
    for found, count in ranks2.run(run_sums, function, mode):
        assert found < 1e-12
        assert count == 2  # joined
