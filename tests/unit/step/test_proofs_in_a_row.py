"""A proof takes over what the one before it found, of what nobody touched since."""

import pytest
import torch
from torch import fx

from torchspmd.errors import LegalityError, PassWarning
from torchspmd.step import IterGraphModule, graph_optimization_pass
from torchspmd.step.graph.reports import Outcome

aten = torch.ops.aten
DOUBTS = LegalityError, PassWarning  # warnings are errors in tests


def make():
    """One product with 2, which two others are made of, and another output."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    twice = graph.call_function(aten.mul.Tensor, (x, 2.0), name="twice")
    noise = graph.call_function(aten.bernoulli.p, (twice, 0.5), name="noise")
    negative = graph.call_function(aten.neg.default, (noise,), name="negative")
    plus = graph.call_function(aten.add.Tensor, (x, 1.0), name="plus")
    for node in (x, twice, noise, negative, plus):
        node.meta["val"] = torch.empty(3, device="meta")
    graph.output([negative, plus])
    return IterGraphModule(fx.GraphModule({}, graph))


def find(gm, name):
    return next(node for node in gm.graph.nodes if node.name == name)


@graph_optimization_pass(prerequisites=[], apply_after=[])
def move(gm):
    """An edit that is legal, at each time."""
    last, other = find(gm, "plus"), find(gm, "twice")
    (other.append if other < last else last.append)(last if other < last else other)
    return Outcome(1, 1)


def becomes(name, *args, target=None):
    """A pass, or an edit by hand, that gives a node other arguments."""

    def edit(gm):
        node = find(gm, name)
        node.args = tuple(find(gm, a) if isinstance(a, str) else a for a in args)
        node.target = target or node.target
        return Outcome(1, 1)

    return edit


def as_pass(edit):
    return graph_optimization_pass(prerequisites=[], apply_after=[])(edit)


@pytest.mark.parametrize(
    ("by_hand", "back"),
    [
        (becomes("twice", "x", 3.0), becomes("twice", "x", 2.0)),
        (becomes("negative", "twice"), becomes("negative", "noise")),
        (
            becomes("plus", "x", 1.0, target=aten.sub.Tensor),
            becomes("plus", "x", 1.0, target=aten.add.Tensor),
        ),
    ],
    ids=["number", "operand", "operator"],
)
def test_what_was_edited_between_two_passes_is_evaluated_again(by_hand, back):
    """A pass that gives back the graph of the last proof changes the one that it got."""
    gm = make()
    move(gm)
    by_hand(gm)
    with pytest.raises(DOUBTS, match=r"would change|could not be proved"):
        as_pass(back)(gm)
    assert "proved equal" in move(gm).proof  # of the graph as it was edited by hand


@pytest.mark.parametrize(
    "edit",
    [
        becomes("twice", "x", 3.0),
        becomes("noise", "twice", 0.25),
        becomes("negative", "plus"),
        becomes("plus", "x", 1.0, target=aten.sub.Tensor),
    ],
    ids=["number", "random", "operand", "operator"],
)
def test_a_wrong_edit_is_found_behind_any_number_of_proofs(edit):
    gm = make()
    for _ in range(3):
        assert move(gm).proof == "proved equal"
        with pytest.raises(DOUBTS):
            as_pass(edit)(gm)
    # Undone each time.
    assert find(gm, "twice").args[1] == 2.0 and find(gm, "plus").args[1] == 1.0


def test_other_metadata_is_evaluated_again():
    """What a node gives, as the last proof saw it, is not what it gives now."""
    gm = make()
    move(gm)
    for node in gm.graph.nodes:  # of another size
        if node.op != "output":
            node.meta["val"] = torch.empty(4, device="meta")

    @as_pass
    def cut(gm):
        node = find(gm, "negative")
        with gm.graph.inserting_after(node):
            part = gm.graph.call_function(aten.slice.Tensor, (node, 0, 0, 3))
        node.replace_all_uses_with(part, lambda user: user is not part)
        return Outcome(1, 1)

    with pytest.raises(LegalityError, match=r"other elements|shape"):
        cut(gm)
