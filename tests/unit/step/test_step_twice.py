"""Several updates in one compiled step: each reads what the one before it wrote."""

import copy
import functools

import pytest
import torch
from torch import nn
from training import DoublesGradients
from training import train_detached as update

from torchspmd.step import compile


def twice(model, optim, batch):
    return update(model, optim, batch), update(model, optim, batch)


def nested(model, outer, inner, batch):
    outer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    outer.step()
    return loss.detach()


def follow(step, build, calls):
    """The objects of an eager run and of a compiled one, which must give the same."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    eager, ours = (build(copy.deepcopy(model)) for _ in range(2))
    compiled = compile(step)
    for number in range(calls):
        batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(number))
        torch.testing.assert_close(
            compiled(*ours, batch), step(*eager, batch), rtol=0, atol=0
        )
        for got, wanted in zip(
            ours[0].parameters(), eager[0].parameters(), strict=True
        ):
            assert torch.equal(got, wanted), f"call {number}"
    return eager, ours, compiled


OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "radam": torch.optim.RAdam,
    "nadam": torch.optim.NAdam,
    "adamax": torch.optim.Adamax,
    "adafactor": torch.optim.Adafactor,
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_updates_of_lists(optimizer):
    make = OPTIMIZERS[optimizer]
    # RAdam chooses another update from its sixth on.
    calls = 4 if optimizer == "radam" else 2
    follow(
        twice, lambda m: (m, make(m.parameters(), lr=0.1, foreach=True)), calls=calls
    )


def test_lists_that_backward_needs_are_not_overwritten():
    def step(model, batch):
        loss = model(batch).square().mean()
        with torch.no_grad():
            torch._foreach_mul_([batch], 2.0)
        loss.backward()

    arguments = nn.Linear(4, 3), torch.randn(5, 4)
    for function in (step, compile(step)):
        with pytest.raises(Exception, match="modified by an inplace operation"):
            function(*arguments)


@pytest.mark.parametrize("kind", ["radam", "adafactor"])
def test_an_optimizer_that_steps_another(kind):
    def build(model):
        inner = OPTIMIZERS[kind](model.parameters(), lr=0.1, foreach=True)
        return model, DoublesGradients(inner), inner

    _, _, compiled = follow(nested, build, calls=8)
    assert len(compiled.programs) == {"radam": 3, "adafactor": 2}[kind]


class Counting(torch.optim.Optimizer):
    """Makes tensors of the numbers that it counts."""

    def __init__(self, parameters, make):
        super().__init__(parameters, {})
        self.make = make

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0)
                state["rate"] = torch.tensor(0.5)
            state["step"] += 1
            state["made"] = self.make(state["step"].item(), state["rate"].item())
            parameter.sub_(parameter.grad * state["made"])


MADE = {
    "integer": lambda count, rate: torch.tensor(count),
    "as_tensor": lambda count, rate: torch.as_tensor(count),
    "by_name": lambda count, rate: torch.tensor(data=count),
    "no_dtype": lambda count, rate: torch.tensor(count, dtype=None),
    "dtype": lambda count, rate: torch.tensor(data=count, dtype=torch.float64),
    "float": lambda count, rate: torch.tensor(rate),
    "bool": lambda count, rate: torch.tensor(count > 2),
    "constant": lambda count, rate: torch.tensor(data=1.0),
    "whole": lambda count, rate: torch.bitwise_and(torch.tensor(count), 1),
}


@pytest.mark.parametrize("kind", MADE)
def test_tensors_of_counters_have_the_dtype_of_eager(kind):
    eager, ours, _ = follow(
        update, lambda m: (m, Counting(m.parameters(), MADE[kind])), calls=4
    )
    wanted = eager[1].state[eager[0].weight]["made"]
    got = ours[1].state[ours[0].weight]["made"]
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
