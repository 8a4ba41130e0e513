"""Measured exposure of steps that communicate nothing, and what is refused."""

import pytest
import torch

from torchspmd.errors import UsageError
from torchspmd.step import compile

pytestmark = pytest.mark.unit


def train(model, optim, batch):
    model(batch).square().mean().backward()
    optim.step()


def pair():
    model = torch.nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_refusals():
    call = (*pair(), torch.ones(3, 4))
    step = compile(train)
    with pytest.raises(UsageError, match="no program fits these arguments yet"):
        step.exposure(*call)
    step(*call)
    with pytest.raises(UsageError, match="is a program of its own, so make two"):
        step.exposure(*call)
    step(*call)
    step(*call)
    with pytest.raises(UsageError, match=r"exposure\(runs=0\): take at least one run"):
        step.exposure(*call, runs=0)
    own = compile(gm_transformation=lambda gm: gm.forward)(train)
    for _ in range(3):
        own(*call)
    with pytest.raises(UsageError, match="a callable of its own, whose collectives"):
        own.exposure(*call)


def test_a_step_without_communication():
    call = (*pair(), torch.ones(3, 4))
    step = compile(train)
    for _ in range(3):
        step(*call)
    report = step.exposure(*call, runs=1)
    assert report.collectives == () and report.exposed_ms == 0.0 and report.step_ms > 0
    assert "stand still for 0 of 0 collectives" in report.summary()
