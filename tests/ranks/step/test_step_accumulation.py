"""Micro-batches, loss scaling and recomputed dropout on ranks."""

import contextlib
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import train_scaled

from torchspmd.step import DataParallel, compile


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def micro_batches(number):
    """Three batches of this rank, and the same rows of all ranks together."""
    torch.manual_seed(100 + number)
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = [torch.randn(4 * size, 8) for _ in range(3)]
    return [each[4 * rank : 4 * rank + 4].clone() for each in whole], whole


def accumulate(model, optim, batches, no_sync=contextlib.nullcontext):
    for number, batch in enumerate(batches):
        last = number == len(batches) - 1
        with contextlib.nullcontext() if last else no_sync():
            (model(batch).square().mean() / len(batches)).backward()
    optim.step()
    optim.zero_grad()


def follow_ddp():
    model = mlp()
    ddp = DistributedDataParallel(copy.deepcopy(model))
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ddp_optim = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    step = compile(parallel_mode=DataParallel("replicate"))(accumulate)
    for number in range(3):
        mine, _ = micro_batches(number)
        step(model, optim, mine)
        accumulate(ddp, ddp_optim, mine, ddp.no_sync)
    same = all(
        torch.equal(p, q)
        for p, q in zip(model.parameters(), ddp.parameters(), strict=True)
    )
    program = step.programs[-1]
    return same, program.ledger.total(kind="all_reduce").count, step.explain()


def test_one_reduction_with_the_numbers_of_ddp(ranks2):
    for same, count, text in ranks2.run(follow_ddp):
        assert same
        assert count == 4  # one for each parameter
        assert "8 reductions of micro-batches joined" in text


def follow_one_device():
    model, reference = mlp(), mlp()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(reference.parameters(), lr=0.1)
    step = compile(accumulate)
    for number in range(3):
        mine, whole = micro_batches(number)
        step(model, optim, mine)
        accumulate(reference, other, whole)
    worst = max(
        (p - q).abs().max().item()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    )
    return worst, step.programs[-1].ledger.total(kind="all_reduce").count


def test_the_default_mode_reduces_once_too(ranks2):
    for worst, count in ranks2.run(follow_one_device):
        assert worst < 2e-5
        assert count == 4


def clip_each(model, optim, batches):
    for batch in batches:
        model(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optim.step()
    optim.zero_grad()


def read_between():
    model = mlp()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile(parallel_mode=DataParallel("replicate"))(clip_each)
    step(model, optim, micro_batches(0)[0])
    return step.programs[0].ledger.total(kind="all_reduce").count


def test_a_gradient_that_is_read_in_between_is_reduced_before(ranks2):
    assert ranks2.run(read_between) == [12, 12]


def follow_scaled(fused, mode):
    model, reference = mlp(), mlp()
    optim = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
    other = torch.optim.Adam(reference.parameters(), lr=0.01, fused=fused)
    scalers = [GradScaler("cpu", 2.0**100, growth_interval=3) for _ in range(2)]
    step = compile(parallel_mode=mode)(train_scaled)
    rank = dist.get_rank()
    for number in range(5):
        torch.manual_seed(number)
        batch = torch.randn(4 * dist.get_world_size(), 8)
        if number in (0, 3):
            batch[-1] *= 1e20  # only the last rank has infinities
        step(model, optim, scalers[0], batch[4 * rank : 4 * rank + 4].clone())
        train_scaled(reference, other, scalers[1], batch)
    worst = max(
        (full(p) - q).abs().max().item()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    )
    return worst, scalers[0].get_scale(), scalers[1].get_scale()


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run_scaled():
    cases = [
        (False, None),
        (True, DataParallel("replicate")),
        (False, DataParallel("fully_shard")),
    ]
    return [follow_scaled(*case) for case in cases]


def test_ranks_skip_a_step_together(ranks2):
    for found in ranks2.run(run_scaled):
        for worst, scale, expected in found:
            assert worst < 2e-5
            assert scale == expected == 2.0**98


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def block(self, x):
        return nn.functional.dropout(torch.relu(self.first(x)), 0.4)

    def forward(self, x):
        return self.second(checkpoint(self.block, x, use_reentrant=False))


def run_dropping():
    model, reference = Dropping(), Dropping()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(reference.parameters(), lr=0.1)

    def train(model, optim, batch):
        model(batch).square().mean().backward()
        optim.step()
        optim.zero_grad()

    step = compile(train)
    rank = dist.get_rank()
    for number in range(2):
        torch.manual_seed(number)
        batch = torch.randn(8, 8)
        torch.manual_seed(number)
        step(model, optim, batch[4 * rank : 4 * rank + 4].clone())
        torch.manual_seed(number)
        train(reference, other, batch)
    return max(
        (p - q).abs().max().item()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    )


def test_recomputed_dropout_over_the_whole_batch(ranks2):
    assert max(ranks2.run(run_dropping)) < 2e-5
