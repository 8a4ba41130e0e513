"""What a function given to ``compile`` edits outside of passes is checked too."""

import copy
import warnings

import pytest
import torch
from torch import fx, nn
from training import train_silently

from torchspmd.errors import LegalityError, PassWarning
from torchspmd.step import (
    GraphModuleTransformation,
    IterGraphModule,
    build,
    compile,
    graph_optimization_pass,
)
from torchspmd.step.graph.metadata import roles_of, set_roles
from torchspmd.step.graph.reports import Outcome

aten = torch.ops.aten


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def fused(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


def train(transformation, *, steps=2, make=momentum, **options):
    """The parameters after some steps, what was warned of, and the last certificate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 4))
    optim = make(model.parameters())

    step = compile(train_silently, gm_transformation=transformation, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PassWarning)
        for _ in range(steps):
            step(model, optim, torch.ones(2, 4))
    texts = [str(each.message) for each in caught if each.category is PassWarning]
    return list(model.parameters()), texts, step.programs[-1].certificate


def edit_outputs(change):
    def edit(gm):
        output = gm.graph.output_node()
        output.args = (change(list(output.args[0])),)
        gm.recompile()
        return gm

    return edit


def exchanged(values):
    one, two = [n for n, v in enumerate(values) if v.meta["val"].shape == (4, 4)][:2]
    values[one], values[two] = values[two], values[one]
    return values


def add_input(gm):
    last = gm.graph.find_nodes(op="placeholder")[-1]
    with gm.graph.inserting_after(last):
        gm.graph.placeholder("more")
    return gm


def turn_roles(gm):
    set_roles(gm.graph, roles_of(gm.graph)[::-1])
    return gm


def without_end(gm):
    gm.graph.erase_node(gm.graph.output_node())
    return gm


def copied(gm):
    return edit_outputs(exchanged)(copy.deepcopy(gm))


def iterated(gm):
    module = IterGraphModule(gm)
    edit_outputs(exchanged)(module)
    return module


@pytest.mark.parametrize(
    ("edit", "name", "problem"),
    [
        (edit_outputs(exchanged), "edit", "another value"),
        (copied, "copied", "another value"),
        (iterated, "iterated", "another value"),
        (
            edit_outputs(lambda values: values[1:]),
            "edit",
            r"outputs and has \d+; output 0",
        ),
        (edit_outputs(lambda values: [*values, values[0]]), "edit", "outputs and has"),
        (add_input, "add_input", "the input more is new"),
        (turn_roles, "turn_roles", "the roles of the outputs changed"),
        (without_end, "without_end", "does not end with an output node"),
    ],
)
def test_a_wrong_edit_without_any_pass(edit, name, problem):
    with pytest.raises(LegalityError, match=problem) as caught:
        train(edit)
    assert str(caught.value).startswith(
        f"compile(gm_transformation={name}) would change what the graph computes"
    )


def sine(gm):
    for node in gm.graph.find_nodes(op="call_function", target=aten.tanh.default):
        node.target = aten.sin.default
    return gm


def test_what_cannot_be_proved_is_a_warning_and_a_line():
    _, texts, certificate = train(sine, steps=1)
    (text,) = texts
    assert text.startswith("sine: ") and "outputs could not be proved equal" in text
    (report,) = certificate.passes
    assert report.name == "sine" and report.unproved
    assert "sine: changed " in str(certificate)


def negate_twice(gm):
    (node,) = gm.graph.find_nodes(op="call_function", target=aten.tanh.default)
    with gm.graph.inserting_after(node):
        once = gm.graph.call_function(aten.neg.default, (node,))
    with gm.graph.inserting_after(once):
        twice = gm.graph.call_function(aten.neg.default, (once,))
    once.meta, twice.meta = dict(node.meta), dict(node.meta)
    node.replace_all_uses_with(twice, lambda user: user is not once)
    return gm


def test_what_is_compared_on_virtual_ranks_is_no_warning():
    _, texts, certificate = train(negate_twice, steps=1)
    assert len(texts) == 1
    _, texts, certificate = train(negate_twice, steps=1, verify=True)
    assert [each.name for each in certificate.passes] == ["negate_twice"]
    assert not [each for each in texts if "could not be proved equal" in each]
    assert "pass negate_twice" in {check.what for check in certificate.checks}


def retraced(gm):
    return fx.Transformer(gm).transform()


def with_other_names(gm):
    """A graph that has none of the names and nothing written on its nodes."""
    graph, twins = fx.Graph(), {}
    for node in gm.graph.nodes:
        made = graph.node_copy(node, lambda old: twins[old])
        made.meta = {}
        if node.op == "call_function":
            made.name = f"other_{node.name}"
        twins[node] = made
    return fx.GraphModule(gm, graph)


@pytest.mark.parametrize(
    "transformation",
    [lambda gm: gm, copy.deepcopy, IterGraphModule, retraced, with_other_names],
)
def test_copies_are_what_they_are_copied_from(transformation):
    expected, _, _ = train(None)
    found, texts, _ = train(transformation)
    assert texts == []
    assert all(map(torch.equal, found, expected))


def test_a_graph_that_is_traced_again_is_no_wrong_edit():
    expected, _, _ = train(None, make=fused)
    found, _, _ = train(fx.symbolic_trace, make=fused)
    assert all(map(torch.equal, found, expected))


@graph_optimization_pass(prerequisites=[], apply_after=[])
def clone_first(gm):
    output = gm.graph.output_node()
    (values,) = output.args
    with gm.graph.inserting_before(output):
        first = gm.graph.call_function(aten.clone.default, (values[0],))
    first.meta = dict(values[0].meta)
    output.args = ([first, *values[1:]],)
    return Outcome(1, 1)


def test_passes_inside_are_not_checked_again(monkeypatch):
    def transformation(gm):
        module = IterGraphModule(gm)
        clone_first(module)
        return module

    _, _, certificate = train(transformation, steps=1)
    assert [each.name for each in certificate.passes] == ["clone_first"]

    def refuse(*_):
        raise AssertionError("checked twice")

    monkeypatch.setattr(build, "run_transformation", refuse)
    train(GraphModuleTransformation(passes=[clone_first]), steps=1)


def test_an_edit_behind_a_pass():
    def transformation(gm):
        clone_first(gm)
        return edit_outputs(exchanged)(gm)

    with pytest.raises(LegalityError, match="gm_transformation=transformation"):
        train(transformation)


def test_a_pass_inside_that_changes_nothing_still_says_so():
    @graph_optimization_pass(prerequisites=[], apply_after=[])
    def do_nothing(gm):
        return Outcome(0, 0)

    def transformation(gm):
        do_nothing(gm)
        return gm

    _, texts, _ = train(transformation, steps=1)
    assert texts == ["do_nothing changed nothing: it found nothing to work on."]
