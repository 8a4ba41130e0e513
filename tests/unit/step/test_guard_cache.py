"""The quick look at a call: it is taken, sees every change and keeps nothing alive."""

import gc
import math
import weakref

import pytest
import torch
from step_models import build, difference
from torch import nn

from torchspmd.step import compile, compiled, programs


def step(model, optim, batch, scale=1.0):
    loss = (model(batch) * scale).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


@pytest.fixture
def long_ways(monkeypatch):
    """How many calls went the long way."""
    taken = []

    def counting(*args, **kwargs):
        taken.append(1)
        return take(*args, **kwargs)

    take = compiled.take_inventory
    monkeypatch.setattr(compiled, "take_inventory", counting)
    return taken


def test_the_third_call_is_quick_whatever_the_values(long_ways):
    ours, reference = build("mlp", "adam")
    train = compile(step)
    for number in range(8):
        batch = torch.randn(6, 8)
        for model, optim in (ours, reference):
            optim.param_groups[0]["lr"] = 0.1 / (number + 1)
            optim.param_groups[0]["betas"] = (0.9 - number / 100, 0.99)
            with torch.no_grad():
                model[0].weight.mul_(0.9)
        got = train(*ours, batch, scale=1.0 + number)
        expected = step(*reference, batch, scale=1.0 + number)
        assert torch.equal(got, expected.detach())
    assert difference(ours, reference) == 0.0
    assert len(train.programs) == 1
    # A capture, once more with the states it made, and the first call that needed none.
    assert len(long_ways) == 3


def test_gradients_that_stay_are_quick_too(long_ways):
    def accumulate(model, optim, batch):
        model(batch).sum().backward()

    ours, reference = build("mlp", "sgd")
    train = compile(accumulate)
    for _ in range(5):
        batch = torch.randn(6, 8)
        train(*ours, batch)
        accumulate(*reference, batch)
    for left, right in zip(
        ours[0].parameters(), reference[0].parameters(), strict=True
    ):
        assert torch.equal(left.grad, right.grad)
    assert len(long_ways) == 3


def test_two_shapes_in_turn_are_quick(long_ways):
    (model, optim), _ = build("mlp", "sgd")
    train = compile(step)
    for size in (6, 4, 6, 4, 6, 4, 6, 4):
        train(model, optim, torch.randn(size, 8))
    assert len(long_ways) == 4


def replace_weight(model, optim):
    del optim.state[model[0].weight]
    model[0].weight = nn.Parameter(torch.ones(8, 8))
    optim.param_groups[0]["params"][0] = model[0].weight


def set_data(model, optim):
    model[2].weight.data = torch.ones(8, 4).t()  # the same shape, other strides


def load(model, optim):
    optim.load_state_dict(optim.state_dict())


def drop_state(model, optim):
    del optim.state[model[0].weight]


def new_state(model, optim):
    optim.state[model[0].weight]["momentum_buffer"] = torch.ones(8, 8)


def swap_layer(model, optim):
    model[1] = nn.Tanh()


def add_layer(model, optim):
    model.append(nn.Tanh())


def keep_gradient(model, optim):
    model[0].weight.grad = torch.ones(8, 8)


def tie(model, optim):
    model[0].bias = model[0].weight  # nonsense, but another wiring
    model[0].bias = nn.Parameter(torch.zeros(8))


def forward_of_the_instance(model, optim):
    model[1].forward = torch.tanh


def class_of_the_instance(model, optim):
    model[1].__class__ = nn.Tanh


def extend_a_list(model, optim):
    model.scales.append(3.0)


CHANGES = {
    "a parameter replaced": replace_weight,
    "data set": set_data,
    "optimizer loaded": load,
    "a state dropped": drop_state,
    "a state replaced": new_state,
    "a layer swapped": swap_layer,
    "a layer added": add_layer,
    "a gradient set": keep_gradient,
    "a bias replaced": tie,
    "forward replaced": forward_of_the_instance,
    "class replaced": class_of_the_instance,
    "a list extended": extend_a_list,
    "frozen": lambda m, o: m[0].weight.requires_grad_(False),
    "eval": lambda m, o: m.eval(),
    "an attribute": lambda m, o: setattr(m[1], "inplace", True),
    "a flag of a group": lambda m, o: o.param_groups[0].update(maximize=True),
    "a decay": lambda m, o: o.param_groups[0].update(weight_decay=0.0),
    "an infinite number": lambda m, o: o.param_groups[0].update(lr=float("inf")),
    "a tensor rate": lambda m, o: o.param_groups[0].update(lr=torch.tensor(0.1)),
    "a new key": lambda m, o: o.param_groups[0].update(note=1),
    "a group": lambda m, o: o.add_param_group(
        {"params": [torch.nn.Parameter(m.extra)]}
    ),
}


def scaled(model, optim, batch):
    return step(model, optim, batch, sum(model.scales))


@pytest.fixture(scope="module")
def train():
    """Captured once for all changes, each of which has models of its own."""
    return compile(scaled)


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(change, train, long_ways, monkeypatch):
    monkeypatch.setattr(programs, "MANY_PROGRAMS", 2 + 2 * len(CHANGES))
    pairs = build("mlp", "momentum")
    for model, _ in pairs:
        model.scales = [1.0, 2.0]
        model.extra = torch.ones(3)
    for number in range(5):
        if number == 3:
            long_ways.clear()
            for pair in pairs:
                CHANGES[change](*pair)
        batch = torch.randn(6, 8)
        train(*pairs[0], batch)
        scaled(*pairs[1], batch)
    worst = difference(*pairs)
    assert worst == 0.0 or math.isnan(worst)
    assert len(long_ways) >= 1


@pytest.mark.parametrize(
    "ambient",
    [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.autocast("cpu", dtype=torch.float16),
    ],
)
def test_autocast_is_seen(ambient):
    (model, optim), _ = build("mlp", "sgd")
    train = compile(step)
    for _ in range(3):
        train(model, optim, torch.randn(6, 8))
    with ambient():
        train(model, optim, torch.randn(6, 8))
    assert len(train.programs) == 2
    assert "autocast" in train.programs[1].reason


def test_a_known_call_keeps_nothing_alive():
    (model, optim), _ = build("mlp", "adam")
    train = compile(step)
    batch = torch.randn(6, 8)
    for _ in range(4):
        train(model, optim, batch)
    watched = [weakref.ref(each) for each in (model, model[0].weight, optim)]
    held_batch = weakref.ref(batch)
    del batch
    assert held_batch() is None
    del model, optim
    gc.collect()
    assert [each() for each in watched] == [None, None, None]
    (other, other_optim), _ = build("mlp", "adam")
    for _ in range(2):  # and it serves another model
        train(other, other_optim, torch.randn(6, 8))
    assert len(train.programs) == 1
