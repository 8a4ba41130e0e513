"""Measured exposure of steps that communicate nothing, and what is refused."""

import pytest
import torch
from test_deferral_in_place import OPTIMIZERS, Training, batches

from torchspmd.errors import UsageError
from torchspmd.step import GraphModuleTransformation, compile
from torchspmd.step.measure.exposure import _as_it_runs
from torchspmd.step.runtime import Runtime


def train(model, optim, batch):
    model(batch).square().mean().backward()
    optim.step()


def pair():
    model = torch.nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_refusals():
    call = (*pair(), torch.ones(3, 4))
    step = compile(train)
    with pytest.raises(UsageError, match="no program fits these arguments yet"):
        step.exposure(*call)
    step(*call)
    with pytest.raises(UsageError, match="is a program of its own, so make two"):
        step.exposure(*call)
    step(*call)
    step(*call)
    with pytest.raises(UsageError, match=r"exposure\(runs=0\): pass a whole number, "):
        step.exposure(*call, runs=0)
    with pytest.raises(UsageError, match=r"exposure\(cost=3\): give a CostModel, or"):
        step.exposure(*call, cost=3)
    own = compile(gm_transformation=lambda gm: gm.forward)(train)
    for _ in range(3):
        own(*call)
    with pytest.raises(UsageError, match="a callable of its own, whose collectives"):
        own.exposure(*call)
    step.close()
    with pytest.raises(UsageError, match="train: this compiled step was closed"):
        step.exposure(*call)


def test_a_step_without_communication():
    call = (*pair(), torch.ones(3, 4))
    step = compile(train)
    for _ in range(3):
        step(*call)
    report = step.exposure(*call, runs=1)
    assert report.collectives == () and report.exposed_ms == 0.0 and report.step_ms > 0
    assert "wait for 0 of 0 collectives" in report.summary()


def test_compiled_code_is_measured_operator_by_operator_and_that_is_said(monkeypatch):
    monkeypatch.setattr(Runtime, "compile_graph", lambda self, graph, _: (graph, ""))
    call = (*pair(), torch.ones(3, 4))
    step = compile(backend="inductor")(train)
    for _ in range(3):
        step(*call)
    (line,) = step.exposure(*call, runs=1).notes
    assert line == "measured operator by operator, not as the compiled code runs"


class Latest(torch.nn.Linear):
    """Overwrites a buffer that it never reads."""

    def __init__(self):
        super().__init__(4, 2)
        self.register_buffer("last", torch.zeros(2))

    def forward(self, batch):
        out = super().forward(batch)
        with torch.no_grad():
            self.last.copy_(out.mean(0))
        return out


def test_a_state_that_is_only_written_is_left_alone():
    model = Latest()
    call = (model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(3, 4))
    passes = GraphModuleTransformation(enable_graph_optimization=True)
    step = compile(gm_transformation=passes)(train)
    for _ in range(3):
        step(*call)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    step.exposure(*call, runs=1)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_measured_is_what_runs(name):
    """Pending updates overwrite the same values that earlier steps left."""
    training = Training(name)
    training.step(batches(1)[0])
    measured = _as_it_runs(training.run.forms["steady"], is_steady=True)
    training.compiled.flush()
    assert operators(measured) == operators(training.runs("steady"))


def operators(gm):
    return [str(n.target) for n in gm.graph.nodes if not is_mark(n)]


def is_mark(node):
    return getattr(node.target, "__name__", "") in ("_begin", "_end", "_ignore")
