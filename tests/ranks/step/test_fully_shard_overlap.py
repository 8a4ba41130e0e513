"""Fully sharded steps whose updates wait for the next forward: bits and checkpoints."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from training import train_in_float as train

from torchspmd.step import DataParallel, compile

LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        )
        self.head = nn.Linear(8, 3)  # rows that two ranks share unevenly

    def forward(self, x):
        return self.head(self.blocks(x))


def batch_of(step):
    torch.manual_seed(10 + step + 100 * dist.get_rank())
    return torch.randn(5, 8)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def follow(policy, options):
    """Differences from FSDP2: losses, a checkpoint in between, the end; what was told."""
    policy = policy or MixedPrecisionPolicy()
    torch.manual_seed(0)
    ours = Net()
    theirs = copy.deepcopy(ours)
    for block in (*theirs.blocks, theirs):
        fully_shard(block, mp_policy=policy)
    mode = DataParallel("fully_shard", mp_policy=policy)
    step = compile(train, parallel=mode, overlap=True, **options)
    optims = adamw(ours), adamw(theirs)
    differences, pending = [], []
    for number in range(6):
        batch = batch_of(number)
        got, wanted = step(ours, optims[0], batch), train(theirs, optims[1], batch)
        differences.append((got - wanted).abs().item())
        pending.append(step.programs[-1].is_pending)
        if number == 2:
            differences += apart(
                get_model_state_dict(ours), get_model_state_dict(theirs)
            )
            assert not step.programs[-1].is_pending
    step.flush()
    differences += apart(dict(ours.named_parameters()), dict(theirs.named_parameters()))
    return max(differences), pending, str(step.programs[-1].certificate), step.explain()


def apart(one, other):
    assert set(one) == set(other)
    return [
        (one[key].full_tensor() - other[key].full_tensor()).abs().max().item()
        for key in one
    ]


@pytest.mark.parametrize("policy", (None, LOW))
def test_bits_of_fsdp2(ranks2, policy):
    for difference, pending, _, told in ranks2.run(follow, policy, {"shadow": 2}):
        assert difference == 0.0
        assert all(pending)
        assert "shadow steps: 2 calls" in told


def test_what_waits_is_certified(ranks2):
    for difference, _, certificate, _ in ranks2.run(follow, None, {"verify": True}):
        assert difference == 0.0
        assert "work moved to the next iteration" in certificate
