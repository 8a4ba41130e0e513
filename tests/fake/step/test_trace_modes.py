"""What no graph can hold is refused in every mode, with the user's line."""

import pytest
import torch
from torch import nn

from torchspmd.errors import CaptureError
from torchspmd.step import DataParallel, compile
from torchspmd.testing import fake_world

MODES = (None, "replicate", "fully_shard")


def data_of_a_parameter(model, loss, batch):
    model.weight.data = model.weight.data * 0.9


def data_of_a_gradient(model, loss, batch):
    loss.backward(retain_graph=True)
    model.weight.grad.data = model.weight.grad.data * 0.9


def data_of_an_input(model, loss, batch):
    batch.data = batch.data * 2


def data_in_a_hook(model, loss, batch):
    loss.register_hook(lambda gradient: setattr(batch, "data", gradient))
    loss.backward()


def printed(model, loss, batch):
    print(loss)


def printed_in_a_list(model, loss, batch):
    return str([loss])


def printed_in_an_f_string(model, loss, batch):
    return f"{loss}"


def printed_with_digits(model, loss, batch):
    return f"{loss:.3f}"


def printed_parameter(model, loss, batch):
    print(model.weight)


def printed_in_a_hook(model, loss, batch):
    loss.register_hook(lambda gradient: print(gradient, "here"))
    loss.backward()


DATA = (
    "the step assigns to the data of a tensor, which is no operator",
    "`with torch.no_grad(): p.copy_(...)` instead of `p.data = ...`",
)
PRINT = (
    "the step prints a tensor, which has no value while the step is",
    "Return the tensor and print it after the step.",
)
# What is done, which line of it, and what is said.
REFUSED = [
    (data_of_a_parameter, 1, DATA),
    (data_of_a_gradient, 2, DATA),
    (data_of_an_input, 1, DATA),
    (data_in_a_hook, 1, DATA),
    (printed, 1, PRINT),
    (printed_in_a_list, 1, PRINT),
    (printed_in_an_f_string, 1, PRINT),
    (printed_with_digits, 1, PRINT),
    (printed_parameter, 1, PRINT),
    (printed_in_a_hook, 1, PRINT),
]


def run(act, mode):
    def step(model, optim, batch):
        loss = model(batch).square().mean()
        act(model, loss, batch)
        if loss.requires_grad and model.weight.grad is None:
            loss.backward()
        optim.step()
        return loss

    model = nn.Linear(4, 4)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = compile(parallel_mode=mode and DataParallel(mode))(step)
    compiled(model, optim, torch.ones(4, 4))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("act", "line", "told"), REFUSED)
def test_refused(act, line, told, mode, capsys):
    with fake_world(2), pytest.raises(CaptureError) as caught:
        run(act, mode)
    text = str(caught.value)
    assert all(part in text for part in told)
    assert f"test_trace_modes.py:{act.__code__.co_firstlineno + line} " in text
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("mode", MODES)
def test_shapes_and_modules_may_be_printed(mode, capsys):
    with fake_world(2):
        run(lambda model, loss, batch: print(model, loss.shape), mode)
    assert capsys.readouterr().out == (
        "Linear(in_features=4, out_features=4, bias=True) torch.Size([])\n"
    )
