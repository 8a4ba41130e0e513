"""Operators that are timed as the step runs them, and what their times are used for."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from training import train as step

from torchspmd.comm import Phase
from torchspmd.errors import PassWarning, UsageError
from torchspmd.step import (
    DataParallel,
    GraphModuleTransformation,
    compile,
)
from torchspmd.step.graph.cost import CostModel, computes, operator_key
from torchspmd.step.graph.metadata import owner_of
from torchspmd.step.measure import cost as measured_operators
from torchspmd.step.measure.cost import (
    _by_key,
    measure_graph,
    offering,
    time_operators,
)
from torchspmd.testing import fake_world

pytestmark = pytest.mark.unit


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    def forward(self, tokens):
        return F.dropout(self.layers(self.embed(tokens)), 0.5)


def made(model, step=step):
    """A captured step and its inputs."""
    seen = []

    def keep(graph):
        seen.append((graph, list(measured_operators._inputs.get()())))
        return graph

    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    compile(step, gm_transformation=keep)(model, optim, torch.arange(6).view(2, 3))
    return seen[0]


@pytest.fixture(scope="module")
def program():
    return made(Net())


def nodes_of(graph, name):
    return [node for node in graph.graph.nodes if name in str(node.target)]


def test_forward_and_backward_are_timed(program):
    graph, inputs = program
    found = time_operators(graph, inputs)
    expected = {
        operator_key(node)
        for node in graph.graph.nodes
        if computes(node) and owner_of(node).phase is not Phase.OPTIMIZER
    }
    assert set(found) == expected
    assert all(0 <= seconds < 1 for seconds in found.values())
    assert any(key.startswith("aten.embedding_dense_backward") for key in found)
    (product,) = {operator_key(node) for node in nodes_of(graph, "addmm")}
    assert len(nodes_of(graph, "addmm")) == 3
    assert product in found


def test_nothing_of_the_user_changes(program):
    graph, inputs = program
    before = [each.clone() for each in inputs if isinstance(each, torch.Tensor)]
    text = str(graph.graph)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    time_operators(graph, inputs)
    assert torch.equal(torch.rand(2), expected)
    assert str(graph.graph) == text
    after = [each for each in inputs if isinstance(each, torch.Tensor)]
    assert all(map(torch.equal, before, after))


def test_collectives_are_made_up_for():
    """Of a step that gathers and scatters, with a world that sends nothing."""
    seen = []

    def keep(graph):
        inputs = list(measured_operators._inputs.get()())
        seen.append((graph, time_operators(graph, inputs)))
        return graph

    with fake_world(4):
        model = Net()
        compiled = compile(
            step, gm_transformation=keep, parallel_mode=DataParallel("fully_shard")
        )
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled(model, optim, torch.arange(6).view(2, 3))
    graph, found = seen[0]
    assert nodes_of(graph, "all_gather")
    assert nodes_of(graph, "reduce_scatter")
    assert any(key.startswith("aten.addmm") for key in found)
    assert not any("c10d" in key for key in found)


def test_a_measured_time_counts_and_others_follow(program, monkeypatch):
    graph, inputs = program
    guess = CostModel.for_device("cpu")
    (product,) = {operator_key(node) for node in nodes_of(graph, "addmm")}
    node = nodes_of(graph, "addmm")[0]
    slow = 4 * guess.compute_seconds(node)
    monkeypatch.setattr(
        measured_operators, "time_operators", lambda *_: {product: slow}
    )
    with offering(lambda: inputs):
        cost = measure_graph(graph)
        assert cost.compute_seconds(node) == slow
        assert cost.memory_bytes == pytest.approx(guess.memory_bytes / 4)
        assert cost.flops == pytest.approx(guess.flops / 4)
        assert measure_graph(graph, cost) == cost  # rates of another program are kept


def test_simple_operators_count_less_where_a_compiler_fuses_them(program, monkeypatch):
    graph, inputs = program
    kinds = {
        operator_key(nodes_of(graph, name)[0]): 1.0 for name in ("addmm", "embedding")
    }
    monkeypatch.setattr(measured_operators, "time_operators", lambda *_: kinds)
    with offering(lambda: inputs):
        cost = measure_graph(graph, fuses=True)
    assert cost.compute_seconds(nodes_of(graph, "addmm")[0]) == 1.0
    assert cost.compute_seconds(nodes_of(graph, "embedding")[0]) == 0.6


def test_operators_take_as_long_as_the_run_together():
    """Each is slow in one run of three, as where ranks take turns on a device."""
    starts = [[0.0, 1.0, 2.0, 7.0], [0.0, 5.0, 6.0, 7.0], [0.0, 1.0, 6.0, 7.0]]
    runs = [dict(enumerate(run)) for run in starts]
    assert _by_key(["a", "b", "a"], runs) == pytest.approx({"a": 7 / 3, "b": 7 / 3})


def test_a_long_run_is_counted_once(program, monkeypatch):
    graph, inputs = program
    runs = []
    real = fx.GraphModule.__call__
    monkeypatch.setattr(measured_operators, "_LONG", -1.0)
    monkeypatch.setattr(
        fx.GraphModule, "__call__", lambda *args: runs.append(0) or real(*args)
    )
    assert time_operators(graph, inputs)
    assert len(runs) == 2  # the first does not count


def test_what_cannot_be_run_keeps_its_estimate(program):
    graph, inputs = program
    wrong = [each[:1] if i == 1 else each for i, each in enumerate(inputs)]
    assert time_operators(graph, wrong) == {}


def test_strides_tell_products_apart():
    graph = fx.Graph()
    left, right = graph.placeholder("left"), graph.placeholder("right")
    left.meta["val"] = torch.empty(4, 4, device="meta")
    keys = []
    for value in (left.meta["val"], left.meta["val"].t()):
        right.meta["val"] = value
        node = graph.call_function(torch.ops.aten.mm.default, (left, right))
        keys.append(operator_key(node))
    assert keys[0] != keys[1]
    assert keys[0] == "aten.mm.default float32[4, 4][4, 1] float32[4, 4][4, 1]"


def test_the_step_says_what_was_measured():
    model = nn.Linear(4, 4)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    transformation = GraphModuleTransformation(
        enable_graph_optimization=True, cost="measure"
    )
    compiled = compile(step, gm_transformation=transformation)
    with pytest.warns(PassWarning):  # one device communicates nothing
        compiled(model, optim, torch.ones(2, 4))
    assert transformation.cost.operators
    text = compiled.explain()
    assert "measured: forward and backward take" in text
    assert "for a collective besides (a guess)" in text  # one device sends nothing


def test_that_nothing_could_be_measured_is_said(monkeypatch):
    monkeypatch.setattr(measured_operators, "time_operators", lambda *_: {})
    transformation = GraphModuleTransformation(
        enable_graph_optimization=True, cost="measure"
    )
    compiled = compile(step, gm_transformation=transformation)
    model = nn.Linear(4, 4)
    with pytest.warns(PassWarning):
        compiled(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 4))
    assert "could not be run on every rank, estimates count" in compiled.explain()


def test_another_word_is_refused():
    with pytest.raises(UsageError, match="give a CostModel, or 'measure'"):
        GraphModuleTransformation(enable_graph_optimization=True, cost="guess")


def test_a_graph_alone_has_no_inputs_to_be_measured_on(program):
    transformation = GraphModuleTransformation(
        enable_graph_optimization=True, cost="measure"
    )
    with pytest.raises(
        UsageError, match=r"while compile captures it.*measure_cost\(\) found"
    ):
        transformation(program[0])


def test_nothing_to_time():
    graph = fx.Graph()
    graph.output([graph.placeholder("x")])
    assert time_operators(fx.GraphModule({}, graph), [torch.ones(2)]) == {}
