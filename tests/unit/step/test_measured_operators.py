"""Operators that are timed as the step runs them, and what their times are used for."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from training import train as step

from torchspmd.comm import Phase
from torchspmd.errors import PassWarning, UsageError
from torchspmd.step import GraphModuleTransformation, compile
from torchspmd.step.capture.inventory import take_inventory
from torchspmd.step.graph.cost import CostModel, computes, operator_key
from torchspmd.step.graph.metadata import owner_of
from torchspmd.step.measure import operators as measured_operators
from torchspmd.step.measure.operators import _by_key, measure_graph, time_operators
from torchspmd.step.rank_agreement import Agreement
from torchspmd.testing import fake_world

ALONE = Agreement("step", "0", 0, None)  # nobody to agree with


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
        seen.append(graph)
        return graph

    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    call = model, optim, torch.arange(6).view(2, 3)
    inputs = take_inventory(call, {}, lift_numbers=True).flat_inputs()
    compile(step, gm_transformation=keep)(*call)
    return seen[0], inputs


@pytest.fixture(scope="module")
def program():
    return made(Net())


def nodes_of(graph, name):
    return [node for node in graph.graph.nodes if name in str(node.target)]


def test_forward_and_backward_are_timed(program):
    graph, inputs = program
    found, _ = time_operators(graph, inputs, ALONE)
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
    time_operators(graph, inputs, ALONE)
    assert torch.equal(torch.rand(2), expected)
    assert str(graph.graph) == text
    after = [each for each in inputs if isinstance(each, torch.Tensor)]
    assert all(map(torch.equal, before, after))


def test_collectives_are_made_up_for(monkeypatch):
    """Of a step that gathers and scatters, with a world that sends nothing."""
    seen = []

    def keep(graph, *args):
        found = time_operators(graph, *args)
        seen.append((fx.GraphModule(graph, copy.deepcopy(graph.graph)), found[0]))
        return found

    monkeypatch.setattr(measured_operators, "time_operators", keep)
    with fake_world(4):
        model = Net()
        compiled = compile(step, parallel="fully_shard", cost="measure")
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
        measured_operators, "time_operators", lambda *_: ({product: slow}, ())
    )
    cost, _ = measure_graph(graph, inputs, ALONE)
    assert cost.compute_seconds(node) == slow
    assert cost.memory_bytes == pytest.approx(guess.memory_bytes / 4)
    assert cost.flops == pytest.approx(guess.flops / 4)
    again, _ = measure_graph(graph, inputs, ALONE, cost)
    assert again == cost  # rates of another program are kept


def test_simple_operators_count_less_where_a_compiler_fuses_them(program, monkeypatch):
    graph, inputs = program
    kinds = {
        operator_key(nodes_of(graph, name)[0]): 1.0 for name in ("addmm", "embedding")
    }
    monkeypatch.setattr(measured_operators, "time_operators", lambda *_: (kinds, ()))
    cost, _ = measure_graph(graph, inputs, ALONE, fuses=True)
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
    assert time_operators(graph, inputs, ALONE)[0]
    assert len(runs) == 2  # the first does not count


def test_what_cannot_be_run_keeps_its_estimate(program):
    graph, inputs = program
    wrong = [each[:1] if i == 1 else each for i, each in enumerate(inputs)]
    found, (why,) = time_operators(graph, wrong, ALONE)
    assert found == {}
    assert why.startswith("not measured: ")


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
    monkeypatch.setattr(measured_operators, "time_operators", lambda *_: ({}, ()))
    compiled = compile(step, passes=True, cost="measure")
    model = nn.Linear(4, 4)
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
        UsageError, match=r"Pass it as gm_transformation=.*measure_cost\(\) found"
    ):
        transformation(program[0])


def test_nothing_to_time():
    graph = fx.Graph()
    graph.output([graph.placeholder("x")])
    found = time_operators(fx.GraphModule({}, graph), [torch.ones(2)], ALONE)
    assert found == ({}, ())
