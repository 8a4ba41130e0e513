"""What surrounds a pass: transaction, report, warning, order, observers."""

import pytest
import torch
from torch import fx

from torchspmd.errors import LegalityError, PassOrderError, PassWarning
from torchspmd.step import (
    GraphModuleTransformation,
    IterGraphModule,
    graph_optimization_pass,
    pass_reports,
)
from torchspmd.step.graph.reports import Outcome
from torchspmd.step.passes.runner import observing_passes, run_any


def module():
    return fx.symbolic_trace(lambda x: torch.relu(x) + 1)


@graph_optimization_pass(prerequisites=[], apply_after=[])
def add_noise(gm):
    """Adds a node that is used, and then fails."""
    relu = next(n for n in gm.graph.nodes if n.target is torch.relu)
    with gm.graph.inserting_after(relu):
        noise = gm.graph.call_function(torch.neg, (relu,))
    relu.replace_all_uses_with(noise, lambda user: user is not noise)
    raise RuntimeError("half-way")


@graph_optimization_pass(prerequisites=[], apply_after=[])
def do_nothing(gm):
    return Outcome(matched=3, changed=0, refused=("all three are alone",))


@graph_optimization_pass(prerequisites=[], apply_after=[], repeatable=False)
def add_dead_code(gm):
    x = next(iter(gm.graph.nodes))
    with gm.graph.inserting_after(x):
        gm.graph.call_function(torch.abs, (x,))
    return Outcome(matched=1, changed=1)


@graph_optimization_pass(prerequisites=[], apply_after=[])
def drop_the_output(gm):
    output = gm.graph.output_node()
    output.args = (output.args[0].args[0],)


@pytest.mark.parametrize("make", [module, lambda: IterGraphModule(module())])
def test_a_pass_that_fails_leaves_the_graph_as_it_was(make):
    gm = make()
    before = [(node.name, str(node.args)) for node in gm.graph.nodes]
    with pytest.raises(RuntimeError, match="half-way"):
        add_noise(gm)
    assert [(node.name, str(node.args)) for node in gm.graph.nodes] == before
    assert gm(torch.tensor([-1.0, 2.0])).tolist() == [1.0, 3.0]
    assert pass_reports(gm) == ()


def test_an_illegal_edit_is_not_taken():
    gm = module()
    with pytest.raises(LegalityError, match="output"):
        drop_the_output(gm)
    assert gm(torch.tensor([-1.0, 2.0])).tolist() == [1.0, 3.0]


@pytest.mark.parametrize("make", [module, lambda: IterGraphModule(module())])
def test_a_value_that_is_used_before_it_is_made(make):
    def turn_round(gm):
        relu = next(n for n in gm.graph.nodes if n.target is torch.relu)
        next(iter(relu.users)).append(relu)

    gm = make()
    with pytest.raises(LegalityError, match="add uses relu, which comes later"):
        run_any(gm, turn_round)
    assert gm(torch.tensor([-1.0, 2.0])).tolist() == [1.0, 3.0]


def test_a_pass_that_changes_nothing_says_so():
    with pytest.warns(PassWarning, match="do_nothing changed nothing: all three are"):
        do_nothing(module())


def test_reports_are_kept_and_observed():
    gm = module()
    seen = []
    with observing_passes(lambda report, before, after: seen.append(report)):
        do_nothing(gm)
        report = add_dead_code(gm)
    assert tuple(seen) == pass_reports(gm) and seen[1] is report
    assert [each.name for each in pass_reports(gm)] == ["do_nothing", "add_dead_code"]
    assert report.before == report.after  # the dead node was removed
    assert report.as_dict()["outcome"]["changed"] == 1
    assert "left alone: all three are alone" in str(seen[0])


def test_once_is_once():
    gm = module()
    add_dead_code(gm)
    with pytest.raises(PassOrderError, match="Cannot apply add_dead_code twice"):
        add_dead_code(gm)
    add_dead_code(module())  # another graph


