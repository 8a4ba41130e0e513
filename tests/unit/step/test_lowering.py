"""What is kept from Inductor because compiling it would cost more than it gives."""

import pytest
import torch
from torch import fx

from torchspmd import _torch
from torchspmd.step.graph.inductor import lower

pytestmark = pytest.mark.unit

aten = torch.ops.aten


def graph_of(rate, *, used=False):
    """Gives ``weight + 1`` and a copy of the rate, as an iteration that keeps it does."""
    graph = fx.Graph()
    weight, rate_in = graph.placeholder("weight"), graph.placeholder("rate")
    weight.meta["val"], rate_in.meta["val"] = torch.empty(4), rate
    new = graph.call_function(aten.add.Tensor, (weight, 1))
    copied = graph.call_function(aten.clone.default, (rate_in,))
    if used:
        new = graph.call_function(aten.mul.Tensor, (weight, copied))
    graph.output([new, copied])
    return fx.GraphModule({}, graph)


@pytest.fixture
def compiled_graphs(monkeypatch):
    seen = []

    def made(graph, inputs, *, keep_order):
        seen.append(graph)
        return graph, "not compiled"

    monkeypatch.setattr(_torch, "compile_with_inductor", made)
    return seen


def targets(graph):
    return {node.target for node in graph.graph.nodes if node.op == "call_function"}


def test_a_rate_is_copied_by_the_caller(compiled_graphs):
    rate = torch.tensor(0.1)
    graph = graph_of(rate)
    new, kept = lower(graph)[0](torch.zeros(4), rate)
    assert targets(compiled_graphs[0]) == {aten.add.Tensor}
    assert aten.clone.default in targets(graph)  # which is shown and checked
    rate.fill_(5.0)
    assert kept.item() == pytest.approx(0.1)
    assert new.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("rate", "used"),
    [
        (torch.ones(3), False),
        (torch.tensor(1.0, device="meta"), False),
        (torch.tensor(1.0), True),
    ],
    ids=["a tensor", "elsewhere", "used"],
)
def test_other_copies_stay(compiled_graphs, rate, used):
    lower(graph_of(rate, used=used))
    assert aten.clone.default in targets(compiled_graphs[0])


def test_inputs_with_one_example_are_compiled_as_two():
    """The learning rate of a step, and that of the step before, have one fake tensor."""
    graph = fx.Graph()
    now, before = graph.placeholder("now"), graph.placeholder("before")
    now.meta["val"] = before.meta["val"] = torch.tensor(0.1)
    new = graph.call_function(aten.mul.Tensor, (before, 2))
    graph.output([new, graph.call_function(aten.clone.default, (now,))])
    run, _ = lower(fx.GraphModule({}, graph))
    new, kept = run(torch.tensor(3.0), torch.tensor(5.0))
    assert (new.item(), kept.item()) == (10.0, 3.0)
