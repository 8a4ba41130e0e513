"""Compiled steps without a process group: equal to eager, bit for bit."""

import copy

import pytest
import torch
import torch.nn.functional as F
from step_models import MODELS, build, difference
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchspmd.step import compile


def clipped_step(model, optim, batch, *, scale=1.0):
    loss = (model(batch) * scale).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()
    optim.zero_grad()
    return {"loss": loss, "count": 3, "batch": batch}


def compare(step, ours, reference, *, steps=3, size=6, **kwargs):
    compiled = compile(step)
    for number in range(steps):
        torch.manual_seed(number)
        batch = torch.randn(size, 8)
        for _, optimizer in (ours, reference):
            optimizer.param_groups[0]["lr"] = 0.02 / (number + 1)
        torch.manual_seed(number)
        got = compiled(*ours, batch, **kwargs)
        torch.manual_seed(number)
        expected = step(*reference, batch, **kwargs)
        got, expected = (
            torch.utils._pytree.tree_leaves(each) for each in (got, expected)
        )
        assert all(
            torch.equal(a, b.detach()) if isinstance(a, torch.Tensor) else a == b
            for a, b in zip(got, expected, strict=True)
        )
    assert difference(ours, reference) == 0.0
    return compiled


@pytest.mark.parametrize("model", MODELS)
def test_every_model(model):
    compare(clipped_step, *build(model, "momentum"), scale=2.0)


def test_gradients_stay_and_accumulate_without_zero_grad():
    def accumulate(model, optim, batch):
        loss = model(batch).sum()
        loss.backward()
        return loss

    ours, reference = build("mlp", "sgd")
    step = compare(accumulate, ours, reference)
    for left, right in zip(
        ours[0].parameters(), reference[0].parameters(), strict=True
    ):
        assert torch.equal(left.grad, right.grad)
    assert len(step.programs) == 2
    assert ".0.weight.grad: absent -> gradient" in step.programs[1].reason


def test_zero_grad_to_zero_keeps_the_gradient_tensors():
    def step(model, optim, batch):
        optim.zero_grad(set_to_none=False)
        model(batch).sum().backward()
        optim.step()

    ours, reference = build("mlp", "momentum")
    compare(step, ours, reference)
    held = [p.grad for p in ours[0].parameters()]
    compile(step)(*ours, torch.randn(6, 8))
    assert all(p.grad is g for p, g in zip(ours[0].parameters(), held, strict=True))


def test_two_modules_and_two_optimizers():
    def step(first, pair, batch, *, second):
        loss = second(first(batch)).square().mean()
        loss.backward()
        for optim in pair:
            optim.step()
            optim.zero_grad()
        return loss

    torch.manual_seed(0)
    ours = [nn.Linear(8, 8), nn.Linear(8, 2)]
    reference = copy.deepcopy(ours)
    compiled, sides = compile(step), []
    for models in (ours, reference):
        first = torch.optim.Adam(models[0].parameters(), lr=0.01)
        second = torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9)
        sides.append((first, second))
    for _ in range(3):
        batch = torch.randn(4, 8)
        got = compiled(ours[0], sides[0], batch, second=ours[1])
        expected = step(reference[0], sides[1], batch, second=reference[1])
        assert torch.equal(got, expected.detach())
    for place in range(2):
        left = (ours[place], sides[0][place])
        assert difference(left, (reference[place], sides[1][place])) == 0.0


def test_accumulation_over_micro_batches():
    def step(model, optim, batch):
        total = 0.0
        for part in batch.chunk(3):
            loss = model(part).square().mean() / 3
            loss.backward()
            total = total + loss.detach()
        optim.step()
        optim.zero_grad()
        return total

    compare(step, *build("mlp", "adam"))


def test_autocast_inside_the_step():
    def step(model, optim, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch).float().square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss

    compare(step, *build("mlp", "adamw_foreach"))


def test_checkpointed_region():
    def step(model, optim, batch):
        hidden = checkpoint(model[0], batch, use_reentrant=False)
        loss = model[2](F.relu(hidden)).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss

    compare(step, *build("mlp", "sgd"))


def test_scheduler_and_checkpoint_of_the_optimizer():
    (model, optim), (other, other_optim) = build("mlp", "adam")
    step = compile(clipped_step)
    schedules = [
        torch.optim.lr_scheduler.CosineAnnealingLR(each, 5)
        for each in (optim, other_optim)
    ]
    for number in range(6):
        batch = torch.randn(6, 8)
        step(model, optim, batch)
        clipped_step(other, other_optim, batch)
        for schedule in schedules:
            schedule.step()
        if number == 3:  # a restart: new state tensors, same program
            optim.load_state_dict(copy.deepcopy(optim.state_dict()))
            model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert difference((model, optim), (other, other_optim)) == 0.0
    assert len(step.programs) == 1


def test_a_tensor_learning_rate():
    ours, reference = build("mlp", "sgd")
    rates = [torch.tensor(0.1), torch.tensor(0.1)]
    for (_, optimizer), rate in zip((ours, reference), rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
    step = compile(clipped_step)
    for _ in range(3):
        batch = torch.randn(6, 8)
        step(*ours, batch)
        clipped_step(*reference, batch)
        for rate in rates:
            rate.mul_(0.5)
    assert difference(ours, reference) == 0.0
    assert len(step.programs) == 1


def test_a_replaced_parameter_is_the_one_that_is_used():
    (model, optim), (other, other_optim) = build("mlp", "sgd")
    step = compile(clipped_step)
    for _ in range(2):
        batch = torch.randn(6, 8)
        step(model, optim, batch)
        clipped_step(other, other_optim, batch)
        for each, opt in ((model, optim), (other, other_optim)):
            each[0].weight = nn.Parameter(torch.ones(8, 8))
            opt.param_groups[0]["params"][0] = each[0].weight
    assert difference((model, optim), (other, other_optim)) == 0.0
    assert len(step.programs) == 1