def test_a_pass_that_keeps_its_work_to_itself_is_measured():
    @graph_optimization_pass(prerequisites=[], apply_after=[])
    def swap(gm):
        add = next(n for n in gm.graph.nodes if n.name == "add")
        add.args = (add.args[0], add.args[1])

    with pytest.warns(PassWarning, match="swap changed nothing: it found nothing"):
        swap(module())


def test_a_pass_that_fails_takes_its_marks_back():
    @graph_optimization_pass(prerequisites=[], apply_after=[])
    def mark_and_fail(gm):
        gm.graph.regions.append("a mark")
        raise RuntimeError("after the move")

    gm = IterGraphModule(module())
    with pytest.raises(RuntimeError, match="after the move"):
        mark_and_fail(gm)
    assert gm.graph.regions == []


def wrapped(function):
    """The reports of a transformation with this one pass, on a graph of its own."""
    transformation = GraphModuleTransformation(passes=[function])
    gm = transformation(module())
    assert gm(torch.tensor([-1.0, 2.0])).tolist() == [1.0, 3.0]
    return [(r.name, r.outcome.changed) for r in transformation.reports], gm


def keep_a_name(gm):
    """Says in metadata what nothing else can see; then renames a node."""
    next(n for n in gm.graph.nodes if n.name == "add").name = "total"


def test_a_plain_function_is_checked_and_reported_by_its_name():
    reports, gm = wrapped(keep_a_name)
    assert reports == [("keep_a_name", 4)]  # the node and its reader, before and after
    assert [each.name for each in pass_reports(gm)] == ["keep_a_name"]

    def drop(gm):
        output = gm.graph.output_node()
        output.args = (output.args[0].args[0],)

    with pytest.raises(LegalityError, match="drop"):
        wrapped(drop)


def test_a_plain_function_that_changes_nothing_says_so():
    with pytest.warns(
        PassWarning, match=r"none of its passes changed anything \(idle\)"
    ):

        def idle(gm):
            pass

        assert wrapped(idle)[0] == [("idle", 0)]


def test_a_plain_function_that_runs_a_pass_reports_that_and_its_own_edits():
    assert wrapped(add_dead_code)[0] == [("add_dead_code", 1)]

    def both(gm):
        add_dead_code(gm)
        keep_a_name(gm)

    assert wrapped(both)[0] == [("add_dead_code", 1), ("both", 4)]

    def only_the_pass(gm):
        add_dead_code(gm)

    assert wrapped(only_the_pass)[0] == [("add_dead_code", 1)]


def test_edits_before_a_pass_are_seen_even_if_its_report_is_returned():
    def rename_first(gm):
        keep_a_name(gm)
        return add_dead_code(gm)

    assert wrapped(rename_first)[0] == [("add_dead_code", 1), ("rename_first", 4)]

    def drop_first(gm):
        output = gm.graph.output_node()
        output.args = (output.args[0].args[0],)
        return add_dead_code(gm)

    with pytest.raises(LegalityError, match="drop_first"):
        wrapped(drop_first)


def test_a_plain_function_that_fails_takes_back_the_passes_that_it_ran():
    gm = IterGraphModule(module())

    def rename_and_fail(gm):
        add_dead_code(gm)
        keep_a_name(gm)
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        run_any(gm, rename_and_fail)
    assert [node.name for node in gm.graph.nodes] == ["x", "relu", "add", "output"]
    assert pass_reports(gm) == ()


def test_what_a_plain_function_may_have_undone_counts_as_not_applied():
    @graph_optimization_pass(prerequisites=[add_dead_code], apply_after=[])
    def build_on(gm):
        return Outcome(matched=1, changed=1)

    gm = IterGraphModule(module())
    add_dead_code(gm)
    run_any(gm, keep_a_name)
    with pytest.raises(PassOrderError, match="are the prerequisites of build_on"):
        build_on(gm)
