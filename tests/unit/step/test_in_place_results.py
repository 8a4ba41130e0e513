"""Results keep memory of their own: neither an edit nor a write in place takes it."""

import functools

import pytest
import torch
from edit_graphs import GraphBuilder, aten
from torch import fx, nn

from torchspmd.errors import LegalityError, PassWarning
from torchspmd.step.deferral.forms import PENDING_KEY
from torchspmd.step.deferral.module import Marks
from torchspmd.step.graph.memory import ROLE_KEY
from torchspmd.step.graph.metadata import (
    OutputKind,
    OutputRole,
    set_roles,
    written_state,
)
from torchspmd.step.graph.snapshot import copy_graph
from torchspmd.step.legality.check import check_edit
from torchspmd.step.lower.deferred_in_place import write_pending_in_place
from torchspmd.step.lower.in_place import compute_in_place, mark_returned
from torchspmd.step.passes import remove_copy_from_optimizer

pytestmark = pytest.mark.unit

STATE, RESULT = OutputRole(OutputKind.STATE, 0), OutputRole(OutputKind.RESULT)
GRADIENT, CREATED = OutputRole(OutputKind.GRADIENT), OutputRole(OutputKind.CREATED)
RULE = "Keep the copy: a write into one of them would change the other."


class Step:
    """The state ``x`` becomes ``x + y``; ``returned`` of the parts is handed out."""

    def __init__(self, returned, role=RESULT, *, copied=True):
        self.builder = b = GraphBuilder()
        self.graph = b.graph
        self.x, self.y = b.input("x", 4), b.input("y", 4)
        self.new = b.call(aten.add.Tensor, self.x, self.y)
        part = b.call(aten.slice.Tensor, self.new, 0, 0, 2)
        parts = {"new": self.new, "part": part, "old": self.x, "input": self.y}
        self.bare = parts[returned]
        self.result = b.call(aten.clone.default, self.bare) if copied else self.bare
        self.graph.output([self.new, self.result])
        set_roles(self.graph, [STATE, role])

    def drop(self):
        self.graph.output_node().args = ([self.new, self.bare],)
        if self.result is not self.bare:
            self.graph.erase_node(self.result)

    def checked(self):
        before, twins = copy_graph(self.graph)
        self.drop()
        return str(check_edit(before, self.graph, twins))

    def run(self):
        """The report, the state, what was handed out, and what should have been."""
        before = fx.GraphModule(nn.Module(), copy_graph(self.graph)[0])
        report = compute_in_place(self.graph, {self.new: self.x})
        inputs = [torch.arange(4.0), torch.ones(4)]
        expected = before(*[each.clone() for each in inputs])[1].clone()
        state, result = fx.GraphModule(nn.Module(), self.graph)(*inputs)
        assert torch.equal(result, expected)
        return report, state, result, inputs


def lies_in(one, other):
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@pytest.mark.parametrize("returned", ["new", "part", "old", "input"])
@pytest.mark.parametrize(
    "role", [RESULT, GRADIENT, CREATED], ids=lambda r: r.kind.value
)
def test_a_copy_that_an_edit_dropped_is_made_again(returned, role):
    step = Step(returned, role)
    mark_returned(step.graph)
    step.drop()
    report, state, result, inputs = step.run()
    assert not any(lies_in(result, each) for each in inputs)
    if returned != "old":  # which must be there until the end
        assert report.num_in_place == 1 and lies_in(state, inputs[0])


@pytest.mark.parametrize("returned", ["new", "part", "input"])
def test_what_the_step_itself_hands_out_stays(returned):
    step = Step(returned, copied=False)
    mark_returned(step.graph)
    report, _, result, inputs = step.run()
    assert report.num_in_place == 1
    assert lies_in(result, inputs[returned == "input"])
    assert aten.clone.default not in {node.target for node in step.graph.nodes}


def test_a_copy_with_all_that_is_written_on_its_input_is_enough():
    step = Step("input")
    mark_returned(step.graph)
    step.result.meta = {**step.y.meta}
    step.run()
    targets = [node.target for node in step.graph.nodes]
    assert targets.count(aten.clone.default) == 1


def test_a_value_that_is_copied_into_its_state():
    b = GraphBuilder()
    x, y = b.input("x", 4), b.input("y", 4)
    new = b.call(aten.neg.default, y)  # does not begin at the old value
    result = b.call(aten.clone.default, new)
    b.graph.output([new, result])
    set_roles(b.graph, [STATE, RESULT])
    mark_returned(b.graph)
    b.graph.output_node().args = ([new, new],)
    assert len(compute_in_place(b.graph, {new: x}).copied) == 1
    inputs = [torch.zeros(4), torch.ones(4)]
    state, result = fx.GraphModule(nn.Module(), b.graph)(*inputs)
    assert state is inputs[0] and not lies_in(state, result)
    assert result.tolist() == state.tolist() == [-1] * 4


