"""Optimizers that count in Python numbers, of a state or of a parameter group."""

import math

import pytest
import torch
from torch import nn
from training import train

from torchspmd.errors import CaptureError, PassWarning
from torchspmd.step import compile


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            if "step" in group:
                group["step"] += 1
            else:
                group["step"] = 1
            correction = 1 - group["beta"] ** group["step"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                state["mean"].lerp_(parameter.grad, 1 - group["beta"])
                parameter.sub_(state["mean"] / correction, alpha=group["lr"])


class Counting(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                parameter.sub_(parameter.grad * group["lr"] * 0.9 ** state["step"])


class Choosing(Counting):
    """Chooses by its count, and takes a function of ``math`` of it, as many do."""

    @torch.no_grad()
    def step(self):
        for parameter, state in self.state.items():
            parameter.add_(parameter.grad, alpha=0.1 if state["step"] == 2 else 0.01)
            parameter.mul_(1 / math.sqrt(1 + 0.9 ** state["step"]))
        super().step()


def after(wrap, calls=6, kind=Lamb):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    groups = [{"params": each.parameters()} for each in model]
    optim, step = kind(groups), wrap(train)
    for number in range(calls):
        step(model, optim, torch.linspace(-1, 1, 12).view(3, 4))
        if number == 2:
            model.state_dict()  # makes a pending update
            if kind is Lamb:
                optim.param_groups[0]["step"] = 7  # as a checkpoint would
    optim.state_dict()
    counts = [group.get("step") for group in optim.param_groups]
    counts += [state.get("step") for state in optim.state.values()]
    return step, [*model.parameters()], counts


@pytest.mark.parametrize("shadow", [0, 10])
def test_the_count_is_an_input_and_an_output(shadow):
    _, wanted, counts = after(lambda step: step)
    compiled, found, given = after(lambda step: compile(step, shadow=shadow))
    assert given == counts and counts[:2] == [10, 6]
    assert all(map(torch.equal, wanted, found))
    assert len(compiled.programs) == 2  # the first step makes states


@pytest.mark.parametrize("kind", [Lamb, Counting])
@pytest.mark.parametrize("shadow", [0, 10])
def test_a_pending_update_counts_on(alone, kind, shadow):
    options = {"parallel": "replicate", "overlap": True, "shadow": shadow}
    _, wanted, counts = after(lambda step: step, kind=kind)
    _, found, given = after(lambda step: compile(step, **options), kind=kind)
    assert given == counts
    assert all(map(torch.allclose, wanted, found))


def test_an_update_whose_count_is_chosen_by_does_not_wait(alone):
    _, wanted, _ = after(lambda step: step, kind=Choosing)
    with pytest.warns(PassWarning, match="decides which graph the next step runs"):
        _, found, _ = after(
            lambda step: compile(step, parallel="replicate", overlap=True),
            kind=Choosing,
        )
    assert all(map(torch.allclose, wanted, found))


def test_what_math_makes_of_a_count_is_in_the_graph():
    _, wanted, _ = after(lambda step: step, kind=Choosing)
    compiled, found, _ = after(compile, kind=Choosing)
    assert all(map(torch.equal, wanted, found))
    assert len(compiled.programs) == 3  # the first step, the choice, all others


def test_a_count_that_is_put_to_a_constant_is_refused():
    class Resetting(Lamb):
        def step(self):
            super().step()
            self.param_groups[0]["step"] = 1 + len(self.state)

    model = nn.Linear(4, 1)
    optim, step = Resetting(model.parameters()), compile(train)
    step(model, optim, torch.ones(3, 4))
    with pytest.raises(CaptureError, match=r"sets Resetting\.group0\.step to what"):
        optim.param_groups[0]["step"] = 9
        step(model, optim, torch.ones(3, 4))
    assert optim.param_groups[0]["step"] == 9
