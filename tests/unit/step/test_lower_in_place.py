"""New values in the memory of the old ones: what is converted, what not, the same bits."""

import copy
import functools
import operator
import random

import pytest
import torch
from _memory import MemoryCounter
from edit_graphs import GraphBuilder, aten
from step_models import build, difference
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from training import train_sum

from torchspmd.errors import LegalityError, PassWarning, VerificationError
from torchspmd.step import Verification, compile, run_virtual
from torchspmd.step.deferral import forms
from torchspmd.step.deferral.forms import PENDING_KEY
from torchspmd.step.deferral.iter_graph import IterGraph
from torchspmd.step.deferral.module import IterGraphModule, Marks
from torchspmd.step.graph.memory import ROLE_KEY, predict_peak
from torchspmd.step.graph.metadata import (
    OutputKind,
    OutputRole,
    set_roles,
    written_state,
)
from torchspmd.step.graph.nodes import drop_undone_transposes
from torchspmd.step.graph.snapshot import copy_graph
from torchspmd.step.legality.check import check_edit
from torchspmd.step.lower.in_place import (
    compute_in_place,
    mark_returned,
    write_for_compiler,
)
from torchspmd.step.lower.pending_in_place import write_pending_in_place
from torchspmd.step.passes import remove_copy_from_optimizer
from torchspmd.step.virtual.ranks import lay_out
from torchspmd.step.virtual.run import Inputs, without_marks
from torchspmd.step.virtual.verify import Verifier


class Build:
    """A graph whose nodes know their fake values."""

    def __init__(self):
        self.graph, self.mode = fx.Graph(), FakeTensorMode()

    def input(self, *shape):
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        with self.mode:
            node.meta["val"] = torch.empty(shape)
        return node

    def call(self, target, *args, **kwargs):
        node = self.graph.call_function(target, args, kwargs)
        with self.mode:
            values = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def finish(self, outputs, written):
        """The report, and whether the edited graph gives the same values."""
        self.graph.output(outputs)
        before = fx.GraphModule(nn.Module(), copy.deepcopy(self.graph))
        report = compute_in_place(self.graph, written)
        after = fx.GraphModule(nn.Module(), self.graph)
        torch.manual_seed(0)
        inputs = [
            torch.randn(node.meta["val"].shape)
            for node in self.graph.find_nodes(op="placeholder")
        ]
        expected = before(*[each.clone() for each in inputs])
        given = [each.clone() for each in inputs]
        got = after(*given)
        places = list(self.graph.find_nodes(op="placeholder"))
        touched = [place for place in written.values() if place in places]
        for place, old, new in zip(places, inputs, given, strict=True):
            if place not in touched:
                assert torch.equal(old, new), f"{place} was written"
        assert all(map(torch.equal, got, expected))
        names = [str(node.target) for node in self.graph.nodes]
        return report, names


def test_a_chain_of_elementwise_operators():
    b = Build()
    p, g = b.input(4, 3), b.input(4, 3)
    v = b.call(aten.addcmul.default, b.call(aten.mul.Tensor, p, 0.9), g, g, value=0.1)
    report, names = b.finish([v], {v: p})
    assert (report.num_in_place, report.copied, report.left) == (1, (), ())
    assert "aten.mul_.Tensor" in names and "aten.addcmul_.default" in names
    assert str(report).startswith("new values: 1 computed in place")


def test_an_old_value_that_is_read_later_through_a_view():
    b = Build()
    p, g = b.input(4, 4), b.input(4, 4)
    view = b.call(aten.t.default, p)
    v = b.call(aten.add.Tensor, p, g)
    late = b.call(aten.mm.default, view, g)
    report, names = b.finish([v, late], {v: p})
    assert report.num_in_place == 0
    assert report.copied == (("x0", "x0 is read later"),)
    assert names.index("aten.copy_.default") > names.index("aten.mm.default")