def test_a_pending_update_whose_new_value_is_returned():
    step = Step("new")
    mark_returned(step.graph)
    step.drop()
    step.new.meta[PENDING_KEY] = 0
    marks = Marks(functools.partial(print), functools.partial(print))
    for each, name in ((marks.begin, "begin"), (marks.end, "end")):
        each.__name__, each.__module__ = name, __name__
    form = fx.GraphModule(nn.Module(), step.graph)
    running, report = write_pending_in_place(form, marks, {})
    inputs = [torch.zeros(4), torch.ones(4)]
    state, result = running(*inputs)
    assert report.in_place == {0} and state is inputs[0]
    assert not lies_in(state, result) and result.tolist() == [1] * 4


# Edits that take memory of a result are refused.


@pytest.mark.parametrize(
    "role", [RESULT, GRADIENT, CREATED], ids=lambda r: r.kind.value
)
def test_a_state_and_what_is_returned(role):
    with pytest.raises(LegalityError) as caught:
        Step("new", role).checked()
    kind = "" if role is RESULT else f"{role.kind.value} "
    assert (
        f"memory: output 0 (next value of x) and output 1 ({kind}clone_default) now lie "
        f"in the same memory. {RULE}"
    ) in str(caught.value)


def test_a_state_and_a_part_of_it():
    text = r"output 0 \(next value of x\) and output 1 \(clone_default\) now lie in"
    with pytest.raises(LegalityError, match=text):
        Step("part").checked()


def test_an_input_that_nobody_writes():
    step = Step("input")
    step.y.meta[ROLE_KEY] = "buffer"  # as capture writes on all of them
    with pytest.raises(LegalityError) as caught:
        step.checked()
    assert (
        "memory: output 1 (y) now lies in the memory of y, which belongs to the caller. "
        f"{RULE}"
    ) in str(caught.value)


@pytest.mark.parametrize("returned", ["new", "part", "old", "input"])
def test_what_was_so_before_may_stay(returned):
    step = Step(returned, copied=False)
    with step.graph.inserting_before(step.graph.output_node()):
        step.builder.call(aten.neg.default, step.y)  # which is removed
    before, twins = copy_graph(step.graph)
    step.graph.eliminate_dead_code()
    assert str(check_edit(before, step.graph, twins)) == "proved equal"


def test_two_states_may_share_and_a_number_is_no_memory():
    b = GraphBuilder()
    x, y = b.input("x", 4), b.input("y", 4)
    number = b.graph.placeholder("number")
    number.meta["val"] = 2.0
    new = b.call(aten.add.Tensor, x, y)
    copies = [b.call(aten.copy.default, place, new) for place in (x, y)]
    b.graph.output([*copies, number])
    set_roles(b.graph, [STATE, OutputRole(OutputKind.STATE, 1), RESULT])
    before, twins = copy_graph(b.graph)
    b.graph.output_node().args = ([new, new, number],)
    assert str(check_edit(before, b.graph, twins)) == "proved equal"


# The pass that removes copies leaves those that keep results apart.


def copying(outputs):
    """Two states get copies of one value; ``outputs`` says what else is handed out."""
    b = GraphBuilder()
    x, y = b.input("x", 4), b.input("y", 4)
    new = b.call(aten.add.Tensor, x, y)
    known = {"new": new}
    known["x"], known["y"] = (b.call(aten.copy.default, p, new) for p in (x, y))
    known["view"] = b.call(aten.slice.Tensor, new, 0, 0, 2)
    b.graph.output([known["x"], known["y"], *(known[name] for name in outputs)])
    roles = [STATE, OutputRole(OutputKind.STATE, 1), *[RESULT for _ in outputs]]
    set_roles(b.graph, roles)
    gm = fx.GraphModule(nn.Module(), b.graph)
    assert len(written_state(gm.graph)) == 2
    return remove_copy_from_optimizer(gm).outcome


@pytest.mark.parametrize("returned", ["new", "view"])
def test_a_value_that_is_returned_is_copied(returned):
    with pytest.warns(PassWarning, match="add_tensor for x is handed out by the step"):
        outcome = copying([returned])
    assert (outcome.matched, outcome.changed) == (2, 0)
    assert outcome.refused == tuple(
        f"add_tensor for {state} is handed out by the step (output 2, a result), which "
        "must not be the memory of a state"
        for state in ("x", "y")
    )


@pytest.mark.parametrize(("returned", "left"), [("x", "y"), ("y", "y")])
def test_a_state_that_is_returned_has_its_own_memory(returned, left):
    outcome = copying([returned])
    assert outcome.changed == 1
    (line,) = outcome.refused
    assert line.startswith(f"add_tensor for {left} is handed out by the step")


def test_copies_that_nothing_else_needs_go():
    outcome = copying([])
    assert (outcome.changed, outcome.refused) == (2, ())
