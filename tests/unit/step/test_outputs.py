"""What a step hands out: dataclasses have values, other places for tensors are refused."""

import copy
import types
import weakref
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.prune import random_unstructured

from torchspmd.errors import CaptureError
from torchspmd.step import compile

SEEN = []


@dataclass(frozen=True, slots=True)
class Inner:
    total: torch.Tensor
    name: str


@dataclass
class Out:
    loss: torch.Tensor
    parts: list = field(default_factory=list)
    checked: bool = field(init=False, default=False)

    def __post_init__(self):
        self.checked = not self.checked


def test_dataclasses():
    def step(model, batch):
        y = model(batch)
        return {"out": Out(y.mean(), [Inner(y.sum(), "sum"), 3])}, Out(None)

    model, compiled = nn.Linear(4, 2), compile(step)
    for scale in (1.0, 2.0):
        batch = torch.full((3, 4), scale)
        (found, empty), (expected, _) = compiled(model, batch), step(model, batch)
        out, wanted = found["out"], expected["out"]
        assert type(out) is Out and out.checked and empty.loss is None
        assert torch.equal(out.loss, wanted.loss) and out.parts[1] == 3
        inner = out.parts[0]
        assert type(inner) is Inner and inner.name == "sum"
        assert torch.equal(inner.total, wanted.parts[0].total)


class Keeps:
    def __init__(self, value):
        self.kept = {"all": [value]}


@pytest.mark.parametrize(
    ("make", "path"),
    (
        (lambda y: types.SimpleNamespace(loss=y), "SimpleNamespace.loss"),
        (lambda y: [Keeps(y)], "Keeps.kept['all'][0]"),
        (lambda y: Out(Keeps(y)), "Keeps.kept['all'][0]"),
    ),
)
def test_other_objects(make, path):
    with pytest.raises(CaptureError) as caught:
        compile(lambda model, batch: make(model(batch)))(
            nn.Linear(4, 2), torch.ones(3, 4)
        )
    assert f"({path})" in str(caught.value) and "dataclasses" in str(caught.value)


