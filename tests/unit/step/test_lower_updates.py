"""Updates as one call, for a compiler that must not copy their states."""

import functools
import operator

import pytest
import torch
from torch import fx, nn
from torch._inductor.utils import run_and_get_code

from torchspmd import _torch
from torchspmd.errors import CaptureError
from torchspmd.step import GraphModuleTransformation, IterGraphModule, compile
from torchspmd.step.deferral.forms import CARRIED_KEY, PENDING_KEY
from torchspmd.step.deferral.module import Marks
from torchspmd.step.graph.inductor import lower
from torchspmd.step.graph.metadata import OutputKind, OutputRole, set_roles
from torchspmd.step.lower import update_calls
from torchspmd.step.lower.deferred_in_place import find_spare, write_pending_in_place
from torchspmd.step.lower.update_calls import NOT_PENDING, make_one_call, noting

pytestmark = pytest.mark.unit

aten = torch.ops.aten


def graph_of(*extra):
    """``weight.add_(gradient); weight.mul_(2)``, and nodes before or behind it."""
    graph = fx.Graph()
    names = ("weight", "gradient")
    weight, gradient = nodes = [graph.placeholder(name) for name in names]
    for node in nodes:
        node.meta["val"] = torch.empty(4, device="meta")
    before = [graph.call_function(target, (weight,)) for target in extra]
    for node in before:
        node.meta["val"] = torch.empty(4, device="meta")
    reads = before[0] if before else gradient
    update = [
        graph.call_function(aten.add_.Tensor, (weight, reads)),
        graph.call_function(aten.mul_.Tensor, (weight, 2)),
    ]
    graph.output((weight,))
    return graph, update


def run(graph, *values):
    return fx.GraphModule({}, graph)(*values)


def test_neighbours_become_one_call_that_does_the_same():
    graph, update = graph_of()
    assert make_one_call(graph, update, NOT_PENDING) is None
    graph.lint()
    (call,) = (node for node in graph.nodes if node.op == "call_function")
    assert [node.name for node in call.args[2]] == ["weight"]
    assert [node.name for node in call.args[3]] == ["gradient"]
    weight = torch.ones(4)
    assert run(graph, weight, torch.full((4,), 2.0))[0] is weight
    assert weight.tolist() == [6.0] * 4


def test_equal_work_has_an_equal_name_so_that_compiled_code_can_be_cached():
    names = []
    for factor in (2, 2, 3):
        graph, update = graph_of()
        update[1].args = (update[1].args[0], factor)
        make_one_call(graph, update, NOT_PENDING)
        names.append(next(n for n in graph.nodes if n.op == "call_function").args[0])
    assert names[0] == names[1] != names[2]


def test_pending_updates_are_noted_and_no_others():
    noted = []
    marks = Marks(lambda n: noted.append(("begin", n)), noted.append)
    weight = torch.ones(4)
    for number in (NOT_PENDING, 5):
        graph, update = graph_of()
        make_one_call(graph, update, number)
        with noting(marks):
            run(graph, weight, weight.clone())
    assert noted == [("begin", 5), 5]


def test_a_copy_of_a_state_is_refused_before_anything_is_written():
    graph, update = graph_of()
    make_one_call(graph, update, 0)
    state, copy = torch.ones(4), torch.ones(4)
    noted = []
    with (
        pytest.raises(
            CaptureError, match=r"copies of 1 of its 1 states.*backend='graph'"
        ),
        noting(Marks(noted.append, noted.append), [state]),
    ):
        run(graph, copy, torch.ones(4))
    assert copy.tolist() == [1.0] * 4 and noted == []


def refuse_used_elsewhere():
    graph, update = graph_of()
    (output,) = graph.find_nodes(op="output")
    output.args = ((update[0],),)
    return graph, update, "add__tensor is used outside of the update"


def refuse_a_number():
    graph, update = graph_of()
    graph.find_nodes(op="placeholder")[1].meta["val"] = 1.0
    return graph, update, "gradient is no tensor"


def refuse_an_alias():
    graph, update = graph_of(aten.detach.default)
    return graph, update, "detach_default is read where the update writes"


