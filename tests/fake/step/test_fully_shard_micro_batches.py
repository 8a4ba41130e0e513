"""Fully sharded micro-batches: reduced in each backward, or once for all of them."""

import pytest
import torch
from torch import nn

from torchspmd.errors import UsageError
from torchspmd.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchspmd.step import DataParallel, compile
from torchspmd.testing import fake_mesh

pytestmark = pytest.mark.fake


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 10), nn.Linear(10, 6)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.down(torch.relu(self.up(x))) * self.scale


def accumulate(model, optim, batches):
    for batch in batches:
        model(batch).square().mean().backward()
    optim.step()
    optim.zero_grad()


def train(function=accumulate, *, shape=(4,), **options):
    with fake_mesh(shape, ("dp", "tp")[: len(shape)]) as mesh:
        model = Net()
        if len(shape) == 2:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        mode = DataParallel("fully_shard", **options)
        step = compile(parallel_mode=mode, mesh=mesh["dp"])(function)
        step(model, optim, [torch.randn(3, 8) for _ in range(3)])
        return step


def counts(step):
    totals = step.programs[0].ledger.total_by("kind", "phase")
    return {key: total.count for key, total in totals.items()}


def test_each_backward_reduces_by_default():
    found = counts(train())
    assert found["reduce_scatter", "backward"] == 3 * 4
    assert found["all_gather", "forward"] == 3 * 4
    assert found["all_reduce", "backward"] == 1  # nothing is saved by keeping shards


@pytest.mark.parametrize("shape", ((4,), (2, 2)))
def test_one_reduction_for_all(shape):
    step = train(shape=shape, sync_each_backward=False)
    found = counts(step)
    assert found["reduce_scatter", "backward"] == 4
    assert found["all_gather", "forward"] == 3 * 4
    assert "10 reductions of micro-batches joined" in step.explain()


def test_kept_parameters_are_gathered_once():
    found = counts(train(sync_each_backward=False, reshard_after_forward=False))
    assert found == {
        ("all_gather", "forward"): 4,
        ("reduce_scatter", "backward"): 4,
        ("all_reduce", "backward"): 1,
    }


def test_what_is_read_in_between_is_reduced():
    def clips(model, optim, batches):
        for batch in batches:
            model(batch).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()

    found = counts(train(clips, sync_each_backward=False))
    assert found["reduce_scatter", "backward"] == 3 * 4


def test_a_parameter_that_changed_is_gathered_anew():
    def steps(model, optim, batches):
        for batch in batches:
            model(batch).square().mean().backward()
            optim.step()
            optim.zero_grad()

    found = counts(train(steps, sync_each_backward=False, reshard_after_forward=False))
    assert (
        found["all_gather", "forward"] + found.get(("all_gather", "optimizer"), 0) == 12
    )
    assert found["reduce_scatter", "backward"] == 12


def test_an_option_without_effect():
    with pytest.raises(UsageError, match="reduces micro-batches once by itself"):
        DataParallel("replicate", sync_each_backward=False)
