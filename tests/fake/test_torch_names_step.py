"""Private torch names that compiled steps need; see tests/unit/test_torch_names.py."""

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.tensor import DTensor, Replicate

from torchspmd import _torch
from torchspmd.testing import fake_mesh

pytestmark = pytest.mark.fake


def test_fake_world():
    world = _torch.FakeWorld()
    fake = world.fake(torch.ones(2, 3, requires_grad=True))
    assert fake.shape == (2, 3)
    assert not fake.requires_grad
    assert _torch.is_fake(fake)
    number = world.number("lr", 0.5)
    assert isinstance(number, torch.SymFloat)
    assert isinstance(world.number("step", 3), torch.SymInt)
    scalar, vector = world.fake(torch.ones(())), world.fake(torch.ones(3))
    with world.mode:
        with pytest.raises(_torch.data_dependence_errors()):
            scalar.item()
        with world.reading_values():
            assert isinstance(scalar.item(), torch.SymFloat)
        with pytest.raises(_torch.data_dependence_errors()):
            vector.nonzero()


def test_number_hint():
    world = _torch.FakeWorld()
    assert _torch.number_hint(world.number("lr", 0.5)) == 0.5
    assert _torch.number_hint(world.number("step", 3)) == 3
    assert world.assumptions() == ()
    assert _torch.number_hint(0.25) == 0.25


def test_symbol_of():
    world = _torch.FakeWorld()
    number = world.number("lr", 0.5)
    assert number != 0  # an assumption
    (assumption,) = world.assumptions()
    assert assumption.free_symbols == {_torch.symbol_of(number)}
    assert _torch.symbol_of(torch.ones(())) is None


def test_holds():
    world = _torch.FakeWorld()
    number = world.number("lr", 0.5)
    assert bool(number > 0.1)
    (assumption,) = world.assumptions()
    symbol = _torch.symbol_of(number)
    assert _torch.holds(assumption, {symbol: 0.2})
    assert not _torch.holds(assumption, {symbol: 0.05})
    assert _torch.holds(assumption, {})


def traced(function, *inputs):
    world = _torch.FakeWorld()
    fakes = [world.fake(each) for each in inputs]
    with world.mode:
        return _torch.trace(function, fakes)


def names(graph):
    return [node.name for node in graph.graph.nodes if node.op == "call_function"]


def test_trace():
    assert names(traced(lambda x: x.sin().cos(), torch.ones(2))) == ["sin", "cos"]

    def counts():
        counter = torch.ones(())
        counter *= 2  # a constant, but not to be computed now
        return counter

    assert "mul_" in "".join(names(traced(counts)))
    norm = torch.nn.BatchNorm1d(3)
    graph = traced(
        lambda x, m, v: torch.native_batch_norm(x, None, None, m, v, True, 0.1, 1e-5)[
            0
        ],
        torch.ones(4, 3),
        norm.running_mean,
        norm.running_var,
    )
    assert "_native_batch_norm_legit" in names(graph)


def test_functional():
    def writes(x):
        y = x.clone()
        y.add_(1)
        return y

    assert names(traced(_torch.functional(writes), torch.ones(2))) == ["clone", "add"]


def test_functional_optimizer():
    aten = torch.ops.aten
    assert _torch.functional_optimizer(aten._fused_adam_.default) is (
        aten._fused_adam.default
    )
    assert _torch.functional_optimizer(aten._fused_adamw_.tensor_lr) is (
        aten._fused_adamw.tensor_lr
    )
    assert _torch.functional_optimizer(aten.add_.Tensor) is None
    assert _torch.functional_optimizer(len) is None


def test_current_graph():
    assert _torch.current_graph() is None
    seen = []
    traced(lambda x: seen.append(_torch.current_graph()) or x, torch.ones(2))
    assert isinstance(seen[0], fx.Graph)


def test_data_dependence_errors():
    assert all(issubclass(each, Exception) for each in _torch.data_dependence_errors())


def test_copy_all():
    targets = [torch.zeros(2), torch.zeros(3, dtype=torch.float64)]
    _torch.copy_all(targets, [torch.ones(2), torch.ones(3, dtype=torch.float64)])
    assert all(bool((each == 1).all()) for each in targets)


def test_compile_with_inductor():
    graph = traced(lambda x: [x.sin() + 1], torch.ones(2))
    run, told = _torch.compile_with_inductor(graph, [torch.ones(2)], keep_order=True)
    assert "cache" in told
    torch.testing.assert_close(run(torch.ones(2))[0], torch.ones(2).sin() + 1)


def test_has_symbols():
    assert not _torch.has_symbols(traced(lambda x: x + 1, torch.ones(2)))
    world = _torch.FakeWorld()
    with world.mode:
        graph = _torch.trace(lambda n: n * 2, [world.number("n", 0.5)])
    assert _torch.has_symbols(graph)


def test_plain_tensor():
    with fake_mesh(2) as mesh:
        local = torch.ones(2)
        wrapped = DTensor.from_local(local, mesh, [Replicate()])
        assert type(_torch.plain_tensor(wrapped)) is torch.Tensor
        assert _torch.plain_tensor(local) is local


def test_layout_of():
    with fake_mesh(2) as mesh:
        wrapped = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
        assert _torch.layout_of(wrapped).placements == (Replicate(),)
        assert _torch.layout_of(torch.ones(2)) is None


def test_autocast_state():
    assert _torch.autocast_state() == ()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _torch.autocast_state() == (("cpu", torch.bfloat16),)


def test_sum_over():
    with fake_mesh(2):
        graph = traced(lambda x: _torch.sum_over(x, dist.group.WORLD), torch.ones(2))
        assert names(graph) == ["all_reduce", "wait_tensor"]
