"""A graph as generated Python: the same operators, called by torch's own bindings."""

import inspect
import types

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from training import train_sum

from torchspmd import _torch
from torchspmd._torch import bindings
from torchspmd.step import compile
from torchspmd.step.graph.generated import RunningGraph

aten = torch.ops.aten


class Called(TorchDispatchMode):
    """The operators that reach the dispatcher."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


def calls(function, *inputs):
    with torch.no_grad(), Called() as called:
        result = function(*inputs)
    return called.operators, result


def step(x, weight, bias, index):
    rows = torch.nn.functional.embedding(index, weight)
    hidden = torch.nn.functional.layer_norm(rows + x, (4,), bias, bias)
    heads = hidden.view(2, 3, 2, 2).transpose(1, 2).reshape(4, 3, 2)
    scores = torch.softmax(torch.bmm(heads, heads.mT) * 0.5, -1)
    scores = scores - scores.mean([1, 2], True) + scores.mean([0], True)
    mixed = (scores @ heads).expand(4, 3, 2).permute(1, 0, 2).flatten()
    kept = torch.where(mixed > 0, mixed, mixed.new_zeros(())).pow(2.0)
    total = kept.sum(0, True) + torch.add(kept, kept, alpha=2).amax()
    return torch.cat([total, kept]), total.to(torch.float64), mixed.clone()


def example():
    torch.manual_seed(0)
    weight, bias = torch.randn(7, 4), torch.randn(4)
    return torch.randn(2, 3, 4), weight, bias, torch.tensor([[0, 3, 6], [2, 1, 0]])


def test_it_makes_the_same_calls_and_bits():
    inputs = example()
    graph = make_fx(step, tracing_mode="fake")(*inputs)
    running = RunningGraph.of(graph)
    expected, values = calls(graph, *inputs)
    found, results = calls(running, *inputs)
    assert found == expected
    for value, result in zip(values, results, strict=True):
        assert torch.equal(value, result)
        assert (value.dtype, value.stride()) == (result.dtype, result.stride())


def test_what_is_called():
    graph = make_fx(step, tracing_mode="fake")(*example())
    text = source_of(RunningGraph.of(graph))
    assert ".view(2, 3, 2, 2)" in text  # numbers of a list as arguments of their own
    assert ".transpose(1, 2)" in text
    assert ".add(" in text
    assert "alpha=2" in text


def source_of(running):
    return inspect.getsource(running.run)


def test_a_compiled_step_runs_it():
    model = nn.Linear(2, 2)
    optim = torch.optim.AdamW(model.parameters())
    train_step = compile(train_sum)
    train_step(model, optim, torch.ones(3, 2))
    train_step(model, optim, torch.ones(3, 2))
    run = train_step.programs[-1].run
    assert isinstance(run, RunningGraph)
    assert ".item()" in source_of(run)  # step counters of the optimizer
    train_step.close()


def node_values(operator, *args, **options):
    """Arguments as a graph knows them, without values."""
    mode = torch._subclasses.FakeTensorMode()
    convert = lambda each: (  # noqa: E731
        mode.from_tensor(each) if isinstance(each, torch.Tensor) else each
    )
    return operator, [*map(convert, args)], options


@pytest.mark.parametrize(
    ("case", "told"),
    [
        (node_values(aten.mm.default, torch.ones(2, 2), torch.ones(2, 2)), "mm"),
        (node_values(aten.sum.dim_IntList, torch.ones(2, 2), [0], True), "sum"),
        (node_values(aten.add_.Tensor, torch.ones(2), torch.ones(2), alpha=2), "add_"),
        (node_values(aten.mul.Tensor, torch.ones(2), torch.ones(())), "mul"),
        (node_values(aten.mul.Tensor, torch.ones(2), 2.0), "mul"),
        (node_values(aten.mean.dim, torch.ones(2, 2), [0]), "mean"),
        (node_values(aten.mean.dim, torch.ones(2, 2), [0, 1]), "mean"),
        (
            node_values(aten.embedding.default, torch.ones(3, 2), torch.tensor([1])),
            "embedding",
        ),
        # Made without a tensor: a context of torch says where, and of which type.
        (node_values(aten.ones.default, [2]), None),
        # Without a binding.
        (node_values(aten._unsafe_view.default, torch.ones(2, 2), [4]), None),
        (
            node_values(
                aten.threshold_backward.default, torch.ones(2), torch.ones(2), 0
            ),
            None,
        ),
    ],
)
def test_bindings(case, told):
    operator, args, options = case
    found = _torch.binding_of(operator, args, options)
    assert (found and found.name) == told


def test_a_binding_that_comes_to_another_operator_is_not_taken(monkeypatch):
    case = node_values(aten.neg.default, torch.ones(2, 2))
    assert _torch.binding_of(*case).name == "neg"
    known = {}
    monkeypatch.setattr(bindings, "_known", known)
    monkeypatch.setattr(bindings, "_candidates", lambda *_: [bindings.Binding("abs")])
    assert _torch.binding_of(*case) is None
    assert len(known) == 1  # asked once


def test_a_binding_that_fails_is_not_logged(caplog):
    """``condition.where(x, y)`` takes ``x`` for the condition."""
    condition, x = torch.ones(2, dtype=torch.bool), torch.zeros(2)
    case = node_values(aten.where.self, condition, x, x)
    assert not _torch.binding_of(*case).is_method
    assert not [each for each in caplog.records if "failed" in str(each.msg)]


def test_without_values_to_go_by_operators_are_called_as_they_are():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(aten.neg.default, (x,)),))
    running = RunningGraph.of(fx.GraphModule({}, graph))
    assert ".neg(" not in source_of(running)
    assert torch.equal(running(torch.ones(2))[0], -torch.ones(2))


def test_tensors_and_modules_of_the_graph_are_read_when_it_runs():
    root = nn.Module()
    root.part = nn.Linear(2, 2)
    root.register_buffer("scale", torch.tensor(2.0))
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_module("part", (x,))
    scaled = graph.call_function(torch.mul, (made, graph.get_attr("scale")))
    graph.output(graph.call_method("relu", (scaled,)))
    running = RunningGraph.of(fx.GraphModule(root, graph))
    assert isinstance(running.run, types.FunctionType)
    with torch.no_grad():
        running.module.scale.fill_(3.0)
    x = torch.randn(4, 2)
    assert torch.equal(running(x), (root.part(x) * 3.0).relu())
