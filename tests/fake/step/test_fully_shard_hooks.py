"""Fully sharded: hooks of our own styles pass, hooks on shards run, others are refused."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from torchspmd.errors import CaptureError
from torchspmd.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchspmd.step import DataParallel, compile
from torchspmd.testing import fake_mesh

pytestmark = pytest.mark.fake

MODE = DataParallel("fully_shard")


class Linear(nn.Linear):
    """A type without a local form: DTensor runs it."""


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return x * x.square().mean(-1, keepdim=True).rsqrt() * self.weight


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = Linear(8, 12), Linear(12, 6), Scale()

    def forward(self, x):
        return self.norm(self.down(torch.relu(self.up(x))))


PLAN = {
    "up": ColwiseParallel(),
    "down": RowwiseParallel(output_layouts=Shard(0)),
    "norm": SequenceParallel(sequence_dim=0, use_local_output=True),
}


def step(model, optim, batch):
    optim.zero_grad()
    model(batch).square().mean().backward()
    optim.step()


def build(mesh):
    model = parallelize_module(Net(), mesh["tp"], PLAN)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_hooks_of_our_styles():
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        model, optim = build(mesh)
        assert all(
            p._backward_hooks for p in model.parameters()
        )  # or nothing is tested
        compiled = compile(parallel_mode=MODE, mesh=mesh["dp"])(step)
        compiled(model, optim, torch.randn(4, 8))
    names = {len(p.placements) for p in model.parameters()}
    assert names == {2}
    totals = compiled.programs[0].ledger.total_by("axis", "kind", "phase")
    assert totals["dp", "reduce_scatter", "backward"].count == 5
    # Of the norm's weight, whose gradient is a sum over the tokens of each rank.
    assert totals["tp", "all_reduce", "backward"].count == 1


def test_other_hooks_beside_ours():
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        model, optim = build(mesh)
        model.up.bias.register_hook(zero)
        before = list(model.parameters())
        with pytest.raises(CaptureError) as caught:
            compile(parallel_mode=MODE, mesh=mesh["dp"])(step)(
                model, optim, torch.randn(4, 8)
            )
        after = model.parameters()
        assert all(p is q for p, q in zip(before, after, strict=True))
    text = str(caught.value)
    assert text.count("gradient hook") == 1
    assert (
        "Net.up.bias has a gradient hook (zero), which its shard would not have: do that "
        "in the step, after backward"
    ) in text


def zero(gradient):
    return gradient * 0


def test_hooks_on_shards_run():
    with fake_mesh(2, ("dp",)) as mesh:
        model = nn.Linear(4, 4)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = compile(parallel_mode=MODE, mesh=mesh)(step)
        for _ in range(2):
            compiled(model, optim, torch.randn(3, 4))
        model.weight.register_hook(zero)
        before = [p.to_local().clone() for p in model.parameters()]
        compiled(model, optim, torch.randn(3, 4))
        after = [p.to_local() for p in model.parameters()]
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])
    reason = compiled.programs[-1].reason
    assert "gradient hooks of Linear.weight: absent -> zero" in reason