def test_an_old_value_that_is_returned():
    b = Build()
    p, g = b.input(3), b.input(3)
    v = b.call(aten.add.Tensor, p, g)
    report, _ = b.finish([v, p], {v: p})
    assert report.left == (("x0", "its old value is returned"),)


def test_two_states_that_change_places():
    b = Build()
    p, q = b.input(3), b.input(3)
    report, _ = b.finish([q, p], {q: p, p: q})
    assert [reason for _, reason in report.left] == [
        "its new value is another input, or a constant"
    ] * 2


def test_a_chain_that_is_not_the_inputs_own():
    b = Build()
    p, q = b.input(3), b.input(3)
    v = b.call(aten.add.Tensor, q, p)  # begins at q, which nobody writes
    report, _ = b.finish([v], {v: p})
    (reason,) = [reason for _, reason in report.copied]
    assert "does not begin at its old value" in reason


def test_shapes_dtypes_and_arguments_that_forbid_it():
    b = Build()
    p = b.input(3, 3)
    turned = b.call(aten.add.Tensor, p, b.call(aten.t.default, p))
    report, _ = b.finish([turned], {turned: p})
    assert report.copied[0][1] == "x0 is read through another argument too"
    b = Build()
    p, g = b.input(1, 3), b.input(4, 3)
    wide = b.call(aten.mul.Tensor, b.call(aten.expand.default, p, [4, 3]), 2.0)
    report, _ = b.finish([b.call(aten.add.Tensor, wide, g)], {})
    assert report.num_temporaries == 1  # not on what is expanded


def test_lists_all_or_none():
    b = Build()
    p, q, g = b.input(3), b.input(3), b.input(3)
    new = b.call(aten._foreach_add.List, [p, q], [g, g])
    values = [b.call(operator.getitem, new, n) for n in range(2)]
    report, names = b.finish(values, {values[0]: p, values[1]: q})
    assert report.num_in_place == 2 and "aten._foreach_add_.List" in names
    b = Build()
    p, q, g = b.input(3), b.input(3), b.input(3)
    new = b.call(aten._foreach_add.List, [p, q], [g, p])  # p is read for q's value
    values = [b.call(operator.getitem, new, n) for n in range(2)]
    report, names = b.finish(values, {values[0]: p, values[1]: q})
    assert report.num_in_place == 0 and len(report.copied) == 2


def draw(seed):
    """A graph of elementwise operators and views with two states."""
    rng, b = random.Random(seed), Build()
    inputs = [b.input(3, 3) for _ in range(3)]
    values = list(inputs)
    for _ in range(rng.randint(3, 12)):
        x, y = rng.choices(values, k=2)
        kind = rng.choice(["add", "mul", "relu", "t", "view", "lerp", "mm", "where"])
        if kind in ("add", "mul"):
            values.append(b.call(getattr(aten, kind).Tensor, x, y))
        elif kind == "relu":
            values.append(b.call(aten.relu.default, x))
        elif kind == "t":
            values.append(b.call(aten.t.default, x))
        elif kind == "view":
            values.append(b.call(aten.slice.Tensor, x, 0, 0, 3))
        elif kind == "lerp":
            values.append(b.call(aten.lerp.Scalar, x, y, 0.3))
        elif kind == "mm":
            values.append(b.call(aten.mm.default, x, y))
        else:
            below = b.call(aten.gt.Tensor, x, y)
            values.append(b.call(aten.where.self, below, x, y))
    ends = rng.sample(values[3:], 2)
    extra = rng.choices(values, k=rng.randint(0, 2))
    return b, [*ends, *extra], dict(zip(ends, inputs, strict=False))


def test_drawn_graphs_keep_their_values():
    converted = 0
    for seed in range(300):
        b, outputs, written = draw(seed)
        report, _ = b.finish(outputs, written)
        converted += report.num_in_place
    assert converted > 20


def test_swapped_buffers_are_written_back_right():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("one", torch.zeros(2))
            self.register_buffer("two", torch.ones(2))

        def forward(self, x):
            self.one, self.two = self.two, self.one
            return x + self.one

    model = Pair()
    step = compile(lambda model, x: model(x))
    step(model, torch.zeros(2))
    assert model.one.tolist() == [1, 1] and model.two.tolist() == [0, 0]


