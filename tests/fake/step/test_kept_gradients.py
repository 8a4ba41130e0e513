"""Gradients that a step leaves in ``.grad`` are there when the next one adds to them."""

import functools
import warnings

import pytest
import torch
from torch import nn
from training import train_keeping_gradients as cleared_first
from training import train_silently

from torchspmd.errors import PassWarning
from torchspmd.step import DataParallel, GraphModuleTransformation, compile
from torchspmd.testing import fake_world


def cleared_first_by_the_model(model, optim, batch):
    model.zero_grad()
    model(batch).square().mean().backward()
    optim.step()


def kept(model, optim, batch):
    model(batch).square().mean().backward()
    optim.step()


def kept_in_part(model, optim, batch):
    model(batch).square().mean().backward()
    optim.step()
    model[0].zero_grad()


def cleared_between(model, optim, batch):
    model(batch).square().mean().backward()
    optim.step()
    optim.zero_grad()
    model(batch).sum().backward()


def nothing(optim, number):
    pass


@functools.cache
def train(function, overlap, between):
    """Weights and gradients after some calls, and the transformation.

    One call is eager, and another has a smaller batch: it needs a program of its own.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    transformation = GraphModuleTransformation(
        enable_graph_optimization=True, overlap_iterations=overlap, bucket_size_mb=1e-5
    )
    mode = DataParallel("replicate")
    step = compile(function, parallel_mode=mode, gm_transformation=transformation)
    with fake_world(2), step:
        for number in range(6):
            between(optim, number)
            batch = torch.randn(2 if number == 4 else 4, 3)
            run = function if number == 3 else step
            run(model, optim, batch)
    gradients = [parameter.grad for parameter in model.parameters()]
    return [*model.state_dict().values(), *gradients], transformation


def same(some, others):
    return all(
        a is b is None or torch.equal(a, b) for a, b in zip(some, others, strict=True)
    )


def clear(optim, number):
    optim.zero_grad()


def clear_sometimes(optim, number):
    if number % 2:
        optim.zero_grad()


def forget(optim, number):
    for parameter in optim.param_groups[0]["params"]:
        parameter.grad = None


@pytest.mark.parametrize(
    ("function", "between"),
    [
        (cleared_first, nothing),
        (cleared_first, clear),
        (train_silently, nothing),
        (kept, clear_sometimes),
        (kept, forget),
        (kept_in_part, nothing),
        (cleared_between, nothing),
    ],
)
def test_overlapped_steps_leave_the_gradients_of_others(function, between):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PassWarning)
        plain, _ = train(function, False, between)
        overlapped, _ = train(function, True, between)
    assert same(plain, overlapped)


@pytest.mark.parametrize(
    "function", [cleared_first, cleared_first_by_the_model, train_silently]
)
def test_steps_that_clear_gradients_overlap(function):
    _, transformation = train(function, True, nothing)
    outcome = transformation.reports[-1].outcome
    assert outcome.changed == outcome.matched > 1 and not outcome.refused


def test_steps_that_keep_gradients_say_why_they_do_not_overlap():
    with pytest.warns(PassWarning) as caught:
        train(kept, True, clear)
    texts = [str(each.message) for each in caught]
    assert any(
        "no update can wait for the next step" in text
        and "becomes a gradient that the step leaves in .grad, where the next one adds to "
        "it unless the step clears it (optim.zero_grad(), first or last)"
        in text
        for text in texts
    )


def test_gradients_for_an_optimizer_outside_of_the_step():
    def step(model, optim, batch):
        model.zero_grad()
        model(batch).square().mean().backward()
        optim.step()

    def weights(overlap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        inside, outside = (torch.optim.SGD(part.parameters(), 0.1) for part in model)
        transformation = GraphModuleTransformation(
            enable_graph_optimization=True, overlap_iterations=overlap
        )
        mode = DataParallel("replicate")
        compiled = compile(step, parallel_mode=mode, gm_transformation=transformation)
        with fake_world(2), compiled, warnings.catch_warnings():
            warnings.simplefilter("ignore", PassWarning)
            for _ in range(4):
                compiled(model, inside, torch.randn(4, 3))
                outside.step()
        return list(model.state_dict().values())

    assert same(weights(False), weights(True))


def test_what_is_cleared_in_part_overlaps_in_part():
    _, transformation = train(kept_in_part, True, nothing)
    outcome = transformation.reports[-1].outcome
    assert 0 < outcome.changed < outcome.matched
