"""The runtime of compiled steps can be replaced, for as long as a block lasts."""

import contextlib

import pytest
import torch
from training import train

from torchspmd.step import compile
from torchspmd.step.lower.cuda_graph import CudaGraphRun
from torchspmd.step.runtime import Runtime, current_runtime, using_runtime
from torchspmd.step.shadow.check import ShadowPlan


class Watching(Runtime):
    def __init__(self):
        self.seen = []

    def shadow_plan(self, asked):
        self.seen.append("shadow")
        return ShadowPlan(0)

    def compile_graph(self, graph, compiled):
        self.seen.append("compile")
        return graph, "not compiled"

    @contextlib.contextmanager
    def calling(self):
        self.seen.append("call")
        yield

    @contextlib.contextmanager
    def running(self, program, inventory):
        self.seen.append(program.number)
        yield


def make():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_steps_run_on_the_runtime_of_the_block():
    model, optim = make()
    before = compile(train, shadow=0)
    watching = Watching()
    with using_runtime(watching):
        inside = compile(train, backend="inductor")
        inside(model, optim, torch.ones(3, 4))
        before(model, optim, torch.ones(3, 4))
    assert watching.seen == ["shadow", "call", "compile", 0, "call", 0]
    assert "not compiled" in inside.explain()
    before(model, optim, torch.ones(3, 4))
    assert len(watching.seen) == 6


def test_an_exception_ends_the_block():
    with pytest.raises(ValueError), using_runtime(Watching()):
        raise ValueError
    assert type(current_runtime()) is Runtime


def test_a_cuda_graph_is_made_by_the_runtime(monkeypatch):
    monkeypatch.setattr(CudaGraphRun, "__init__", lambda self, graph: None)
    assert isinstance(Runtime().replay_graph(None), CudaGraphRun)