@pytest.mark.parametrize("optimizer", ["momentum", "adam_foreach", "adamw_fused"])
def test_states_of_a_step_are_written_in_place(optimizer):
    def train(model, optim, batch):
        optim.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optim.step()
        return loss.detach()

    ours, reference = build("mlp", optimizer)
    step = compile(train)
    for _ in range(3):
        batch = torch.randn(6, 8)
        step(*ours, batch)
        train(*reference, batch)
    assert difference(ours, reference) == 0.0
    program = step.programs[-1]
    assert program.in_place.num_in_place >= 8 and program.in_place.left == ()
    assert "computed in place" in step.explain() and "memory: " in step.explain()
    counters = []
    for function, (model, optim) in ((train, reference), (step, ours)):
        states = [t for s in optim.state.values() for t in s.values()]
        held = [p.grad for p in model.parameters()]
        batch = torch.randn(6, 8)
        counters.append(MemoryCounter([*model.parameters(), *states, *held, batch]))
        del held  # the step replaces the gradients: nothing may keep the old ones
        with counters[-1]:
            function(model, optim, batch)
    eager, compiled = (counter.peak_bytes for counter in counters)
    assert compiled <= 1.03 * eager
    assert program.peak_memory.total_bytes == compiled
    assert program.peak_memory.alive["parameter"] == 4 * sum(
        p.numel() for p in ours[0].parameters()
    )


def test_a_returned_state_is_the_users_own_memory():
    def train(model, optim, batch):
        model(batch).sum().backward()
        optim.step()
        optim.zero_grad()
        return model[0].weight, model[0].weight.clone(), model[0].bias.detach() + 0.0

    ours, reference = build("mlp", "momentum")
    step = compile(train)
    for _ in range(2):
        batch = torch.randn(6, 8)
        got, expected = step(*ours, batch), train(*reference, batch)
        assert all(map(torch.equal, got, expected))
    assert got[0].data_ptr() == ours[0][0].weight.data_ptr()
    assert got[1].data_ptr() != got[0].data_ptr()
    assert not any(each.requires_grad for each in got)


def test_an_average_that_follows_the_updated_weights():
    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4, 4))

        def forward(self, x):
            return self.linear(x)

    def train(model, optim, batch):
        model(batch).square().sum().backward()
        optim.step()
        optim.zero_grad()
        with torch.no_grad():
            model.mean.lerp_(model.linear.weight, 0.1)
            return (model.mean @ model.mean.t()).sum()

    torch.manual_seed(0)
    ours, reference = (Averaged() for _ in range(2))
    reference.load_state_dict(ours.state_dict())
    optims = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (ours, reference)]
    step = compile(train)
    for _ in range(3):
        batch = torch.randn(2, 4)
        got = step(ours, optims[0], batch)
        assert torch.equal(got, train(reference, optims[1], batch))
    assert torch.equal(ours.mean, reference.mean)
    assert step.programs[0].in_place.num_in_place == 3


def test_without_it_a_step_needs_more():
    def own_callable(gm):
        return gm.forward  # a callable, but not a graph

    peaks = {}
    for name, transformation in (("in place", None), ("functional", own_callable)):
        model = nn.Linear(64, 64)
        optim = torch.optim.Adam(model.parameters(), fused=True)
        step = compile(train_sum, gm_transformation=transformation)
        for _ in range(2):
            step(model, optim, torch.ones(2, 64))
        states = [t for s in optim.state.values() for t in s.values()]
        counter = MemoryCounter([*model.parameters(), *states])
        with counter:
            step(model, optim, torch.ones(2, 64))
        peaks[name] = counter.peak_bytes
    assert peaks["functional"] > 1.5 * peaks["in place"]
    assert step.programs[-1].peak_memory is None  # the callable is not a graph


