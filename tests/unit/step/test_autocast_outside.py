"""A step called under autocast computes in the dtypes that it was captured with."""

import copy

import pytest
import torch
from torch import nn
from training import train

from torchspmd.step import compile


class Island(nn.Module):
    """A product in bfloat16, one in float32."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return self.second(x.float())


@pytest.mark.parametrize("verify", [False, True])
def test_an_island_stays_one(verify):
    torch.manual_seed(0)
    model = Island()
    reference = copy.deepcopy(model)
    batch = torch.randn(4, 8)
    compiled = compile(train, verify=verify)
    optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            ours = compiled(model, optims[0], batch)
            expected = train(reference, optims[1], batch)
        assert torch.equal(ours, expected)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)
