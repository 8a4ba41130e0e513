"""The default mode against one device: reductions and losses over a batch of two ranks.

The values of the ranks differ in size, and in one step a rank has only labels that do not
count: terms of ranks that are taken for values show up.
"""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from torchspmd.step import compile

pytestmark = pytest.mark.ranks


def class_weights():
    return torch.arange(1.0, 6.0)


LOSSES = {
    "ignored labels": lambda o, y: F.cross_entropy(o, y, ignore_index=1).exp(),
    "nll_loss": lambda o, y: F.nll_loss(o.log_softmax(1), y, ignore_index=1),
    "class weights": lambda o, y: F.cross_entropy(o, y, weight=class_weights()) ** 2,
    "smoothed": lambda o, y: F.cross_entropy(
        o, y, weight=class_weights(), ignore_index=1, label_smoothing=0.1
    ),
    "pixels": lambda o, y: F.cross_entropy(
        o[:, :, None, None].repeat(1, 1, 2, 1),
        y[:, None, None].repeat(1, 2, 1),
        ignore_index=1,
    ),
    "norms": lambda o, y: o.norm(dim=0).sum() + o.norm(3, dim=0).sum(),
    "largest": lambda o, y: o.norm(math.inf) - 2 * o.amax() + o.abs().amax(),
    "smallest": lambda o, y: (1 - o.amin()).relu() + o.min(),
    "any": lambda o, y: (o * (o > 1).any(0)).sum() + (o * (o > 1).any()).sum(),
    "all": lambda o, y: (o * (o > -1).all(0)).sum(),
    "any of a sum": lambda o, y: (
        o * (1 + ((y * 0 + 1) * (2 * torch.arange(8) - 7)).sum().any())
    ).sum(),
    "prod": lambda o, y: o.prod(0).sum(),
    "no dims": lambda o, y: o.sum(dim=()) ** 2 + o.mean(dim=()),
    "nansum": lambda o, y: o.nansum() ** 2,
    "order": lambda o, y: o.median(0)[0].sum() + o.sort(0)[0][1].sum(),
    "running": lambda o, y: o.cumsum(0).square().mean() + o.logsumexp(0).sum() ** 2,
}


def train(loss_of, wrap, rows):
    def step(model, optim, x, y):
        loss = loss_of(model(x), y)
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss

    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped, losses = wrap(step), []
    for number in range(2):
        x, y = torch.randn(8, 6), torch.randint(0, 5, (8,))
        x[4:] *= 2
        y[: 3 + number] = 1
        y[-1] = 2
        losses.append(wrapped(model, optim, x[rows], y[rows]).detach())
    return [*losses, model.weight.detach(), model.bias.detach()]


def all_wrong():
    start = 4 * dist.get_rank()
    wrong = []
    for name, loss_of in LOSSES.items():
        whole = train(loss_of, lambda step: step, slice(0, 8))
        ours = train(loss_of, compile, slice(start, start + 4))
        try:
            torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-5)
        except AssertionError as error:
            wrong.append((name, str(error)))
    return wrong


def test_reductions_and_losses(ranks2):
    assert ranks2.run(all_wrong) == [[], []]
