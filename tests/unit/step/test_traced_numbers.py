"""Python code gets from a traced number what it gets from the float or int itself."""

import copy
import json
import math
import numbers
import pickle

import pytest
import torch
from torch import nn
from training import train

from torchspmd.errors import CaptureError
from torchspmd.step import compile

VALUES = (2.0, 0.5, 0.25, 0.5)


def by_match(w):
    match w:
        case float():
            return 3.0 * w
        case _:
            return 0.0


TABLE = {"2.0": 1.0, "0.5": 10.0}
FOLLOWED = {  # by the graph, for all values
    "isinstance": lambda w: 3.0 * w if isinstance(w, float) else 0.0,
    "abc": lambda w: 3.0 * w if isinstance(w, numbers.Real) else 0.0,
    "class": lambda w: 3.0 * w if w.__class__ is float else 0.0,
    "match": by_match,
    "power": lambda w: w**2 / 3 - abs(-w),
    "floor": lambda w: math.floor(3.0 * w) + w,
}
ASSUMED = {  # a value is a program
    "str": lambda w: TABLE.get(str(w), 100.0),
    "f-string": lambda w: TABLE.get(f"{w}", 100.0),
    "format": lambda w: float(f"{w:.1f}"),
    "percent": lambda w: len("%s" % w),  # noqa: UP031
    "floordiv": lambda w: w // 0.4,
    "rfloordiv": lambda w: 2 // w,
    "mod": lambda w: w % 0.3,
    "divmod": lambda w: sum(divmod(w, 0.4)),
    "round": lambda w: round(w, 1) + round(w),
    "math": math.exp,
    "lookup": lambda w: {2.0: 3.0}.get(w, 7.0),
    "copy": lambda w: copy.deepcopy({"w": w})["w"],
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "json": lambda w: len(json.dumps([str(w)])),
}


def losses(rule, wrap, values=VALUES):
    def step(model, optim, x, w):
        loss = model(x).square().mean() * rule(w)
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optim = torch.optim.SGD(model.parameters(), lr=0.05)
    step = wrap(step)
    return step, [step(model, optim, torch.ones(2, 4), w).item() for w in values]


@pytest.mark.parametrize("name", [*FOLLOWED, *ASSUMED])
def test_an_argument(name):
    rule = {**FOLLOWED, **ASSUMED}[name]
    step, found = losses(rule, compile)
    assert found == losses(rule, lambda step: step)[1]
    assert len(step.programs) == (1 if name in FOLLOWED else len({*VALUES}))


def test_torch_is_left_as_it_was():
    before = [dict(vars(kind)) for kind in (torch.SymFloat, torch.SymInt)]
    losses(FOLLOWED["isinstance"], compile)
    assert before == [dict(vars(kind)) for kind in (torch.SymFloat, torch.SymInt)]


class Counting(torch.optim.SGD):
    """Looks at its rate and at its counter as code outside of torch does."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            rate = group["lr"] if isinstance(group["lr"], float) else 0.0
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                assert isinstance(state["step"], int)
                p.sub_(p.grad, alpha=rate / (1 + state["step"] // 2))


def test_numbers_of_an_optimizer():
    def run(wrap):
        torch.manual_seed(0)
        model, step = nn.Linear(4, 4), wrap(train)
        optim, found = Counting(model.parameters(), lr=0.1), []
        for call in range(5):
            optim.param_groups[0]["lr"] = 0.1 / (1 + call)
            found.append(step(model, optim, torch.ones(2, 4)).item())
        return found

    assert run(compile) == run(lambda step: step)


# ----------------------------------------------------------------------------
# Choices by buffers that are one number.


class Chooses(nn.Module):
    def __init__(self, choose):
        super().__init__()
        self.choose, self.layer = choose, nn.Linear(4, 4)
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("flag", torch.zeros(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return self.choose(self, self.layer(x)) * self.scale


def by_a_flag(model, y):
    if not model.ready:
        with torch.no_grad():
            model.scale.copy_(y.abs().mean(0))
            model.ready.fill_(True)
    return y


def by_data(model, y):
    if model.flag.item() == 0:
        model.scale.data.copy_(y.std(0))
        model.flag.data.copy_(torch.ones_like(model.flag))
    return y


def by_a_count(model, y):
    if model.count > 3:
        y = y * 2
    model.count += 1
    return y if model.count.item() % 2 else y + 1


def by_a_constant(model, y):
    return y * 3 if model.ready and model.flag else y


def averaged(model, y):
    return y


def chosen_step(model, optim, batch, average=None):
    loss = model(batch).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    if average is not None:
        average.update_parameters(model)
    return loss.detach()


@pytest.mark.parametrize("shadow", (0, 8))
@pytest.mark.parametrize(
    ("choose", "programs"),
    ((by_a_flag, 2), (by_data, 2), (by_a_count, 4), (by_a_constant, 1), (averaged, 2)),
)
def test_choices_by_buffers(choose, programs, shadow):
    step, logs = compile(chosen_step, shadow=shadow), []
    for function in (step, chosen_step):
        torch.manual_seed(0)
        model, log = Chooses(choose), []
        optim, extra = torch.optim.SGD(model.parameters(), lr=0.1), []
        if choose is averaged:
            extra = [torch.optim.swa_utils.AveragedModel(model)]
        for number in range(8):
            batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
            log.append(function(model, optim, batch, *extra))
            state = [model, *extra]
            log += [each.clone() for m in state for each in m.state_dict().values()]
        logs.append(log)
    assert all(map(torch.equal, *logs))
    assert len(step.programs) == programs


def read_after_a_write(model, y):
    model.count.copy_(y.amax())
    return y * 2 if model.count > 3 else y


def read_after_data(model, y):
    model.count.data.fill_(5)
    return y * 2 if model.count > 3 else y


def read_as_a_number(model, y):
    return y * float(model.count)


@pytest.mark.parametrize(
    "choose", (read_after_a_write, read_after_data, read_as_a_number)
)
def test_choices_that_are_refused(choose):
    model = Chooses(choose)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CaptureError, match="needs a tensor's value while") as caught:
        compile(chosen_step)(model, optim, torch.ones(3, 4))
    assert "A choice by a buffer that is one number" in str(caught.value)
