"""Updates as one call, for a compiler that must not copy their states."""

import pytest
import torch
from torch import fx, nn
from torch._inductor.utils import run_and_get_code

from torchspmd.errors import CaptureError
from torchspmd.step import GraphModuleTransformation, compile
from torchspmd.step.deferral.module import Marks
from torchspmd.step.lower import backends
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
    assert len(compiled.codes) == 1  # the first step makes the states, and runs once
    first, second = (program.notes for program in compiled.step.programs)
    assert "makes the optimizer's states, so it runs once: not compiled" in first
    assert not any("not compiled" in line for line in second)
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


def test_updates_that_cannot_be_one_call_are_copied_and_that_is_said(monkeypatch):
    monkeypatch.setattr(backends, "make_one_call", lambda *_: "a reason of this test")
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