def refuse_what_is_no_state():
    graph, update = graph_of(aten.neg.default)
    update[1].args = (update[0].args[1], 2)
    return graph, update, "neg_default is written and is no state"


@pytest.mark.parametrize(
    "case",
    [refuse_used_elsewhere, refuse_a_number, refuse_an_alias, refuse_what_is_no_state],
)
def test_refused_and_the_graph_is_as_it_was(case):
    graph, update, reason = case()
    before = str(graph)
    assert make_one_call(graph, update, 0) == reason
    assert str(graph) == before


class Compiled:
    """A few steps by Inductor and the code that it made."""

    def __init__(self, optimizer, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.optim = optimizer(self.model.parameters())
        self.step = compile(backend="inductor", **options)(train)
        batch = torch.randn(4, 8)
        _, self.codes = run_and_get_code(
            lambda: train_three_steps(self.step, self.model, self.optim, batch)
        )


def train_three_steps(step, model, optim, batch):
    for number in range(3):
        optim.param_groups[0]["lr"] = 0.1 / (number + 1)
        step(model, optim, batch)


def train(model, optim, batch):
    loss = model(batch).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optim.step()
    optim.zero_grad()
    return loss.detach()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


def test_inductor_calls_fused_updates_in_place_and_follows_eager():
    compiled = Compiled(adamw)
    assert len(compiled.codes) == 1
    (program,) = compiled.step.programs
    assert not any("not compiled" in line for line in program.notes)
    code = compiled.codes[-1].split("def call")[-1]
    assert code.count("torch.ops.torchspmd.update.default(") == 1
    assert "_fused_adamw" not in code and "copy_" not in code
    eager = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    torch.manual_seed(0)
    for layer in (eager[0], eager[2]):
        layer.reset_parameters()
    batch, optim = torch.randn(4, 8), adamw(eager.parameters())
    train_three_steps(train, eager, optim, batch)
    for left, right in zip(
        compiled.model.parameters(), eager.parameters(), strict=True
    ):
        torch.testing.assert_close(left, right)


class OwnAdamW(torch.optim.AdamW):
    """An optimizer that is not torch's: it may do anything in its first step."""


def test_a_first_step_that_makes_states_is_not_compiled():
    compiled = Compiled(lambda p: OwnAdamW(p, lr=0.1, fused=True))
    assert len(compiled.codes) == 1
    first, second = (program.notes for program in compiled.step.programs)
    assert "makes the optimizer's states, so it runs once: not compiled" in first
    assert not any("not compiled" in line for line in second)


def test_updates_that_cannot_be_one_call_are_copied_and_that_is_said(monkeypatch):
    monkeypatch.setattr(
        update_calls, "make_one_call", lambda *_: "a reason of this test"
    )
    compiled = Compiled(adamw)
    line = "Inductor copies the states of fused optimizers: a reason of this test"
    assert line in compiled.step.programs[-1].notes
    assert "torchspmd.update" not in compiled.codes[-1]
    assert compiled.step.programs[-1].in_place.num_in_place == 0


def test_inductor_computes_other_updates_itself():
    compiled = Compiled(lambda p: torch.optim.SGD(p, lr=0.1, foreach=True))
    assert "torchspmd.update" not in compiled.codes[-1]


def test_the_transformation_compiles_in_place_too():
    options = GraphModuleTransformation(enable_inductor=True)
    torch.manual_seed(0)
    compiled = Compiled(adamw, gm_transformation=options)
    report = compiled.step.programs[-1].in_place
    assert report.num_in_place == 12  # parameters and two states of each
    assert len(report.copied) == 4  # the step counters


# ----------------------------------------------------------------------------
# What is kept from Inductor because compiling it would cost more than it gives.


def graph_of_lowering(rate, *, used=False):
    """Gives ``weight + 1`` and a copy of the rate, as an iteration that keeps it does."""
    graph = fx.Graph()
    weight, rate_in = graph.placeholder("weight"), graph.placeholder("rate")
    weight.meta["val"], rate_in.meta["val"] = torch.empty(4), rate
    new = graph.call_function(aten.add.Tensor, (weight, 1))
    copied = graph.call_function(aten.clone.default, (rate_in,))
    if used:
        new = graph.call_function(aten.mul.Tensor, (weight, copied))
    graph.output([new, copied])
    return fx.GraphModule({}, graph)


@pytest.fixture
def compiled_graphs(monkeypatch):
    seen = []

    def made(graph, inputs, *, keep_order):
        seen.append(graph)
        return graph, "not compiled"

    monkeypatch.setattr(_torch, "compile_with_inductor", made)
    return seen


def targets(graph):
    return {node.target for node in graph.graph.nodes if node.op == "call_function"}


def test_a_rate_is_copied_by_the_caller(compiled_graphs):
    rate = torch.tensor(0.1)
    graph = graph_of_lowering(rate)
    new, kept = lower(graph)[0](torch.zeros(4), rate)
    assert targets(compiled_graphs[0]) == {aten.add.Tensor}
    assert aten.clone.default in targets(graph)  # which is shown and checked
    rate.fill_(5.0)
    assert kept.item() == pytest.approx(0.1)
    assert new.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("rate", "used"),
    [
        (torch.ones(3), False),
        (torch.tensor(1.0, device="meta"), False),
        (torch.tensor(1.0), True),
    ],
    ids=["a tensor", "elsewhere", "used"],
)
def test_other_copies_stay(compiled_graphs, rate, used):
    lower(graph_of_lowering(rate, used=used))
    assert aten.clone.default in targets(compiled_graphs[0])


