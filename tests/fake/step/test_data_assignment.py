"""A step that assigns to ``data`` is refused in every mode, with the user's line."""

import pytest
import torch
from torch import nn

from torchspmd.errors import CaptureError
from torchspmd.step import DataParallel, compile
from torchspmd.testing import fake_world

pytestmark = pytest.mark.fake


def of_a_parameter(model, optim, batch):
    model.weight.data = model.weight.data * 0.9


def of_a_gradient(model, optim, batch):
    model(batch).sum().backward()
    model.weight.grad.data = model.weight.grad.data * 0.9


def of_an_input(model, optim, batch):
    batch.data = batch.data * 2


def in_a_hook(model, optim, batch):
    out = model(batch)
    out.register_hook(lambda gradient: setattr(batch, "data", gradient))
    out.sum().backward()


STEPS = {of_a_parameter: 1, of_a_gradient: 2, of_an_input: 1, in_a_hook: 2}


@pytest.mark.parametrize("mode", [None, "replicate", "fully_shard"])
@pytest.mark.parametrize("step", STEPS)
def test_an_assignment_to_data_is_refused(step, mode):
    model = nn.Linear(4, 4)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = compile(step, parallel_mode=mode and DataParallel(mode))
    with fake_world(2), pytest.raises(CaptureError) as caught:
        wrapped(model, optim, torch.ones(4, 4))
    text, line = str(caught.value), step.__code__.co_firstlineno + STEPS[step]
    assert "the step assigns to the data of a tensor, which is no operator" in text
    assert f"test_data_assignment.py:{line} " in text
    assert "`with torch.no_grad(): p.copy_(...)` instead of `p.data = ...`" in text
