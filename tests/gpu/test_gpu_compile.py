"""Compiled steps on CUDA: equal to eager, also as a replayed CUDA graph.

Also runs without pytest: ``python tests/gpu/run.py``.
"""

import copy

import torch
from torch import nn

from torchspmd.step import compile


def step(model, optim, batch):
    loss = model(batch).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def follow(backend, optimizer, *, replace_at=-1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).cuda()
    pairs = [(model, optimizer(model.parameters()))]
    other = copy.deepcopy(model)
    pairs.append((other, optimizer(other.parameters())))
    compiled = compile(backend=backend)(step)
    losses = []
    for number in range(8):
        batch = torch.randn(32, 64, device="cuda")
        for module, optim in pairs:
            optim.param_groups[0]["lr"] = 0.01 / (number + 1)
            if number == replace_at:
                module[0].weight.data = module[0].weight.data.clone()
        losses.append(compiled(*pairs[0], batch))
        expected = step(*pairs[1], batch)
        torch.testing.assert_close(losses[-1], expected.detach())
    for left, right in zip(
        pairs[0][0].parameters(), pairs[1][0].parameters(), strict=True
    ):
        torch.testing.assert_close(left, right)
    assert len({loss.item() for loss in losses}) > 1  # results are copied out
    return compiled


def fused(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def test_states_are_written_in_place():
    compiled = follow("graph", fused)
    assert compiled.programs[-1].in_place.left == ()


def test_a_replayed_step_follows_eager_and_its_rate():
    follow("cudagraph", fused)


def test_a_replaced_tensor_is_captured_again():
    follow("cudagraph", fused, replace_at=5)