def test_a_prediction_by_hand():
    b = Build()
    x = b.input(256)
    y = b.call(aten.add.Tensor, x, 1.0)
    z = b.call(aten.mm.default, *[b.call(aten.view.default, y, [16, 16])] * 2)
    b.graph.output([b.call(aten.sum.default, z)])
    peak = predict_peak(b.graph)
    assert peak.total_bytes == 3 * 1024
    assert peak.node == "mm_default"
    assert dict(peak.alive) == {"input": 1024, "activation": 2048}
    assert predict_peak(b.graph, frozenset({0})).total_bytes == 2 * 1024


# ----------------------------------------------------------------------------
# Results keep memory of their own: neither an edit nor a write in place takes it.


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


# ----------------------------------------------------------------------------
# States whose elements do not lie side by side: a new value is read as it is held.
#
# ``as_strided`` reads what the strides say, so that its values tell the layout; a matrix
# product only chooses its kernel by them, and differs in the last bits.


MOVED = "work moved to the next iteration (regions: 1)"


def spread():
    return torch.arange(16.0).reshape(2, 8)[:, ::2]


def iteration():
    """`w` is read by its strides, then `w -= g`, where `g` comes of what was read."""
    graph = fx.Graph()
    w, x = graph.placeholder("w"), graph.placeholder("x")
    read = graph.call_function(aten.as_strided.default, (w, [4], [2]))
    g = graph.call_function(aten.mul.Tensor, (read, x))
    new = graph.call_function(aten.sub.Tensor, (w, g))
    for node, value in zip(
        graph.nodes,
        (spread(), torch.ones(4), torch.ones(4), torch.ones(4), torch.ones(2, 4)),
        strict=True,
    ):
        node.meta["val"] = value
    read.meta["val"] = aten.as_strided.default(w.meta["val"], [4], [2])
    graph.output([new, g])
    set_roles(graph, [OutputRole(OutputKind.STATE, 0), OutputRole(OutputKind.RESULT)])
    module = IterGraphModule(fx.GraphModule({}, graph))
    moved = {node.name: node for node in module.graph.nodes}
    module.graph.move_to_next_iter_before([moved[new.name]], moved[read.name])
    return module


def call():
    return [spread(), torch.tensor([1.0, 0.5, 2.0, 3.0])]


def verifier(module):
    return Verifier("step", module.main_gm, call(), Verification())


def steady_in_place(module, marks):
    derived = forms.derive(module.graph, module.graph.regions)
    form = fx.GraphModule({}, derived.steady.graph)
    return write_pending_in_place(form, marks, {})


def test_what_was_pending_is_read_in_the_layout_of_its_state():
    module = iteration()
    assert isinstance(module.graph, IterGraph)
    module.finalize_setup()
    state, x = call()
    expected, _ = call()
    for step in range(4):
        read = expected.as_strided([4], [2]) * x
        expected.sub_(read)
        new, found = module(state, x, last_iter=step == 3)
        assert torch.equal(found, read)
        if new is not None:
            state.copy_(new)
    assert torch.equal(state, expected)


def test_the_pending_update_is_still_made_in_place():
    running, report = steady_in_place(iteration(), Marks(print, repr))
    assert report.in_place == {0} and not report.left
    (copy,) = running.graph.find_nodes(op="call_function", target=aten.copy_.default)
    (read,) = running.graph.find_nodes(
        op="call_function", target=aten.as_strided.default
    )
    assert copy.args[0] is read.args[0] and read.args[0].name == "w"


def test_a_form_that_reads_another_layout_is_found(monkeypatch):
    module = iteration()
    checking = verifier(module)
    checking.compare_pipelined(module.graph)
    assert [(check.what, check.result) for check in checking.checks] == [
        (MOVED, "equal bits")
    ]
    monkeypatch.setattr(forms, "_same_layout", lambda held, fresh: True)
    with pytest.raises(VerificationError) as caught:
        checking.compare_pipelined(module.graph)
    assert f"{MOVED} changed what 4 steps compute" in str(caught.value)


