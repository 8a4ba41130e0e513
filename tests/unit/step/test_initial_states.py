"""Optimizers without state: one program serves their first step and all others."""

import copy

import pytest
import torch
from step_models import Lion
from torch import nn
from training import train, train_clipped

from torchspmd.errors import CaptureError
from torchspmd.step import compile

pytestmark = pytest.mark.timeout(120)


class Net(nn.Module):
    """With a layer that is not used, and one that is not trained."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 3, bias=False)
        self.unused, self.frozen = nn.Linear(2, 2), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.frozen(x))))


MUON = getattr(torch.optim, "Muon", None)
KINDS = {
    torch.optim.Adadelta: ({}, {"foreach": True}, {"capturable": False}),
    torch.optim.Adagrad: ({}, {"foreach": True}, {"fused": True}),
    torch.optim.Adam: (
        {},
        {"foreach": True, "amsgrad": True},
        {"fused": True},
        {"lr": torch.tensor(0.01)},
    ),
    torch.optim.AdamW: (
        {"foreach": True},
        {"fused": True},
        {"fused": True, "amsgrad": True},
    ),
    torch.optim.Adamax: ({}, {"foreach": True}),
    torch.optim.ASGD: ({}, {"foreach": True, "t0": 2.0}),
    torch.optim.NAdam: ({}, {"foreach": True, "momentum_decay": 0.1}),
    torch.optim.RAdam: ({}, {"foreach": True}),
    torch.optim.RMSprop: (
        {},
        {"momentum": 0.5},
        {"foreach": True, "momentum": 0.5, "centered": True},
    ),
    torch.optim.Rprop: ({}, {"foreach": True}),
    torch.optim.SGD: (
        {"lr": 0.1},
        {"lr": 0.1, "foreach": True},
        {"lr": 0.1, "fused": True},
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "momentum": 0.9, "foreach": True, "nesterov": True},
        {"lr": 0.1, "momentum": 0.9, "fused": True, "maximize": True},
    ),
    torch.optim.Adafactor: ({}, {"foreach": True}),
    **({MUON: ({},)} if MUON else {}),
}
CASES = [(kind, options) for kind, each in KINDS.items() for options in each]


def build(kind, options, net=Net):
    torch.manual_seed(0)
    model = net()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    if kind is MUON:
        return model, kind(matrices, **copy.deepcopy(options))
    others = [p for p in model.parameters() if p.ndim != 2]
    slow = {"params": others + matrices[:1], "weight_decay": 0.1}
    groups = [slow, {"params": matrices[1:]}]
    return model, kind(groups, **copy.deepcopy(options))


def bits(state):
    """Everything of a state dict, tensors by their bits, in its order."""
    if isinstance(state, torch.Tensor):
        kept = (str(state.dtype), tuple(state.shape), state.stride())
        return (*kept, state.contiguous().view(-1).view(torch.uint8).tolist())
    if isinstance(state, dict):
        return [(key, bits(value)) for key, value in state.items()]
    if isinstance(state, (list, tuple)):
        return [bits(each) for each in state]
    return state


def set_rates(optim, rate):
    """Another for each group."""
    for number, group in enumerate(optim.param_groups, start=1):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate / number)
        else:
            group["lr"] = rate / number


def assert_same_bits(step, function, ours, reference):
    """After each of three steps with other rates."""
    for number in range(3):
        batch = torch.randn(4, 6)
        for _, optim in (ours, reference):
            set_rates(optim, 0.02 / (number + 1))
        assert torch.equal(step(*ours, batch), function(*reference, batch).detach())
        for mine, theirs in zip(ours, reference, strict=True):
            assert bits(mine.state_dict()) == bits(theirs.state_dict()), number


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_state_is_that_of_eager_after_each_step(kind, options):
    step = compile(train_clipped)
    assert_same_bits(step, train_clipped, build(kind, options), build(kind, options))
    assert len(step.programs) == 1, step.explain()


def test_gradients_that_are_minus_zero():
    def negated(model, optim, batch):
        (model.weight * -0.0).sum().backward()
        optim.step()
        optim.zero_grad()

    def one(step):
        torch.manual_seed(0)
        model = nn.Linear(3, 2, bias=False)
        nn.init.constant_(model.weight, -0.0)
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step(model, optim, torch.ones(1))
        return bits(model.state_dict()), bits(optim.state_dict())

    assert one(compile(negated)) == one(negated)


def test_a_step_that_updates_nothing_makes_no_state():
    def backward_only(model, optim, batch, *, is_last):
        model(batch).square().mean().backward()
        if is_last:
            optim.step()
            optim.zero_grad()

    ours, reference = build(torch.optim.Adam, {}), build(torch.optim.Adam, {})
    step = compile(backward_only)
    for is_last in (False, True, False):
        batch = torch.randn(4, 6)
        step(*ours, batch, is_last=is_last)
        backward_only(*reference, batch, is_last=is_last)
        assert bits(ours[1].state_dict()) == bits(reference[1].state_dict())


def test_a_capture_that_fails_leaves_no_state():
    def reads(model, optim, batch):
        loss = train(model, optim, batch)
        return loss.item()

    model, optim = build(torch.optim.Adam, {})
    before = bits(optim.state_dict())
    with pytest.raises(CaptureError):
        compile(reads)(model, optim, torch.randn(4, 6))
    assert bits(optim.state_dict()) == before
    assert not optim.state


class OwnSGD(torch.optim.SGD):
    """An optimizer that is not torch's."""


DAMPENED = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        (
            torch.optim.SGD,
            DAMPENED,
            "SGD, with dampening, which its first step leaves out",
        ),
        (OwnSGD, DAMPENED, "OwnSGD, which may do something else in its first step"),
        (Lion, {}, "Lion, which may do something else in its first step"),
    ],
)
def test_optimizers_whose_first_step_differs(kind, options, why):
    step = compile(train)
    assert_same_bits(step, train, build(kind, options), build(kind, options))
    assert len(step.programs) == 2
    assert f"the next step is captured as a program of its own ({why})" in (
        step.explain()
    )
    assert why not in "".join(step.programs[1].notes)
