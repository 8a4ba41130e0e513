"""An edit that leaves a graph as it was is told apart without evaluating the graph."""

import pytest
import torch
from torch import fx

from torchspmd.step.graph.snapshot import copy_graph
from torchspmd.step.legality import check
from torchspmd.step.legality.check import check_edit
from torchspmd.step.legality.edit import Edit

pytestmark = pytest.mark.unit

aten = torch.ops.aten


def graph():
    """Two sums and a sum along dimensions, with a list and a dtype among arguments."""
    made = fx.Graph()
    x, y = made.placeholder("x"), made.placeholder("y")
    first = made.call_function(aten.add.Tensor, (x, y), {"alpha": 0.0})
    second = made.call_function(aten.add.Tensor, (y, x), {"alpha": 2})
    total = made.call_function(
        aten.sum.dim_IntList, (first, [0, 1]), {"dtype": torch.float32}
    )
    made.output((second, total))
    return made


def nodes(made):
    return {node.name: node for node in made.nodes}


def other_alpha(made):
    nodes(made)["add_tensor"].kwargs = {"alpha": -0.0}


def other_dimension(made):
    nodes(made)["sum_dim_int_list"].args = (nodes(made)["add_tensor"], [0, 0])


def other_operand(made):
    nodes(made)["add_tensor"].args = (nodes(made)["x"], nodes(made)["x"])


def other_operator(made):
    nodes(made)["add_tensor"].target = aten.sub.Tensor


def other_order(made):
    nodes(made)["add_tensor"].prepend(nodes(made)["add_tensor_1"])


def one_more(made):
    with made.inserting_before(made.output_node()):
        made.call_function(aten.neg.default, (nodes(made)["x"],))


def one_less(made):
    made.output_node().args = (
        (nodes(made)["add_tensor_1"], nodes(made)["add_tensor"]),
    )
    made.erase_node(nodes(made)["sum_dim_int_list"])


def replaced(made):
    """Another node that does the same under the same name."""
    old = nodes(made)["add_tensor_1"]
    with made.inserting_before(old):
        new = made.call_function(old.target, old.args, dict(old.kwargs))
    old.replace_all_uses_with(new)
    made.erase_node(old)


def test_nothing_was_done():
    made = graph()
    before, mapping = copy_graph(made)
    assert Edit.of(before, made, mapping).is_empty


@pytest.mark.parametrize(
    "change",
    [
        other_alpha,
        other_dimension,
        other_operand,
        other_operator,
        other_order,
        one_more,
        one_less,
        replaced,
    ],
)
def test_something_was_done(change):
    made = graph()
    before, mapping = copy_graph(made)
    change(made)
    assert not Edit.of(before, made, mapping).is_empty


def test_nothing_is_evaluated_for_nothing(monkeypatch):
    made = graph()
    before, mapping = copy_graph(made)
    monkeypatch.setattr(check, "Equivalence", None)
    proof = check_edit(before, made, mapping)
    assert str(proof) == "proved equal"
    assert proof.num_outputs == 2
