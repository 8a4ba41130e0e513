"""What a step hands out: dataclasses have values, other places for tensors are refused."""

import types
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

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
    assert "Logs.log['mean']: a tensor of the step" in text
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
        (lambda model, y: setattr(model.box, "kept", y), "Logs.box.kept"),
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
