"""Whether nodes may wait for the next iteration: asked at the move and after edits."""

import pytest
import torch
from torch import fx, nn

from torchspmd.errors import DeferralError
from torchspmd.step import IterGraphModule, pass_reports
from torchspmd.step.graph.memory import ROLE_KEY
from torchspmd.step.graph.metadata import (
    OutputKind,
    OutputRole,
    mark_guarded,
    set_roles,
)
from torchspmd.step.passes.runner import run_any

aten = torch.ops.aten


def call(graph, name, target, *args):
    return known(graph.create_node("call_function", target, args, name=name))


def known(node):
    """With a value, as captured graphs have it: or nothing can be proved of an edit."""
    node.meta["val"] = torch.empty(2)
    return node


def clone_of(gm, source):
    return known(gm.graph.call_function(aten.clone.default, (source,)))


def iteration():
    """One weight, read behind the first node, and its update; nothing is moved yet."""
    graph = fx.Graph()
    weight, data = (known(graph.placeholder(name)) for name in ("weight", "data"))
    negated = call(graph, "negated", aten.neg.default, data)
    size = call(graph, "size", aten.abs.default, weight)
    result = call(graph, "result", aten.mul.Tensor, negated, size)
    step = call(graph, "step", aten.sin.default, result)
    update = call(graph, "update", aten.sub.Tensor, weight, step)
    graph.output([update, result])
    set_roles(graph, [OutputRole(OutputKind.STATE, 0), OutputRole(OutputKind.RESULT)])
    return IterGraphModule(fx.GraphModule(nn.Module(), graph))


def move(gm):
    moved = [node(gm, "step"), node(gm, "update")]
    gm.graph.move_to_next_iter_before(moved, node(gm, "negated"), strict=True)
    return gm


def module():
    return move(iteration())


def node(gm, name):
    return next(each for each in gm.graph.nodes if each.name == name)


def move_read(gm):
    node(gm, "negated").prepend(node(gm, "size"))


def early_read(gm):
    with gm.graph.inserting_before(node(gm, "negated")):
        copy = clone_of(gm, node(gm, "weight"))
    node(gm, "size").args = (copy,)


def move_place(gm):
    node(gm, "size").append(node(gm, "negated"))


def use_moved(gm):
    update, output = node(gm, "update"), gm.graph.output_node()
    with gm.graph.inserting_before(output):
        copy = clone_of(gm, update)
    output.args = ([copy, output.args[0][1]],)


def return_moved(gm):
    gm.graph.output_node().args = ([node(gm, "update")] * 2,)


def draw(gm):
    node(gm, "step").target = aten.rand_like.default


def guard(gm):
    mark_guarded(gm.graph, [0])


def pass_as_argument(gm):
    node(gm, "weight").meta[ROLE_KEY] = "input"


def replace_moved(gm):
    step = node(gm, "step")
    with gm.graph.inserting_after(step):
        other = known(gm.graph.call_function(step.target, step.args))
    step.replace_all_uses_with(other)


STALE = (
    " reads weight in front of negated, where step, update of the iteration before write "
    "it: it would read the old value"
)
LATE = "cannot run before negated of the next iteration: "

# What each edit breaks, as it is told after the edit, and where the move comes last.
EDITS = {
    move_read: (f"size{STALE}", f"{LATE}size reads a state"),
    early_read: (f"clone_default{STALE}", f"{LATE}clone_default reads a state"),
    move_place: (f"size{STALE}", f"{LATE}size reads a state"),
    use_moved: ("update is used in this iteration by clone_default (",) * 2,
    return_moved: ("update is returned by the step (output 1), but is moved",) * 2,
    draw: ("step draws random numbers (",) * 2,
    guard: ("weight decides which graph the next step runs, so it cannot wait",) * 2,
    pass_as_argument: ("weight is an argument of the step: the caller may",) * 2,
}
KEEPS_RESULTS = [move_read, early_read, move_place, use_moved]  # or no pass may do it


def facts(gm):
    return [(each.name, str(each.args)) for each in gm.graph.nodes], gm.graph.regions


@pytest.mark.parametrize("edit", EDITS)
def test_the_move_is_refused_where_the_edit_came_first(edit):
    gm = iteration()
    edit(gm)
    with pytest.raises(DeferralError) as caught:
        move(gm)
    assert EDITS[edit][1] in str(caught.value)
    assert gm.graph.regions == []


@pytest.mark.parametrize("edit", KEEPS_RESULTS)
def test_an_edit_that_breaks_a_move_is_refused_and_undone(edit):
    gm = module()
    before = facts(gm)
    with pytest.raises(DeferralError) as caught:
        run_any(gm, edit)
    text = str(caught.value)
    assert text.startswith(
        f"{edit.__name__} would break work that is moved to the next iteration, and was "
        "not taken; 1 problem:\n  " + EDITS[edit][0]
    )
    assert "Move nodes after all other passes, or leave readers behind" in text
    assert facts(gm) == before
    assert pass_reports(gm) == ()
    gm.finalize_setup()


