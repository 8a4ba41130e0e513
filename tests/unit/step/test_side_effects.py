"""What a step changes in Python: refused with every change, and put back."""

import random
import types

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

from torchspmd.errors import CaptureError
from torchspmd.step import compile

RULE = "What the step changes in Python would happen once, at capture."


def train(model, optim, batch, *more):
    loss = model(batch).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def build(model=None, optimizer=torch.optim.SGD):
    model = model or nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    return model, optimizer(model.parameters(), lr=0.1)


def refusal(step, *arguments):
    with pytest.raises(CaptureError) as caught:
        compile(step)(*arguments)
    return str(caught.value)


@pytest.mark.parametrize("is_argument", (True, False))
def test_scheduler(is_argument):
    model, optim = build()
    scheduler = StepLR(optim, 2)  # changes no rate in the step that is captured

    def step(model, optim, batch, *more):
        loss = train(model, optim, batch)
        scheduler.step()
        return loss

    more = (scheduler,) if is_argument else ()
    text = refusal(step, model, optim, torch.ones(3, 4), *more)
    assert (
        RULE in text and "StepLR.step() at" in text and "test_side_effects.py" in text
    )
    assert "Call scheduler.step()" in text
    assert scheduler.last_epoch == 0
    scheduler.step()  # as it was


def test_hyper_parameters():
    model, optim = build(optimizer=torch.optim.AdamW)

    def step(model, optim, batch):
        loss = train(model, optim, batch)
        optim.param_groups[0]["lr"] *= 0.5
        optim.param_groups[0]["eps"] = 1e-6
        return loss

    text = refusal(step, model, optim, torch.ones(3, 4))
    assert "AdamW.group0.lr" in text and "AdamW.group0.eps" in text
    assert "between two calls of the step" in text
    assert (optim.param_groups[0]["lr"], optim.param_groups[0]["eps"]) == (0.1, 1e-8)


class Counting(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.k = self.param_groups[0]["k"] = 0

    def step(self, closure=None):
        self.k += 1
        self.param_groups[0]["k"] += 1
        super().step()


class Counter(nn.Linear):
    n = 0

    def forward(self, x):
        self.n += 1
        return super().forward(x)


def test_counters():
    model, optim = build(Counter(4, 2), Counting)
    text = refusal(train, model, optim, torch.ones(3, 4))
    for name in ("Counting.group0.k: 0 -> 1", "Counting.k: 0 -> 1", "Counter.n: new"):
        assert f"  * {name}\n" in text
    assert "group0.params" not in text
    assert "Count in a buffer" in text and "in a tensor of its state" in text
    assert (optim.k, optim.param_groups[0]["k"], model.n) == (0, 0, 0)


class Lazy(nn.Linear):
    def forward(self, x):
        self.seen_width = x.shape[-1]
        return super().forward(x)


def test_what_a_module_notes_in_its_first_call():
    model, optim = build(Lazy(4, 2))
    compiled = compile(train)
    for _ in range(3):
        compiled(model, optim, torch.ones(3, 4))
    assert model.seen_width == 4
    assert len(compiled.programs) == 1
    assert "Lazy.seen_width was set in this capture" in compiled.explain()


class Inferring(nn.Linear):  # as classifiers of transformers do
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.config = types.SimpleNamespace(kind=None)

    def forward(self, x):
        if self.config.kind is None:
            self.config.kind = "regression"
        return super().forward(x) * len(self.config.kind)


def test_what_stands_in_the_place_of_none():
    weights = []
    for wrap in (lambda step: step, compile):
        torch.manual_seed(0)
        model, optim = build(Inferring(4, 2))
        wrapped = wrap(train)
        for _ in range(3):
            wrapped(model, optim, torch.ones(3, 4))
        weights.append(model.weight)
    assert torch.equal(*weights) and model.config.kind == "regression"
    assert "config.kind was set in this capture" in wrapped.explain()
    model.config.kind = "two"  # another one is another program
    wrapped(model, optim, torch.ones(3, 4))
    assert "'regression' -> 'two'" in wrapped.explain()


def test_what_stands_in_the_place_of_none_and_changes_again():
    model, optim = build(nn.Linear(4, 2))
    model.last = None

    def step(model, optim, batch, number):
        model.last = number
        return train(model, optim, batch)

    compiled = compile(step)
    compiled(model, optim, torch.ones(3, 4), 1)
    with pytest.raises(CaptureError, match=r"Linear\.last: 1 -> 2"):
        compiled(model, optim, torch.ones(3, 4), 2)
    assert model.last == 1


def test_modes_and_flags():
    model, optim = build()

    def step(model, optim, batch):
        model[0].requires_grad_(False)
        loss = train(model, optim, batch)
        model.eval()
        return loss

    text = refusal(step, model, optim, torch.ones(3, 4))
    assert "Sequential.training: True -> False" in text
    assert "Sequential.0.weight.requires_grad: True -> False" in text
    assert model.training and model[0].weight.requires_grad


def test_flags_that_are_set_back():
    model, optim = build()

    def step(model, optim, batch):
        model[0].requires_grad_(False)
        model.eval()
        loss = train(model, optim, batch)
        model[0].requires_grad_(True)
        model.train()
        return loss

    before = model[0].weight.clone()
    compile(step)(model, optim, torch.ones(3, 4))
    assert torch.equal(before, model[0].weight)


def test_arguments():
    model, optim = build()
    log, items = {}, []

    def step(model, optim, batch, log, *, items):
        loss = train(model, optim, batch)
        log["loss"] = loss
        items.append(1)
        return loss

    with pytest.raises(CaptureError) as caught:
        compile(step)(model, optim, torch.ones(3, 4), log, items=items)
    text = str(caught.value)
    assert "argument args[3]: its items" in text and "argument items: its items" in text
    assert "Return what is to be kept" in text and not log and not items


def test_gradients_of_another_optimizer():
    model, optim = build()
    other = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, optim, batch):
        loss = model(batch).square().mean()
        loss.backward()
        optim.step()
        other.zero_grad()
        return loss

    compiled = compile(step)
    compiled(model, optim, torch.ones(3, 4))
    with pytest.raises(CaptureError, match=r"1\.bias\.grad: set from outside"):
        compiled(model, optim, torch.ones(3, 4))
    assert model[1].bias.grad is not None


def seeded(model, optim, batch):
    torch.manual_seed(3)
    return train(model, optim, batch)


def forked(model, optim, batch):
    with torch.random.fork_rng():
        batch = batch + torch.randn(3, 4)
    return train(model, optim, batch)


def drawn(model, optim, batch):
    return train(model, optim, batch * random.random())


@pytest.mark.parametrize(
    ("step", "words"),
    (
        (seeded, "seeds a random generator"),
        (forked, "sets a random generator back"),
        (drawn, "the state of Python's random"),
    ),
)
def test_random_numbers(step, words):
    assert words in refusal(step, *build(), torch.ones(3, 4))


def test_recomputed_dropout_stays():
    model, optim = build()

    def step(model, optim, batch):
        hidden = checkpoint(
            lambda x: torch.dropout(model[0](x), 0.5, True), batch, use_reentrant=False
        )
        loss = model[1](hidden).sum()
        loss.backward()
        optim.step()
        return loss

    assert compile(step)(model, optim, torch.ones(3, 4)).isfinite()