def test_inputs_with_one_example_are_compiled_as_two():
    """The learning rate of a step, and that of the step before, have one fake tensor."""
    graph = fx.Graph()
    now, before = graph.placeholder("now"), graph.placeholder("before")
    now.meta["val"] = before.meta["val"] = torch.tensor(0.1)
    new = graph.call_function(aten.mul.Tensor, (before, 2))
    graph.output([new, graph.call_function(aten.clone.default, (now,))])
    run, _ = lower(fx.GraphModule({}, graph))
    new, kept = run(torch.tensor(3.0), torch.tensor(5.0))
    assert (new.item(), kept.item()) == (10.0, 3.0)


# ----------------------------------------------------------------------------
# Which pending updates may be made in place, on graphs made by hand.


class Graphs:
    """Two regions by hand: `x1 = x + g` and `y1 = y * 2`, apart by a node of no region."""

    def __init__(self):
        self.graph = fx.Graph()
        self.x, self.y, self.g = (self.placeholder(name) for name in "xyg")

    def placeholder(self, name):
        node = self.graph.placeholder(name)
        node.meta.update(val=torch.empty(3), torchspmd_name=f"state {name}")
        return node

    def call(self, target, *args, region=None):
        node = self.graph.call_function(target, args)
        node.meta["val"] = torch.empty(3)
        if region is not None:
            node.meta[PENDING_KEY] = region
        return node

    def write(self, values, roles, refused=None, spare=()):
        """What is called when the graph is run, and the report."""
        self.graph.output(values)
        set_roles(self.graph, roles)
        calls = []
        marks = Marks(functools.partial(calls.append), functools.partial(calls.append))
        for each, name in ((marks.begin, "begin"), (marks.end, "end")):
            each.__name__, each.__module__ = name, __name__
        form = fx.GraphModule(nn.Module(), self.graph)
        running, report = write_pending_in_place(form, marks, refused or {}, spare)
        inputs = [torch.ones(3) * n for n in (1.0, 2.0, 3.0)]
        before = form(*[each.clone() for each in inputs])
        after = running(*inputs)
        assert all(map(torch.equal, before, after))
        assert not calls or calls == [n for n in calls[::2] for _ in range(2)]
        return inputs, report


STATES = [OutputRole(OutputKind.STATE, place) for place in (0, 1)]


RESULT = OutputRole(OutputKind.RESULT)


def test_only_pending_states_are_written():
    made = Graphs()
    x1 = made.call(aten.add.Tensor, made.x, made.g, region=0)
    y1 = made.call(aten.mul.Tensor, made.y, 2)
    inputs, report = made.write([x1, y1], STATES)
    assert report.in_place == {0} and not report.left
    assert [each.tolist()[0] for each in inputs] == [4.0, 2.0, 3.0]


