"""New calls that are no operators, and write or draw by their name, are refused."""

import operator
import random

import pytest
import torch
from torch import fx, nn

from torchspmd.errors import LegalityError
from torchspmd.step.graph.snapshot import copy_graph
from torchspmd.step.legality.check import check_edit

pytestmark = pytest.mark.unit


def tanh(x):
    return torch.ops.aten.tanh.default(x)


def scaled(value):
    return value


def edited(add):
    """A graph whose value is taken by one more call, with no reader of its own."""
    gm = fx.symbolic_trace(tanh)
    gm.add_submodule("relu", nn.ReLU(inplace=True))
    gm.add_submodule("plain", nn.ReLU())
    (value,) = gm.graph.find_nodes(
        op="call_function", target=torch.ops.aten.tanh.default
    )
    for node in gm.graph.nodes:
        node.meta["val"] = torch.empty(3, device="meta")
    before, mapping = copy_graph(gm.graph)
    with gm.graph.inserting_after(value):
        add(gm.graph, value)
    return before, gm.graph, mapping


@pytest.mark.parametrize(
    ("add", "words"),
    [
        (lambda g, x: g.call_method("zero_", (x,)), "writes in place (zero_)"),
        (
            lambda g, x: g.call_function(operator.imul, (x, 0)),
            "writes in place (imul)",
        ),
        (
            lambda g, x: g.call_function(torch.relu_, (x,)),
            "writes in place (relu_)",
        ),
        (lambda g, x: g.call_module("relu", (x,)), "writes in place (relu)"),
        (
            lambda g, x: g.call_function(torch.rand, (5,)),
            "takes random numbers (rand)",
        ),
        (
            lambda g, x: g.call_function(torch.manual_seed, (5,)),
            "takes random numbers (manual_seed)",
        ),
    ],
)
def test_calls_that_write_or_draw(add, words):
    with pytest.raises(LegalityError) as caught:
        check_edit(*edited(add))
    assert f"is new and {words}" in str(caught.value)


@pytest.mark.parametrize(
    "add",
    [
        lambda g, x: g.call_function(print, ("here",)),
        lambda g, x: g.call_function(scaled, (x,)),
        lambda g, x: g.call_function(random.random, ()),
        lambda g, x: g.call_function(nn.functional.normalize, (x,)),
        lambda g, x: g.call_method("detach", (x,)),
        lambda g, x: g.call_module("plain", (x,)),
        lambda g, x: g.call_function(torch.isfinite, (x,)),
    ],
)
def test_calls_that_only_look(add):
    assert str(check_edit(*edited(add))) == "proved equal"
