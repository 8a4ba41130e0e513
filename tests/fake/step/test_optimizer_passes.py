"""Optimizers on several ranks: updates that wait or stay, and what shards forbid."""

import pytest
import torch
from step_models import build, difference
from torch import nn
from training import train

from torchspmd.errors import CaptureError, PassWarning
from torchspmd.step import DataParallel, IterGraphModule, compile
from torchspmd.step.graph import optimizer_lists
from torchspmd.step.passes import defer_updates
from torchspmd.testing import fake_world


def outcomes_of(optimizer, steps=8):
    """What was deferred in each program; the result equals eager, bit for bit."""
    found = []

    def transformation(gm):
        gm = IterGraphModule(gm)
        found.append(defer_updates(gm).outcome)
        return gm

    ours, reference = build("mlp", optimizer)
    with fake_world(2):  # where a sum over ranks changes nothing
        mode = DataParallel("replicate", reduce="sum")
        step = compile(gm_transformation=transformation, parallel_mode=mode)(train)
        for number in range(steps):
            torch.manual_seed(number)
            batch = torch.randn(6, 8)
            step(*ours, batch)
            train(*reference, batch)
        step.flush()
    assert difference(ours, reference) == 0.0
    return found


@pytest.mark.parametrize(
    "optimizer",
    ["momentum_fused", "asgd", "asgd_foreach", "radam_foreach", "adafactor"],
)
def test_updates_whose_counters_stay_are_deferred(optimizer):
    outcomes = outcomes_of(optimizer)
    assert outcomes
    assert all(outcome.changed == outcome.matched == 4 for outcome in outcomes)


def test_an_optimizer_is_cut_once_for_all_its_reductions(monkeypatch):
    cuts = []
    cut = optimizer_lists._cut
    monkeypatch.setattr(
        optimizer_lists, "_cut", lambda *args: cuts.append(args[1]) or cut(*args)
    )
    outcomes = outcomes_of("momentum_fused")
    assert all(outcome.changed == 4 for outcome in outcomes)
    assert len(set(cuts)) == len(cuts) == len(outcomes) == 1  # one operator


def test_updates_that_the_next_choice_needs_are_left_alone():
    with pytest.warns(PassWarning, match="defer_updates changed nothing"):
        early, late = outcomes_of("radam")
    assert early.changed == late.changed == 0
    why = "decides which graph the next step runs, so it cannot wait"
    assert len(early.refused) == 4 and all(why in line for line in early.refused)


def sharded(optimizer, model):
    with fake_world(2), pytest.raises(CaptureError) as caught:
        step = compile(parallel_mode=DataParallel("fully_shard"))(train)
        step(model, optimizer(model.parameters()), torch.randn(3, 8))
    return str(caught.value)


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_optimizers_that_need_whole_parameters(name):
    optimizer = getattr(torch.optim, name, None)
    if optimizer is None:
        pytest.skip(f"this torch has no {name}")
    text = sharded(optimizer, nn.Sequential(nn.Linear(8, 4, bias=False)))
    assert f"{name} works on whole parameters, and each rank holds a part of" in text
    assert "Sequential.0.weight. Use parallel_mode=DataParallel('replicate')" in text


class Normalised(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(1 / parameter.norm().item())


def test_a_number_of_a_spread_tensor_is_not_read():
    text = sharded(Normalised, nn.Linear(8, 4))
    assert "reads a number (item()) from a tensor that is spread over ranks" in text