def test_a_region_is_in_place_as_a_whole():
    made = Graphs()
    x1 = made.call(aten.add.Tensor, made.x, made.g, region=0)
    y1 = made.call(aten.mul.Tensor, made.y, 2, region=0)
    old = made.call(aten.neg.default, made.y)  # reads what the region would overwrite
    inputs, report = made.write([x1, y1, old], [*STATES, RESULT])
    assert not report.in_place
    assert report.left == {0: "neg_default runs between its writes"}
    assert [each.tolist()[0] for each in inputs] == [1.0, 2.0, 3.0]


def test_an_old_value_that_is_returned():
    made = Graphs()
    x1 = made.call(aten.add.Tensor, made.x, made.g, region=0)
    y1 = made.call(aten.mul.Tensor, made.y, 2, region=1)
    _, report = made.write([x1, y1, made.y], [*STATES, RESULT])
    assert report.in_place == {0}
    assert report.left == {1: "y (state y) cannot be written in place"}
    assert report.lines()[0] == "1 of 2 pending updates are made in place"


def test_numbers_and_what_the_caller_refuses():
    made = Graphs()
    x1 = made.call(aten.add.Tensor, made.x, made.g, region=0)
    made.y.meta["val"] = 2.0
    y1 = made.call(operator.mul, made.y, 2, region=1)
    _, report = made.write([x1, y1], STATES, {0: "it is busy"})
    assert report.left == {0: "it is busy", 1: "y (state y) is a Python number"}


def test_waits_come_before_writes():
    made = Graphs()
    wait = torch.ops._c10d_functional.wait_tensor.default
    y1 = made.call(aten.add.Tensor, made.y, 1, region=0)
    gradient = made.call(wait, made.g, region=0)
    x1 = made.call(aten.add.Tensor, made.x, gradient, region=0)
    made.graph.output([x1, y1])
    set_roles(made.graph, STATES)
    form = fx.GraphModule(nn.Module(), made.graph)
    run = IterGraphModule(fx.symbolic_trace(lambda x: x))
    running, report = write_pending_in_place(form, run.marks, {})
    names = [node.name for node in running.graph.nodes if node.op == "call_function"]
    assert names[:2] == ["wait_tensor_default", "_begin"] and names[-1] == "_end"
    assert report.in_place == {0}


# What the step before left may be overwritten by the one update that needs it.
@pytest.mark.parametrize(
    ("readers", "spare", "left"),
    [((0,), (0,), 6.0), ((0,), (), 3.0), ((0, 1), (0,), 3.0), ((0, None), (0,), 3.0)],
    ids=["its own", "not spare", "two updates", "read by the step too"],
)
def test_a_gradient_is_overwritten(readers, spare, left):
    made = Graphs()
    made.g.meta[CARRIED_KEY] = 0
    double = made.call(aten.mul.Tensor, made.g, 2, region=0)
    x1 = made.call(aten.add.Tensor, made.x, double, region=0)
    other = made.g if len(readers) > 1 else 1
    y1 = made.call(aten.add.Tensor, made.y, other, region=readers[-1])
    inputs, report = made.write([x1, y1], STATES, spare=spare)
    assert report.in_place == set(readers) - {None}
    assert inputs[2].tolist() == [left] * 3


def test_memory_that_is_left_once_is_spare():
    made = Graphs()
    for place, node in enumerate((made.x, made.y, made.g)):
        node.meta[CARRIED_KEY] = place
    alone = made.call(aten.neg.default, made.x)
    twice = made.call(aten.abs.default, made.y)
    view = made.call(aten.view.default, twice, [3])
    made.graph.output([twice, alone, view, made.g])  # a result, then what is left
    assert find_spare(made.graph) == {0}


def test_inductor_keeps_the_factor_of_what_is_added():
    """An update by a matrix product: torch's compiler makes one ``addmm`` of it."""
    torch.manual_seed(0)
    found = []
    for step in (train, compile(train, backend="inductor")):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optim = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        step(model, optim, torch.ones(2, 4))
        found.append(model.weight.detach())
    torch.testing.assert_close(*found)
