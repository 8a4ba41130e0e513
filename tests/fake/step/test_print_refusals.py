"""A step that shows a tensor is refused in every mode, with the user's line."""

import pytest
import torch
from torch import nn

from torchspmd.errors import CaptureError
from torchspmd.step import DataParallel, compile
from torchspmd.testing import fake_world

pytestmark = pytest.mark.fake


def printed(model, loss):
    print(loss)


def in_a_list(model, loss):
    return str([loss])


def in_an_f_string(model, loss):
    return f"{loss}"


def with_digits(model, loss):
    return f"{loss:.3f}"


def a_parameter(model, loss):
    print(model.weight)


def step_that_shows(show):
    def step(model, optim, batch):
        loss = model(batch).square().mean()
        show(model, loss)
        loss.backward()
        optim.step()
        return loss

    return step


def run(show, mode):
    model = nn.Linear(4, 4)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    compile(step_that_shows(show), parallel_mode=mode)(model, optim, torch.ones(4, 4))


@pytest.mark.parametrize("mode", [None, "replicate", "fully_shard"])
@pytest.mark.parametrize(
    "show", [printed, in_a_list, in_an_f_string, with_digits, a_parameter]
)
def test_a_tensor_that_is_shown_is_refused(show, mode, capsys):
    line = show.__code__.co_firstlineno + 1
    with fake_world(2), pytest.raises(CaptureError) as caught:
        run(show, mode and DataParallel(mode))
    text = str(caught.value)
    assert "the step prints a tensor, which has no value while the step is" in text
    assert f"test_print_refusals.py:{line} {show.__name__}" in text
    assert "Return the tensor and print it after the step." in text
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("mode", [None, "replicate", "fully_shard"])
def test_shapes_and_modules_may_be_printed(mode, capsys):
    with fake_world(2):
        run(lambda model, loss: print(model, loss.shape), mode and DataParallel(mode))
    assert capsys.readouterr().out == (
        "Linear(in_features=4, out_features=4, bias=True) torch.Size([])\n"
    )
