"""Numbers, names and operators that cannot be: refused with the rule and the way out."""

import math
import warnings

import pytest
import torch
from torch import fx, nn

from torchspmd.errors import CaptureError, UsageError
from torchspmd.step import IterGraphModule, Verification, compile, run_virtual
from torchspmd.step.passes import (
    comm_fusion_with_concat,
    defer_updates,
    prefetch_gathers,
    schedule_comm_wait,
)

pytestmark = pytest.mark.unit


def graph_module():
    return fx.symbolic_trace(lambda x, y: [x + y])


@pytest.mark.parametrize("size", [math.inf, math.nan, "25", 0, -1, True, 10**400])
def test_bucket_sizes(size):
    with pytest.raises(UsageError) as caught:
        comm_fusion_with_concat(graph_module(), size, first_bucket_mb=size)
    text = str(caught.value)
    assert f"bucket_size_mb={size!r}: a bucket needs a size above 0, a finite" in text
    assert f"first_bucket_mb={size!r}: use more than 0, a finite number of MiB" in text


@pytest.mark.parametrize("size", [math.inf, math.nan, "1", -1])
@pytest.mark.parametrize(
    "change", [schedule_comm_wait, prefetch_gathers, defer_updates]
)
def test_memory_budgets(change, size):
    rule = f"memory_budget_mb={size!r}): use 0 or more, a finite number of MiB, "
    rule += "such as 0" if change is defer_updates else "or None for no limit"
    gm = graph_module()
    gm = IterGraphModule(gm) if change is defer_updates else gm
    with pytest.raises(UsageError) as caught:
        change(gm, memory_budget_mb=size)
    assert f"{change.__name__}({rule}" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"ranks": 2.5}, "(ranks=2.5): pass a whole number, at least 1."),
        ({"ranks": 0}, "(ranks=0): pass a whole number, at least 1."),
        ({"ranks": {"dp": "2"}}, "(ranks['dp']='2'): pass a whole number, at least 1."),
        ({"steps": 0}, "(steps=0): pass a whole number, at least 1."),
        ({"seed": "a"}, "(seed='a'): pass a whole number."),
        ({"inputs": []}, "(inputs=list of 0): the graph takes 2 inputs. Pass a list"),
        ({"inputs": 1}, "(inputs=int): the graph takes 2 inputs. Pass a list"),
    ],
)
def test_virtual_runs(given, rule):
    with pytest.raises(UsageError) as caught:
        run_virtual(graph_module(), **given)
    assert f"run_virtual{rule}" in str(caught.value)


def test_verifications():
    with pytest.raises(UsageError) as caught:
        Verification(ranks=4.5, seed=None)
    assert str(caught.value).splitlines() == [
        "Verification(ranks=4.5): pass a whole number.",
        "Verification(seed=None): pass a whole number.",
    ]


def test_a_parameter_that_a_compiled_step_keeps_for_itself():
    def step(model, last_train_step=False): ...

    with pytest.raises(UsageError, match="Give your parameter another name"):
        compile(step)
    compile(lambda model, **kwargs: None)


def train_step(model, optim, batch):
    loss = model(batch).sum()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def test_a_scripted_module():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        scripted = torch.jit.script(nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), scripted)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CaptureError) as caught:
        compile(train_step)(model, optim, torch.ones(2, 4))
    text = str(caught.value)
    assert "1 of argument args[0] is made by torch.jit" in text
    assert "Pass the Python module that it was made from" in text


def test_an_operator_that_only_has_an_effect():
    seen = []
    library = torch.library.Library("odd_arguments", "FRAGMENT")
    library.define("log(Tensor x) -> ()")
    library.impl("log", lambda x: seen.append(1), "CompositeExplicitAutograd")

    def logging_step(model, optim, batch):
        torch.ops.odd_arguments.log(train_step(model, optim, batch).detach())

    model = nn.Linear(4, 4)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    logging_step(model, optim, torch.ones(2, 4))
    assert seen == [1]
    with pytest.raises(CaptureError) as caught:
        compile(logging_step)(model, optim, torch.ones(2, 4))
    assert "the step calls odd_arguments.log.default, which returns" in str(
        caught.value
    )
    assert "call it after the step" in str(caught.value)
