"""Operators that are timed by themselves, and what their times are used for."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from torchspmd.errors import PassWarning, UsageError
from torchspmd.step import GraphModuleTransformation, compile, measured_operators
from torchspmd.step.graph.cost import CostModel, operator_key
from torchspmd.step.measured_operators import measure_graph, time_operators
from torchspmd.testing import fake_world

pytestmark = pytest.mark.unit


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    def forward(self, tokens):
        return F.dropout(self.layers(self.embed(tokens)), 0.5)


def step(model, optim, batch):
    loss = model(batch).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


@pytest.fixture(scope="module")
def program():
    model = Net()
    compiled = compile(step)
    compiled(
        model, torch.optim.SGD(model.parameters(), lr=0.1), torch.arange(6).view(2, 3)
    )
    return compiled.programs[0].graph


def nodes_of(graph, name):
    return [node for node in graph.graph.nodes if name in str(node.target)]


def test_each_distinct_operator_is_timed_once(program, monkeypatch):
    timed = []
    real = measured_operators._time_node

    def counting(node):
        timed.append(operator_key(node))
        return real(node)

    monkeypatch.setattr(measured_operators, "_time_node", counting)
    found = time_operators(program.graph)
    assert len(timed) == len(set(timed)) == len(found)
    assert all(0 < seconds < 1 for seconds in found.values())
    (key,) = {operator_key(node) for node in nodes_of(program, "addmm")}
    assert key in found
    assert len(nodes_of(program, "addmm")) == 3
    assert not time_operators(program.graph, found)


@pytest.mark.parametrize("name", ["embedding", "dropout", "bernoulli", "rand"])
def test_an_index_and_a_random_number_are_left_alone(program, name):
    found = time_operators(program.graph)
    assert not any(f"aten.{name}" in key for key in found)


def test_updates_are_left_alone(program):
    owned = [n for n in program.graph.nodes if "optimizer" in str(n.meta.get("owner"))]
    found = time_operators(program.graph)
    alone = {operator_key(n) for n in program.graph.nodes if n not in owned}
    assert set(found) <= alone


def test_the_random_numbers_of_the_user_stay(program):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    time_operators(program.graph)
    assert torch.equal(torch.rand(2), expected)


def test_a_measured_time_counts_and_others_follow(program, monkeypatch):
    guess = CostModel.for_device("cpu")
    (product,) = {operator_key(node) for node in nodes_of(program, "addmm")}
    node = nodes_of(program, "addmm")[0]
    slow = 4 * guess.compute_seconds(node)
    monkeypatch.setattr(
        measured_operators, "time_operators", lambda *_: {product: slow}
    )
    cost = measure_graph(program)
    assert cost.compute_seconds(node) == slow
    assert cost.memory_bytes == pytest.approx(guess.memory_bytes / 4)
    assert cost.flops == pytest.approx(guess.flops / 4)
    again = measure_graph(program, cost)
    assert again == cost  # measured for another program: rates are kept


def test_one_that_takes_too_long_ends_the_measurement(program, monkeypatch):
    monkeypatch.setattr(measured_operators, "_SECONDS", -1.0)
    assert time_operators(program.graph) == {}


def test_an_operator_that_fails_keeps_its_estimate(program, monkeypatch):
    def broken(_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(measured_operators, "_random", broken)
    assert time_operators(program.graph) == {}


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
    count = len(transformation.cost.operators)
    assert f"measured: {count} operators; the network sends" in compiled.explain()


def test_another_word_is_refused():
    with pytest.raises(UsageError, match="give a CostModel, or 'measure'"):
        GraphModuleTransformation(enable_graph_optimization=True, cost="mesure")


def test_ranks_cannot_agree_outside_of_compile(program):
    transformation = GraphModuleTransformation(
        enable_graph_optimization=True, cost="measure"
    )
    with (
        fake_world(2),
        pytest.raises(UsageError, match=r"give the cost that measure_cost\(\) found"),
    ):
        transformation(program)
