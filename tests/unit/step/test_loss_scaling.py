"""Loss scaling and recomputed dropout inside a step: eager's bits, or a refusal by name."""

import copy

import pytest
import torch
from step_models import build, difference
from torch import nn
from torch.amp import GradScaler
from torch.utils.checkpoint import checkpoint
from training import train_scaled

from torchspmd.errors import CaptureError
from torchspmd.step import compile


def plain(model, optim, scaler, batch):
    optim.zero_grad()
    loss = model(batch).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optim)
    scaler.update()
    return loss


@pytest.mark.parametrize("step", [train_scaled, plain])
@pytest.mark.parametrize("optimizer", ["momentum", "adam_foreach", "adamw_fused"])
def test_steps_are_skipped_and_the_scale_follows(step, optimizer):
    ours, reference = build("mlp", optimizer)
    scalers = [GradScaler("cpu", 2.0**120, growth_interval=2) for _ in range(2)]
    train = compile(step)
    scales = []
    for number in range(8):
        torch.manual_seed(number)
        batch = torch.randn(6, 8) * (1e10 if number < 2 or number == 5 else 1)
        got = train(*ours, scalers[0], batch)
        assert torch.equal(got, step(*reference, scalers[1], batch).detach())
        scales.append([each.get_scale() for each in scalers])
    assert all(mine == theirs for mine, theirs in scales)
    assert {2.0**118, 2.0**119} <= {mine for mine, _ in scales}  # it went both ways
    assert difference(ours, reference) == 0.0
    for left, right in zip(
        ours[0].parameters(), reference[0].parameters(), strict=True
    ):
        assert (left.grad is None) == (right.grad is None)
        if left.grad is not None:
            assert torch.equal(left.grad, right.grad)
    assert len(train.programs) <= 3


def test_a_scaler_that_is_switched_off():
    ours, reference = build("mlp", "adam")
    train = compile(plain)
    for _ in range(3):
        batch = torch.randn(6, 8)
        train(*ours, GradScaler("cpu", enabled=False), batch)
        plain(*reference, GradScaler("cpu", enabled=False), batch)
    assert difference(ours, reference) == 0.0


def test_another_growth_is_another_program():
    (model, optim), _ = build("mlp", "sgd")
    scaler, train = GradScaler("cpu"), compile(plain)
    for _ in range(4):
        train(model, optim, scaler, torch.randn(6, 8))
    before = len(train.programs)
    scaler.set_growth_interval(7)
    train(model, optim, scaler, torch.randn(6, 8))
    assert len(train.programs) == before + 1
    assert "scaler" in train.programs[-1].reason or "args[2]" in train.explain()
    assert scaler.state_dict()["growth_interval"] == 7


def test_a_constant_scale():
    def step(model, optim, batch):
        loss = model(batch).square().mean()
        (loss * 1024.0).backward()
        for parameter in model.parameters():
            parameter.grad.div_(1024.0)
        optim.step()
        optim.zero_grad()
        return loss

    ours, reference = build("mlp", "adam")
    train = compile(step)
    for _ in range(3):
        batch = torch.randn(6, 8)
        assert torch.equal(train(*ours, batch), step(*reference, batch).detach())
    assert difference(ours, reference) == 0.0


def refusal(step, optimizer, steps=1):
    (model, optim), _ = build("mlp", optimizer)
    scaler = GradScaler("cpu")
    for _ in range(steps - 1):
        plain(model, optim, scaler, torch.randn(6, 8))
    with pytest.raises(CaptureError) as caught:
        compile(step)(model, optim, scaler, torch.randn(6, 8))
    plain(model, optim, scaler, torch.randn(6, 8))  # it works as before
    return str(caught.value)


def test_a_counter_that_is_a_python_number():
    text = refusal(plain, "lion", steps=2)
    assert "Lion counts its steps with a Python number" in text
    assert "Keep the counter in a tensor" in text


def test_a_first_step_that_makes_unknown_state():
    text = refusal(plain, "lion")
    assert "the first step of Lion makes its state" in text
    assert "Make one step without compile first" in text


def test_a_step_without_update():
    def step(model, optim, scaler, batch):
        scaler.scale(model(batch).sum()).backward()
        scaler.step(optim)

    assert "Call scaler.update() inside the step" in refusal(step, "sgd")


def test_the_scale_cannot_be_read_inside():
    def step(model, optim, scaler, batch):
        plain(model, optim, scaler, batch)
        return scaler.get_scale()

    assert "needs a tensor's value" in refusal(step, "sgd")


class Dropping(nn.Module):
    """One dropout used four times, in two checkpointed regions and between them."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.4)
        self.reentrant = reentrant

    def block(self, x):
        return self.drop(torch.relu(self.second(self.drop(self.first(x)))))

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
            x = self.drop(x)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_in_a_checkpointed_region(reentrant):
    def step(model, optim, batch):
        loss = model(batch * model.first.bias.sum().exp()).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss

    torch.manual_seed(0)
    models = [Dropping(reentrant)]
    models.append(copy.deepcopy(models[0]))
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in models]
    train = compile(step)
    for number in range(3):
        torch.manual_seed(number)
        batch = torch.randn(6, 8)
        states = []
        for function, pair in ((train, pairs[0]), (step, pairs[1])):
            torch.manual_seed(number)
            loss = function(*pair, batch).detach()
            states.append((loss, torch.get_rng_state()))
        assert all(map(torch.equal, *states))
    assert difference(*pairs) == 0.0
    drawn = [n for n in train.programs[0].graph.graph.nodes if "bernoulli" in str(n)]
    assert len([n for n in drawn if n.op == "call_function"]) == 6
    assert callable(torch.get_rng_state) and torch.get_rng_state().dtype == torch.uint8


def test_a_generator_state_from_outside():
    state = torch.get_rng_state()

    def step(model, optim, batch):
        torch.set_rng_state(state)
        return model(batch)

    (model, optim), _ = build("drop", "sgd")
    with pytest.raises(CaptureError, match="sets the state of a random generator"):
        compile(step)(model, optim, torch.randn(6, 8))


def test_a_region_that_draws_otherwise_the_second_time():
    calls = []

    def region(x):
        calls.append(1)
        return x * torch.rand_like(x) if len(calls) == 1 else x * torch.randn_like(x)

    def step(model, optim, batch):
        checkpoint(region, model(batch), use_reentrant=False).sum().backward()

    (model, optim), _ = build("mlp", "sgd")
    with pytest.raises(CaptureError, match="must do the same each time it is run"):
        compile(step)(model, optim, torch.randn(6, 8))
