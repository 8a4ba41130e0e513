"""``compile(parallel=...)`` trains as DistributedDataParallel does."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import train as train_step

from torchspmd.step import compile


def make(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def follow_ddp(options):
    """Losses and weights of some steps, compiled and with DDP."""
    torch.manual_seed(0)
    layers = [each for _ in range(3) for each in (nn.Linear(600, 600), nn.ReLU())]
    model = nn.Sequential(*layers)
    reference = DistributedDataParallel(copy.deepcopy(model))
    optim, reference_optim = make(model), make(reference)
    torch.manual_seed(dist.get_rank())
    losses = []
    with compile(train_step, **options) as step:
        for _ in range(4):
            batch = torch.randn(4, 600)
            eager = train_step(reference, reference_optim, batch)
            losses.append((step(model, optim, batch).item(), eager.item()))
        is_deferring = step.programs[-1].is_deferring
    weights = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    gaps = [
        (own - other).abs().max().item()
        for own, other in zip(weights, reference.parameters(), strict=True)
    ]
    return losses, max(gaps), is_deferring


@pytest.mark.parametrize(
    ("options", "defers"),
    [
        ({"parallel": "replicate", "overlap": True}, True),
        ({"parallel": "replicate", "overlap": False}, False),
        ({"parallel": "fully_shard"}, False),
    ],
)
def test_follows_ddp(ranks2, options, defers):
    for losses, gap, is_deferring in ranks2.run(follow_ddp, options):
        for own, other in losses:
            assert own == pytest.approx(other, rel=1e-4)
        assert gap < 1e-4
        assert is_deferring == defers