@pytest.mark.parametrize("edit", EDITS)
def test_edits_outside_of_passes_are_refused_at_the_end(edit):
    gm = module()
    edit(gm)
    with pytest.raises(DeferralError) as caught:
        gm.finalize_setup()
    text = str(caught.value)
    assert text.startswith("IterGraphModule: an edit broke work that was moved to the")
    assert EDITS[edit][0] in text


def test_a_moved_node_that_is_replaced():
    gm = module()
    with pytest.raises(DeferralError) as caught:
        run_any(gm, replace_moved)
    text = str(caught.value)
    assert text.startswith("replace_moved would break work that is moved to the next")
    assert "  step: moved, or the place of what is moved, and gone or replaced" in text
    assert "Move nodes after all other passes" in text
    gm.finalize_setup()


def test_a_place_that_is_replaced():
    def replace_place(gm):
        negated = node(gm, "negated")
        with gm.graph.inserting_after(negated):
            other = known(gm.graph.call_function(negated.target, negated.args))
        negated.replace_all_uses_with(other)

    gm = module()
    with pytest.raises(DeferralError) as caught:
        run_any(gm, replace_place)
    assert "  negated: moved, or the place of what is moved" in str(caught.value)


def test_a_read_behind_the_place_may_move():
    def move_on(gm):
        node(gm, "size").append(node(gm, "result"))
        node(gm, "negated").append(node(gm, "size"))
        with gm.graph.inserting_before(node(gm, "size")):
            copy = clone_of(gm, node(gm, "weight"))
        node(gm, "size").args = (copy,)

    gm, plain = module(), module()
    run_any(gm, move_on)
    weight, data = torch.tensor([0.5, -2.0]), torch.tensor([1.0, 3.0])
    mine, theirs = [weight, data], [weight, data]
    for last in (False, False, True):
        results = []
        for module_, inputs in ((gm, mine), (plain, theirs)):
            new, result = module_(*inputs, last_iter=last)
            inputs[0] = inputs[0] if new is None else new
            results.append(result)
        assert torch.equal(*results)
    assert torch.equal(mine[0], theirs[0])


def two_states():
    """Two weights; the update of the second takes a copy of the first one."""
    graph = fx.Graph()
    one, two, grad = (known(graph.placeholder(name)) for name in ("one", "two", "grad"))
    copy = call(graph, "copy", aten.clone.default, one)
    first = call(graph, "first", aten.sub.Tensor, one, grad)
    second = call(graph, "second", aten.add.Tensor, two, copy)
    third = call(graph, "third", aten.neg.default, grad)
    graph.output([first, second, third, copy])
    states = [OutputRole(OutputKind.STATE, place) for place in range(3)]
    set_roles(graph, [*states, OutputRole(OutputKind.RESULT)])
    return IterGraphModule(fx.GraphModule(nn.Module(), graph))


def test_regions_that_share_a_state():
    shared = (
        "one is changed by one deferred region (first) and read by another (second)"
    )

    def read_directly(gm):
        node(gm, "second").args = (node(gm, "two"), node(gm, "one"))

    def move(gm, name):
        gm.graph.move_to_next_iter_before([node(gm, name)], node(gm, "copy"))

    edited, moved = two_states(), two_states()
    read_directly(edited)
    move(edited, "first")
    with pytest.raises(DeferralError) as at_the_move:
        move(edited, "second")
    for name in ("first", "second"):
        move(moved, name)
    with pytest.raises(DeferralError) as after_the_edit:
        run_any(moved, read_directly)
    assert shared in str(at_the_move.value) and shared in str(after_the_edit.value)


def test_moved_nodes_run_in_their_order_of_now():
    gm = two_states()
    moved = [node(gm, "first"), node(gm, "third")]
    gm.graph.move_to_next_iter_before(moved, node(gm, "copy"))
    node(gm, "first").prepend(node(gm, "third"))
    node(gm, "first").args = (node(gm, "one"), node(gm, "third"))
    gm.finalize_setup()
    made = [each.name for each in gm.forms["flush"].graph.nodes if "th" in each.name]
    assert made == ["third"]  # once


def test_a_place_behind_the_work_itself():
    """Nothing else reads the state; the last iteration makes first what it is pending."""
    gm = two_states()
    gm.graph.move_to_next_iter_before([node(gm, "second")], node(gm, "third"))
    one, two = torch.tensor([1.0, 2.0]), torch.zeros(2)
    for last in (False, False, True):
        _, second, *_ = gm(one, two, one, last_iter=last)
        two = two if second is None else second
    assert two.tolist() == [3.0, 6.0]
