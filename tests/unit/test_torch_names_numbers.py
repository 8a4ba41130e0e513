"""Private torch names behind numbers that an optimizer reads and chooses by."""

import inspect
import math
import operator

import pytest
import torch
from torch import fx, nn
from torch.optim import _adafactor, asgd

from torchspmd import _torch

pytestmark = pytest.mark.unit


def traced(function, *inputs):
    world = _torch.FakeWorld()
    fakes = [world.fake(each) for each in inputs]
    with world.mode, world.reading_values(), torch.no_grad():
        return _torch.trace(lambda *args: function(world, *args), fakes), world


def test_real_tensors():
    seen = []

    def step(world, x):
        with _torch.numbers.real_tensors():
            value = torch.ones(()) + 1
        seen.append((type(value), value.item(), value.requires_grad))
        return x + 1

    graph, _ = traced(step, torch.ones(2))
    assert seen == [(torch.Tensor, 2.0, False)]
    assert [n.name for n in graph.graph.nodes if n.op == "call_function"] == ["add"]


def test_stand_in_and_same_number():
    def step(world, x, y):
        first = world.number("count", 3.0)
        second = world.same_number(first)
        _torch.numbers.stand_in(first, x.item())
        _torch.numbers.stand_in(second, y.item())
        assert _torch.symbol_of(first) == _torch.symbol_of(second)
        return torch.ones(()) * (first + 1 if first > 2 else 0), x * (second + 1)

    graph, world = traced(step, torch.ones(()), torch.ones(()))
    (assumption,) = world.assumptions()
    assert len(assumption.free_symbols) == 1
    # Each is its own node, with the values of the run.
    got = graph(torch.tensor(5.0), torch.tensor(6.0))
    assert [each.item() for each in got] == [6.0, 35.0]


def test_same_number_of_an_integer():
    world = _torch.FakeWorld()
    number = world.number("count", 3)
    assert isinstance(world.same_number(number), torch.SymInt)


def test_copy_number():
    def step(world, x):
        return x * (x.item() + 1)

    graph, _ = traced(step, torch.ones(()))
    (add,) = graph.graph.find_nodes(op="call_function", target=operator.add)

    def again(world, x):
        return x * _torch.numbers.copy_number(add, (x.item(), 2))

    copied, _ = traced(again, torch.ones(()))
    assert copied(torch.tensor(3.0)).item() == 15.0


@pytest.mark.parametrize("choose", [max, min])
def test_extreme(choose):
    def step(world, x):
        return x * choose_in_graph(1.0, x.item())

    def choose_in_graph(first, second):
        return _torch.numbers.extreme(choose, first, second)

    graph, world = traced(step, torch.ones(()))
    assert not world.assumptions()
    for value in (0.5, 2.0):
        assert graph(torch.tensor(value)).item() == value * choose(1.0, value)
    (node,) = graph.graph.find_nodes(op="call_function", target=choose)
    assert node.args[0] == 1.0  # the order matters for NaN
    assert choose(1.0, math.nan) == 1.0
    assert choose_in_graph(2, 3) == choose(2, 3)


def test_extremes_in_graph():
    for module in (_adafactor, asgd):
        assert "max(" in inspect.getsource(module)
        assert "max" not in vars(module) and "min" not in vars(module)
    with _torch.numbers.extremes_in_graph():
        assert _adafactor.max(1, 2) == asgd.max(1, 2) == 2
        assert _adafactor.min(1, 2) == 1
    assert "max" not in vars(asgd) and "min" not in vars(_adafactor)


OPTIONS = {"weight_decay": 0.0, "momentum": 0.9, "dampening": 0.0}
FLAGS = {"nesterov": False, "maximize": False, "is_first_step": False}


def test_fused_sgd_has_a_kernel_while_tracing():
    def step(world, x, y, rate):
        for lr in (0.1, rate):
            torch._fused_sgd_([x], [y], [x.clone()], lr=lr, **OPTIONS, **FLAGS)
        return x

    names = ("aten::_fused_sgd_", "aten::_fused_sgd_.tensor_lr")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    before = [has_kernel(name, "Meta") for name in names]
    graph, _ = traced(step, torch.ones(2), torch.ones(2), torch.ones(()))
    nodes = [n.target for n in graph.graph.nodes if "_fused_sgd_" in n.name]
    packet = torch.ops.aten._fused_sgd
    forms = [_torch.functional_optimizer(target) for target in nodes]
    assert forms == [packet.default, packet.tensor_lr]
    assert [has_kernel(name, "Meta") for name in names] == before


def test_lazy_module():
    graph = fx.symbolic_trace(lambda x: x + 1).graph
    module = _torch.lazy_module(nn.Module(), graph)
    assert isinstance(module, fx.GraphModule)
    assert module(torch.ones(())).item() == 2.0
    assert "x + 1" in module.code


def test_without_autocast():
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        with _torch.without_autocast():
            assert (x @ x).dtype is torch.float32
        assert (x @ x).dtype is torch.bfloat16
