"""Passes that fail leave no trace: neither a graph, nor a history, nor a module."""

import pytest
import torch
from torch import fx

from torchspmd.errors import DeferralError, LegalityError, PassWarning, UsageError
from torchspmd.step import (
    GraphModuleTransformation,
    IterGraphModule,
    compile,
    graph_optimization_pass,
    pass_reports,
)
from torchspmd.step.graph.reports import Outcome
from torchspmd.step.graph.snapshot import copy_graph
from torchspmd.step.passes import split_optimizer
from torchspmd.step.passes.runner import LeaveUnchanged, observing_passes, run_any


def module():
    return fx.symbolic_trace(lambda x: torch.relu(x) + 1)


def text_of(gm):
    return str(gm.graph)


def insert_alias(gm):
    """An edit that is proved: the same number, computed by a node of its own."""
    relu = next(n for n in gm.graph.nodes if n.target is torch.relu)
    with gm.graph.inserting_after(relu):
        again = gm.graph.call_function(torch.relu, relu.args)
    relu.replace_all_uses_with(again, lambda user: user is not again)


@graph_optimization_pass(prerequisites=[], apply_after=[], repeatable=False)
def inner(gm):
    insert_alias(gm)
    return Outcome(1, 1)


@graph_optimization_pass(prerequisites=[], apply_after=[])
def outer(gm):
    inner(gm)
    raise ValueError("mine")


def try_outer(gm):
    with pytest.raises(ValueError, match="mine"):
        outer(gm)


@pytest.mark.parametrize("make", [module, lambda: IterGraphModule(module())])
def test_passes_inside_of_one_that_fails_are_forgotten(make):
    gm = make()
    before, undone = text_of(gm), []
    with observing_passes(lambda *_: None, lambda *told: undone.append(told)):
        try_outer(gm)
    assert text_of(gm) == before
    assert pass_reports(gm) == ()
    (([report], graph),) = undone
    assert report.name == "inner" and str(graph) == before
    inner(gm)  # which may not run twice
    assert [each.name for each in pass_reports(gm)] == ["inner"]


@pytest.mark.parametrize("make", [module, lambda: IterGraphModule(module())])
def test_a_pass_that_gives_up_leaves_the_graph_unchanged(make):
    @graph_optimization_pass(prerequisites=[], apply_after=[])
    def give_up(gm):
        inner(gm)
        raise LeaveUnchanged(Outcome(1, 0, ("not worth it",)))

    gm = make()
    before, undone = text_of(gm), []
    with observing_passes(lambda *_: None, lambda *told: undone.append(told)):
        report = give_up(gm)
    assert text_of(gm) == before
    assert pass_reports(gm) == (report,) and report.name == "give_up"
    assert report.outcome.refused == ("not worth it",)
    assert report.proof == "proved equal" and report.before == report.after
    assert len(undone) == 1
    inner(gm)  # which may not run twice


def test_passes_before_one_that_fails_are_kept():
    @graph_optimization_pass(prerequisites=[], apply_after=[])
    def other(gm):
        insert_alias(gm)

    gm = module()
    other(gm)
    try_outer(gm)
    assert [each.name for each in pass_reports(gm)] == ["other"]


@pytest.mark.filterwarnings("ignore::torchspmd.errors.PassWarning")
def test_a_transformation_does_not_report_what_was_undone():
    transformation = GraphModuleTransformation(passes=[try_outer])
    transformation(module())
    (report,) = transformation.reports
    assert report.name == "try_outer" and report.outcome.changed == 0


def test_an_edit_before_a_pass_that_fails_is_still_seen():
    def edit_and_try(gm):
        next(n for n in gm.graph.nodes if n.name == "add").update_arg(1, 2)
        try_outer(gm)

    with pytest.raises(LegalityError, match="edit_and_try would change what the graph"):
        run_any(module(), edit_and_try)


@pytest.mark.parametrize("verify", [False, True])
def test_a_certificate_does_not_tell_of_what_was_undone(verify):
    @graph_optimization_pass(prerequisites=[], apply_after=[])
    def keep(gm):
        return Outcome(0, 0, refused=("nothing",))

    @graph_optimization_pass(prerequisites=[], apply_after=[])
    def failing(gm):
        keep(gm)
        raise ValueError("mine")

    def transformation(gm):
        with pytest.raises(ValueError, match="mine"):
            failing(gm)
        return gm

    @compile(gm_transformation=transformation, verify=verify)
    def step(batch):
        return batch.exp()

    with pytest.warns(PassWarning) if not verify else observing_passes(lambda *_: None):
        step(torch.ones(2))
    assert step.programs[0].certificate.passes == ()


