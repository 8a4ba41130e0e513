"""Tensors of a call that lie in the same memory: refused where the step writes one."""

import copy

import pytest
import torch
from torch import nn

from torchspmd.errors import CaptureError
from torchspmd.step import compile


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def both(model, optim, x, y, write=False):
    if write:
        x.mul_(2.0)
    loss = (model(x) + model(y)).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "view", [lambda x: x[:], lambda x: x[1:2], lambda x: torch.from_numpy(x.numpy())]
)
def test_an_argument_that_is_written_and_known_by_another_name(first, view):
    model, optim = build()
    step = compile(both)
    x = torch.ones(4, 4)
    if not first:  # a later call, which has a program already
        step(model, optim, x, torch.ones(view(x).shape), True)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CaptureError) as error:
        step(model, optim, x, view(x), True)
    text = str(error.value)
    assert "args[2] and args[3] are two tensors on the same memory" in text
    assert "writes into args[2]" in text and "clone()" in text
    assert all(map(torch.equal, before.values(), model.state_dict().values()))


def test_arguments_that_are_only_read_may_share_memory():
    """Tokens and their targets are views of one sequence."""
    ours, theirs = build(), build()
    step, sequence = compile(both), torch.randn(6, 4)
    for _ in range(3):
        call = sequence[:4], sequence[1:5]
        assert torch.equal(step(*ours, *call), both(*theirs, *call))
    assert len(step.programs) == 1


def test_the_memory_of_a_parameter_as_an_argument():
    model, optim = build()
    step = compile(both)
    step(model, optim, torch.ones(4, 4), torch.ones(4, 4))
    with pytest.raises(
        CaptureError, match=r"Sequential\.1\.weight and args\[2\] are two"
    ):
        step(model, optim, model[1].weight.detach(), torch.ones(4, 4))


def test_weights_tied_by_memory_between_steps():
    model, optim = build()
    step = compile(both)
    step(model, optim, torch.ones(4, 4), torch.ones(4, 4))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(CaptureError, match="Tie weights by assigning the parameter"):
        step(model, optim, torch.ones(4, 4), torch.ones(4, 4))
    model[1].weight.data = model[1].weight.data.clone()
    step(model, optim, torch.ones(4, 4), torch.ones(4, 4))
    assert len(step.programs) == 1


class KeepsAView(nn.Linear):
    def forward(self, x):
        self.first = self.weight.detach()[0]
        return super().forward(x)


def train_viewed(model, optim, batch):
    loss = model(batch).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def test_a_view_of_a_parameter_may_be_stored():
    logs = []
    for step in (train_viewed, compile(train_viewed, shadow=0)):
        torch.manual_seed(0)
        model, log = KeepsAView(4, 4), []
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(4):
            log += [step(model, optim, torch.ones(2, 4) * number), model.first.clone()]
        logs.append(log)
    assert all(map(torch.equal, *logs))


def test_a_view_of_a_parameter_around_the_step_is_refused():
    model = nn.Linear(4, 4)
    optim, view = torch.optim.SGD(model.parameters(), lr=0.1), model.bias.detach()

    def step(model, optim, batch):
        return train_viewed(model, optim, batch) + view.sum()

    with pytest.raises(CaptureError, match="view around step are two tensors on the"):
        compile(step)(model, optim, torch.ones(2, 4))
