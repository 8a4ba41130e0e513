"""Kernels that do other things when they run than when they are traced; no group."""

import copy
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchspmd.step import compile


def assert_same(step, model, batch, *, steps=2):
    reference = copy.deepcopy(model)
    compiled = compile(step)
    optims = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, reference)]
    for _ in range(steps):
        ours = compiled(model, optims[0], batch)
        assert torch.equal(ours, step(reference, optims[1], batch).detach())
    held = reference.state_dict()
    assert all(torch.equal(held[k], value) for k, value in model.state_dict().items())
    return compiled


def plain_step(model, optim, x):
    out = model(x)
    loss = (out[0] if isinstance(out, tuple) else out).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def low_precision_step(model, optim, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(model(x))
    loss = y.float().square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


@pytest.mark.parametrize("training", [True, False])
def test_lstm(training):
    torch.manual_seed(0)
    model = nn.LSTM(4, 4, num_layers=2, bidirectional=True).train(training)
    assert_same(plain_step, model, torch.randn(3, 5, 4))
    assert all(map(operator.is_, model._flat_weights, model.parameters()))


class Between(nn.Module):
    """Batch norm of channels that lie last, and a view of what comes out."""

    def __init__(self, is_viewed):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.last, self.is_viewed = nn.Linear(6, 3), is_viewed

    def forward(self, x):
        out = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
        return self.last(out.contiguous().view(-1, 6) if self.is_viewed else out)


@pytest.mark.parametrize("is_viewed", [True, False])
def test_view_of_another_order_in_memory(is_viewed):
    torch.manual_seed(0)
    assert_same(plain_step, Between(is_viewed), torch.randn(3, 5, 4))


def test_weight_is_cast_once():
    torch.manual_seed(0)
    compiled = assert_same(low_precision_step, nn.Linear(4, 4), torch.randn(3, 4))
    assert torch.is_autocast_cache_enabled()
    casts = compiled.programs[0].graph.graph.find_nodes(
        op="call_function", target=torch.ops.aten._to_copy.default
    )
    names = [node.args[0].meta.get("torchspmd_name") for node in casts]
    assert len([n for n in names if n and n.endswith("weight")]) == 1


class Dropped(nn.Linear):
    """Dropout of a tensor whose dims lie in another order in memory."""

    def forward(self, x):
        return F.dropout(super().forward(x).transpose(0, 1), 0.5)


def test_dropout_of_another_order_in_memory():
    model, batch = Dropped(4, 6), torch.randn(3, 5, 4)
    optim = torch.optim.SGD(model.parameters(), lr=0.0)
    losses = []
    for step in (plain_step, compile(plain_step)):
        torch.manual_seed(0)
        losses.append(step(model, optim, batch).detach())
    assert torch.equal(*losses)