class Logs(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
        self.log, self.history, self.box = {}, [1], Keeps(None)

    def forward(self, x):
        y = super().forward(x)
        self.log["mean"] = y.mean()
        self.history.append(y)
        return y


def test_containers_of_a_module():
    model = Logs()
    with pytest.raises(CaptureError) as caught:
        compile(lambda model, batch: model(batch))(model, torch.ones(3, 4))
    text = str(caught.value)
    assert "Logs.log" not in text  # each call fills it
    assert "Logs.history[1]: a tensor of the step" in text
    assert model.log == {} and model.history == [1]


def remember(y):
    SEEN.append(y)
    return y


def add_buffer(model, y):
    model.register_buffer("new", y)


@pytest.mark.parametrize(
    ("keep", "path"),
    (
        (lambda model, y: remember(y), "SEEN[0]"),
        (add_buffer, "Logs._buffers['new']"),
    ),
)
def test_places_around_the_step(keep, path):
    model = Logs()

    def step(model, batch):
        keep(model, nn.functional.linear(batch, model.weight))

    with pytest.raises(CaptureError, match="stores a tensor in") as caught:
        compile(step)(model, torch.ones(3, 4))
    assert f"{path}," in str(caught.value) and not SEEN


# ----------------------------------------------------------------------------
# Tensors that a step keeps in attributes: each call puts its own there.


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.expert, self.aux_loss = nn.Linear(4, 2), nn.Linear(4, 4), None
        self.stats = {}

    def forward(self, x):
        chosen = self.gate(x).softmax(-1)
        self.aux_loss = chosen.mean(0).square().sum()
        self.last, self.stats["largest"] = [chosen, (x, 3)], chosen.amax()
        return x + self.expert(x) * chosen.amax(-1, keepdim=True)


class Recurrent(nn.Module):
    """What the call before has left is read: an input, also of another shape."""

    def __init__(self):
        super().__init__()
        self.cell, self.hidden, self.average = nn.RNNCell(4, 4), torch.zeros(1, 4), None
        self.count = torch.zeros(())

    def forward(self, x):
        hidden = self.cell(x, self.hidden.mean(0).expand(len(x), 4))
        self.hidden, new = hidden.detach(), x.mean(0)
        self.average = new if self.average is None else 0.9 * self.average + 0.1 * new
        self.count += 1
        return hidden * self.count.sqrt()


class Normed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.layer = norm(nn.Linear(4, 4))

    def forward(self, x):
        return self.layer(x)


def weight_norm():
    with pytest.warns(FutureWarning, match="weight_norm"):
        return Normed(nn.utils.weight_norm)


def pruned(layer):
    return random_unstructured(layer, "weight", amount=0.5)


def parametrized(layer):
    layer = nn.utils.parametrizations.weight_norm(layer)
    return nn.utils.parametrizations.spectral_norm(layer)


def auxiliary(model, optim, batch):
    loss = model(batch).square().mean()
    loss = loss + getattr(model, "aux_loss", 0.0)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def kept_by(holder):
    """All tensors that an object's attributes hold."""
    found = torch.utils._pytree.tree_leaves([*vars(holder).values()])
    return [each.detach().clone() for each in found if isinstance(each, torch.Tensor)]


def train(make, compiled, change=lambda number, model: None):
    torch.manual_seed(0)
    model = make()
    optim, log = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for number in range(7):
        change(number, model)
        batch = torch.randn(
            3 + number % 3, 4, generator=torch.Generator().manual_seed(number)
        )
        log.append(compiled(model, optim, batch))
        log += [each for module in model.modules() for each in kept_by(module)]
        log += [p.detach().clone() for p in model.parameters()]
    return log


@pytest.mark.parametrize("shadow", (0, 7))
@pytest.mark.parametrize(
    "make",
    (
        *(Router, Recurrent, weight_norm),
        *(partial(Normed, each) for each in (nn.utils.spectral_norm, pruned)),
        partial(Normed, parametrized),
    ),
)
def test_tensors_kept_in_attributes(make, shadow):
    expected, found = (
        train(make, auxiliary),
        train(make, compile(auxiliary, shadow=shadow)),
    )
    assert len(expected) == len(found)
    assert all(map(torch.equal, found, expected))


def test_a_kept_tensor_is_found_by_the_fast_path_and_not_held():
    model = Router()
    optim, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(3, 4)
    compiled = compile(auxiliary, shadow=0)
    for _ in range(3):
        compiled(model, optim, batch)
    assert compiled._programs.recall((model, optim, batch), {}) is not None
    gone = [weakref.ref(each) for each in (model.aux_loss, model.last[0])]
    compiled(model, optim, batch)
    assert [each() for each in gone] == [None, None] and len(compiled.programs) == 2


def test_a_kept_tensor_that_is_taken_away_or_put_back():
    def change(number, model):
        if number == 4:
            model.hidden, model.average = torch.ones(1, 4), None

    expected = train(Recurrent, auxiliary, change)
    found = train(Recurrent, compile(auxiliary, shadow=0), change)
    assert all(map(torch.equal, found, expected))


class Trainer:
    def __init__(self):
        self.last, self.total, self.state = None, 0.0, Keeps(None)

    def step(self, model, optim, batch):
        self.last = auxiliary(model, optim, batch)
        self.total, self.state.loss = self.total + self.last, self.last
        return self.last


@pytest.mark.parametrize("shadow", (0, 7))
def test_tensors_kept_by_the_object_of_the_step(shadow):
    logs = []
    for wrap in (lambda step: step, partial(compile, shadow=shadow)):
        trainer, log = Trainer(), []
        step = wrap(trainer.step)

        def each(*args, step=step, trainer=trainer, log=log):
            result = step(*args)
            log += [trainer.last.clone(), trainer.total.clone(), trainer.state.loss]
            return result

        logs.append(train(Router, each) + log)
    assert all(map(torch.equal, *logs))


def test_two_models_of_one_program_keep_their_own():
    torch.manual_seed(0)
    models = [Router(), Router()]
    optims = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    compiled = compile(auxiliary, shadow=0)
    for number in range(6):
        model, optim = models[number % 2], optims[number % 2]
        batch = torch.randn(3, 4)
        with torch.no_grad():
            expected = (model(batch), model.aux_loss)[1]
        before = models[1 - number % 2].aux_loss
        compiled(model, optim, batch)
        assert torch.equal(model.aux_loss, expected)
        assert models[1 - number % 2].aux_loss is before


def test_a_write_into_a_tensor_of_nobody_is_refused_before_it_is_made():
    counts = {"all": torch.zeros(()).requires_grad_()}

    def step(model, optim, batch):
        with torch.no_grad():
            counts["all"].add_(1)
        return auxiliary(model, optim, batch)

    model = Router()
    with pytest.raises(CaptureError, match="a tensor that is in no argument"):
        compile(step)(model, torch.optim.SGD(model.parameters()), torch.ones(3, 4))
    assert counts["all"] == 0


# ----------------------------------------------------------------------------
# Models, optimizers and tensors that the step's code reaches without an argument.


class Loop:
    """Everything is in the object whose method the step is."""

    def __init__(self, scaler=False):
        torch.manual_seed(0)
        self.parts = {"model": nn.Linear(4, 4), "teacher": nn.Linear(4, 4)}
        self.optim = torch.optim.AdamW(
            self.parts["model"].parameters(), lr=0.1, fused=True
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaler)
        self.weights, self.count = torch.arange(4.0), torch.zeros(())

    def step(self, batch):
        with torch.no_grad():
            wanted = self.parts["teacher"](batch)
        loss = (self.parts["model"](batch) - wanted).square() @ self.weights
        self.scaler.scale(loss.mean()).backward()
        self.scaler.step(self.optim)
        self.scaler.update()
        self.optim.zero_grad()
        self.count += 1
        return loss.detach()


@pytest.mark.parametrize("shadow", (0, 8))
@pytest.mark.parametrize("scaler", (False, True))
def test_a_step_that_reaches_its_model(scaler, shadow):
    logs = []
    for wrap in (lambda step: step, partial(compile, shadow=shadow)):
        loop, log = Loop(scaler), []
        step = wrap(loop.step)
        for number in range(8):
            if number == 4:
                loop.parts["teacher"], loop.weights = nn.Linear(4, 4), torch.ones(4)
                nn.init.ones_(loop.parts["teacher"].weight)
                nn.init.ones_(loop.parts["teacher"].bias)
            if number == 6:
                loop.optim.param_groups[0]["lr"] = 0.01
                loop.weights.fill_(2.0)
            batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
            log += [step(batch), loop.count.clone(), *loop.parts["model"].parameters()]
            log[-2:] = [each.detach().clone() for each in log[-2:]]
        logs.append(log)
    assert all(map(torch.equal, *logs))
    assert len(step.programs) == 1


def test_a_closure_around_a_model():
    torch.manual_seed(0)
    models = [nn.Linear(4, 4)]
    models.append(copy.deepcopy(models[0]))
    steps = []
    for model in models:
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.ones(2, 4)

        def step(model=model, optim=optim):
            return auxiliary(model, optim, batch)  # noqa: B023 - of each call

        steps.append(step)
    steps[0] = compile(steps[0], shadow=0)
    for number in range(5):
        batch = torch.full((2 + number % 2, 4), 1.0 + number)
        assert torch.equal(*(step() for step in steps))
