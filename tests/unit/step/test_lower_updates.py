"""Updates of compiled steps: where they are written, and by whom."""

import functools
import operator

import pytest
import torch
from torch import fx, nn
from torch._inductor.utils import run_and_get_code

from torchspmd.step import GraphModuleTransformation, IterGraphModule, compile
from torchspmd.step.deferral.forms import CARRIED_KEY, PENDING_KEY
from torchspmd.step.deferral.module import Marks
from torchspmd.step.graph.metadata import OutputKind, OutputRole, set_roles
from torchspmd.step.lower.pending_in_place import find_spare, write_pending_in_place

aten = torch.ops.aten


class Compiled:
    """A few steps by Inductor and the code that it made."""

    def __init__(self, optimizer, *, eager=False, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.optim = optimizer(self.model.parameters())
        self.step = train if eager else compile(backend="inductor", **options)(train)
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


def test_fused_updates_are_called_in_place_and_follow_eager():
    compiled = Compiled(adamw)
    (program,) = compiled.step.programs
    assert not any("not compiled" in line for line in program.notes)
    assert compiled.codes
    for code in compiled.codes:
        assert "_fused_adamw" not in code and "copy_" not in code
    assert_equal_models(compiled, Compiled(adamw, eager=True))


def assert_equal_models(compiled, eager):
    pairs = zip(compiled.model.parameters(), eager.model.parameters(), strict=True)
    for left, right in pairs:
        torch.testing.assert_close(left, right)


class OwnAdamW(torch.optim.AdamW):
    """An optimizer that is not torch's: it may do anything in its first step."""


def test_a_first_step_that_makes_states_is_not_compiled():
    compiled = Compiled(lambda p: OwnAdamW(p, lr=0.1, fused=True))
    first, second = (program.notes for program in compiled.step.programs)
    assert "makes the optimizer's states, so it runs once: not compiled" in first
    assert not any("not compiled" in line for line in second)


def test_inductor_computes_other_updates_itself():
    compiled = Compiled(lambda p: torch.optim.SGD(p, lr=0.1, foreach=True))
    assert len(compiled.step.programs[-1].in_place.copied) == 4
    assert not any("ops.aten._foreach" in code for code in compiled.codes)
    eager = Compiled(lambda p: torch.optim.SGD(p, lr=0.1, foreach=True), eager=True)
    assert_equal_models(compiled, eager)


def test_the_transformation_compiles_in_place_too():
    options = GraphModuleTransformation(enable_inductor=True)
    torch.manual_seed(0)
    compiled = Compiled(adamw, gm_transformation=options)
    report = compiled.step.programs[-1].in_place
    assert report.num_in_place == 16  # parameters, and two states and a counter of each
    assert not report.copied


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
