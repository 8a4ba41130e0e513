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