def test_the_form_that_is_run_is_compared():
    module, marks = iteration(), Marks(print, repr)
    running, _ = steady_in_place(module, marks)
    steady = without_marks(running.graph, marks)
    assert len(running.graph.nodes) == len(steady.nodes) + 2
    checking = verifier(module)
    checking.compare_pipelined(module.graph, {"steady": steady})
    what = f"{MOVED}, steady form in place"
    assert [check.what for check in checking.checks] == [MOVED, what]
    (update,) = steady.find_nodes(op="call_function", target=aten.copy_.default)
    steady.erase_node(update)  # the state keeps its old value
    with pytest.raises(VerificationError) as caught:
        checking.compare_pipelined(module.graph, {"steady": steady})
    assert f"{what} changed what 4 steps compute" in str(caught.value)


def test_virtual_steps_keep_the_layout_of_states():
    graph = iteration().graph
    found = run_virtual(graph, 1, steps=3, inputs=lambda step, rank: call())
    expected, x = call()
    for outputs in found.outputs:
        read = expected.as_strided([4], [2]) * x
        expected.sub_(read)
        assert torch.equal(outputs[0][1], read)
    assert found.inputs[0][0].stride() == (8, 2)


def test_inputs_of_virtual_ranks_are_laid_out_as_those_of_the_call():
    graph = iteration().graph
    given = [spread(), torch.arange(8.0)[::2]]
    inputs = Inputs(graph, lay_out(graph, 2), given)
    for rank in range(2):
        found = inputs.at(0, rank)
        assert [each.stride() for each in found] == [(8, 2), (2,)]
        assert torch.equal(found[0], given[0]) and found[0] is not given[0]
    expanded = [spread(), torch.ones(1).expand(4)]
    assert Inputs(graph, lay_out(graph, 1), expanded).at(0, 0)[1].tolist() == [1.0] * 4


def test_operators_whose_arguments_have_no_shape_are_left_to_the_compiler():
    build = Build()
    step, more = build.input(1), build.input(1)
    added = build.call(aten._foreach_add.List, [step], [more])
    new = build.call(operator.getitem, added, 0)
    build.graph.output([new])
    set_roles(build.graph, [OutputRole(OutputKind.STATE, 0)])
    graph = fx.GraphModule({}, build.graph)
    assert write_for_compiler(graph)[1].num_in_place == 1
    del more.meta["val"]
    assert write_for_compiler(graph)[1].num_in_place == 0


@pytest.mark.parametrize(
    ("name", "one", "other", "is_dropped"),
    [
        ("t.default", (), (), True),
        ("transpose.int", (0, 1), (0, 1), True),
        ("transpose.int", (0, 1), (1, 0), True),
        ("transpose.int", (0, 2), (0, 1), False),
        ("transpose.int", {"dim0": 0, "dim1": 2}, {"dim0": 0, "dim1": 1}, False),
    ],
)
@pytest.mark.parametrize("is_output", [False, True])
def test_only_transposes_that_are_undone_are_dropped(
    name, one, other, is_dropped, is_output
):
    shape = (2, 3) if name == "t.default" else (2, 3, 4)
    target = functools.reduce(getattr, name.split("."), torch.ops.aten)
    graph = fx.Graph()
    x = value = graph.placeholder("x")
    for dims in (one, other):
        given = (dims, {}) if isinstance(dims, tuple) else ((), dims)
        value = graph.call_function(target, (value, *given[0]), given[1])
    doubled = graph.call_function(torch.ops.aten.mul.Tensor, (value, 2))
    graph.output([doubled, value] if is_output else [doubled])
    given = torch.randn(shape)
    before = fx.GraphModule({}, graph)(given)
    drop_undone_transposes(graph)
    after = fx.GraphModule({}, graph)(given)
    assert all(map(torch.equal, before, after))
    assert [each.stride() for each in before] == [each.stride() for each in after]
    assert (x in doubled.all_input_nodes) is (is_dropped and not is_output)
    assert len(graph.nodes) == (3 if x in doubled.all_input_nodes else 5)