@pytest.mark.filterwarnings("ignore::torchspmd.errors.PassWarning")
def test_verification_goes_on_from_what_is_back():
    @graph_optimization_pass(prerequisites=[], apply_after=[])
    def change(gm):
        for node in gm.graph.nodes:
            if node.target is torch.ops.aten.exp.default:
                node.target = torch.ops.aten.sin.default
        return Outcome(1, 1, keeps_bits=())

    @graph_optimization_pass(prerequisites=[], apply_after=[])
    def failing(gm):
        change(gm)
        raise ValueError("mine")

    def transformation(gm):
        with pytest.raises(ValueError, match="mine"):
            failing(gm)
        return gm

    @compile(gm_transformation=transformation, verify=True)
    def step(batch):
        return batch.exp()

    assert torch.equal(step(torch.ones(2)), torch.ones(2).exp())


def plain_in_main(gm):
    gm.main_gm.graph = copy_graph(gm.graph)[0]


def another_main(gm):
    gm.main_gm = fx.GraphModule(gm.main_gm, copy_graph(gm.graph)[0])


def no_main(gm):
    gm.main_gm = None


def empty(gm):
    gm.graph = fx.Graph()


def no_output(gm):
    gm.graph.erase_node(gm.graph.output_node())


MARKS = (
    "graph: main_gm is no longer a graph module with marks on what is moved. A pass edits "
    "the graph that it finds, or sets gm.graph; it sets neither main_gm nor main_gm.graph."
)
OUTPUT = (
    "output: the graph does not end with an output node. A pass keeps the outputs, all and "
    "in their order: the caller unpacks them."
)


@pytest.mark.parametrize("is_declared", [False, True])
@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (plain_in_main, MARKS),
        (another_main, MARKS),
        (no_main, MARKS),
        (empty, OUTPUT),
        (no_output, OUTPUT),
    ],
)
def test_an_edit_after_which_nothing_can_be_compared(edit, problem, is_declared):
    gm = IterGraphModule(module())
    before, main = text_of(gm), gm.main_gm
    with pytest.raises(LegalityError) as caught:
        if is_declared:
            graph_optimization_pass(prerequisites=[], apply_after=[])(edit)(gm)
        else:
            run_any(gm, edit)
    assert str(caught.value) == (
        f"{edit.__name__} would change what the graph computes, and was not taken; 1 "
        f"problem:\n  {problem}"
    )
    assert gm.main_gm is main and text_of(gm) == before
    assert gm(torch.tensor([-1.0, 2.0])).tolist() == [1.0, 3.0]


def test_a_main_module_that_was_replaced_outside_of_passes():
    gm = IterGraphModule(module())
    plain_in_main(gm)
    with pytest.raises(UsageError, match=r"set the graph of the IterGraphModule"):
        _ = gm.graph


def move(gm):
    add = next(n for n in gm.graph.nodes if n.name == "add")
    gm.graph.move_to_next_iter_before([add], add)


def test_another_graph_does_not_lift_the_end_of_moving():
    gm = IterGraphModule(module())
    gm.finalize_setup()
    gm.graph = gm.graph
    with pytest.raises(DeferralError, match="movement has been frozen"):
        move(gm)
    with pytest.raises(ValueError, match="mine"):
        outer(gm)
    with pytest.raises(DeferralError, match="movement has been frozen"):
        move(gm)


def test_a_pass_that_fails_does_not_end_moving():
    def finish(gm):
        gm.finalize_setup()
        raise ValueError("mine")

    gm = IterGraphModule(module())
    with pytest.raises(ValueError, match="mine"):
        run_any(gm, finish)
    assert not gm.graph.is_frozen


def test_one_node_where_nodes_are_taken():
    gm = IterGraphModule(module())
    node = next(n for n in gm.graph.nodes if n.name == "add")
    with pytest.raises(UsageError) as caught:
        split_optimizer(gm, node)
    assert str(caught.value) == (
        "split_optimizer(gradients=add): one node where nodes are taken. Pass a list of "
        "nodes of the graph: [add]."
    )


@pytest.mark.parametrize("is_declared", [False, True])
def test_another_module_that_a_pass_returns_is_told(is_declared):
    def elsewhere(gm):
        return fx.GraphModule(gm.main_gm, copy_graph(gm.graph)[0])

    elsewhere = (
        graph_optimization_pass(prerequisites=[], apply_after=[])(elsewhere)
        if is_declared
        else elsewhere
    )
    transformation = GraphModuleTransformation(passes=[inner, elsewhere])
    with pytest.warns(PassWarning) as caught:
        transformation(module())
    assert [str(each.message) for each in caught] == [
        "elsewhere returned another module than it got, which is ignored. A pass edits "
        "the module that it is called with, or raises."
    ]


def test_the_module_that_a_pass_got_may_be_returned(recwarn):
    def same(gm):
        insert_alias(gm)
        return gm

    def main(gm):
        insert_alias(gm)
        return gm.main_gm

    GraphModuleTransformation(passes=[same, main])(module())
    assert not [each for each in recwarn if each.category is PassWarning]
