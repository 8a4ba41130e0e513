"""How a mapped function is called: forms, trees, keywords, modules, meshes, tools."""

import functools
import inspect
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from layouts import S0, S1, P, R, put
from torch.distributed.tensor import DTensor, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from torchspmd import CommDebugMode, Kind, Phase
from torchspmd.local import local_map
from torchspmd.testing import fake_mesh


def mm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Multiply."""
    return x @ w


def test_decorator_keeps_name_signature_and_docstring() -> None:
    mapped = local_map(out_placements=[S0])(mm)
    assert mapped.__name__ == "mm"
    assert mapped.__doc__ == "Multiply."
    assert inspect.signature(mapped) == inspect.signature(mm)
    assert inspect.unwrap(mapped) is mm


def test_callables_without_a_name_or_signature(tp2: Any) -> None:
    x = put(torch.ones(4, 2), tp2, S0)
    assert local_map(functools.partial(torch.mul, other=2), [S0])(x).shape == (4, 2)
    assert local_map(torch.nn.ReLU(), [S0], ([S0],))(x).shape == (4, 2)


def test_positional_order_is_that_of_torch() -> None:
    names = list(inspect.signature(local_map).parameters)
    assert names[:6] == [
        "func",
        "out_placements",
        "in_placements",
        "in_grad_placements",
        "device_mesh",
        "redistribute_inputs",
    ]


def test_no_dtensor_in_means_plain_tensors_out() -> None:
    mapped = local_map(mm, [S0], ([S0], [R]))
    result = mapped(torch.ones(4, 2), torch.ones(2, 3))
    assert type(result) is torch.Tensor


def test_plain_tensors_among_dtensors_pass_as_they_are() -> None:
    with fake_mesh(2, ("tp",)) as mesh:
        result = local_map(mm, [S0], ([S0], [R]))(
            put(torch.ones(4, 2), mesh, S0), torch.ones(2, 3)
        )
    assert result.shape == (4, 3)


def test_non_tensors_come_out_as_they_are(tp2: Any) -> None:
    x = put(torch.ones(4, 2), tp2, S0)
    assert local_map(lambda x: x.shape[0], None)(x) == 2
    assert local_map(lambda x: (x, "a", None), ([S0], None, None))(x)[1:] == ("a", None)


def test_one_function_serves_many_meshes() -> None:
    mapped = local_map(mm, [S0], ([S0], [R]))
    for size in (2, 4, 2):
        with fake_mesh(size, ("tp",)) as mesh:
            y = mapped(put(torch.ones(8, 2), mesh, S0), put(torch.ones(2, 3), mesh, R))
            assert y.device_mesh == mesh
            assert y.shape == (8, 3)


def test_keywords_find_their_entry(tp2: Any) -> None:
    x, w = put(torch.ones(4, 2), tp2, S0), put(torch.ones(2, 4), tp2, S1)
    mapped = local_map(mm, [S0], ([S0], [R]), redistribute_inputs=True)
    assert mapped(w=w, x=x).to_local().shape == (2, 4)
    by_name = local_map(mm, [S0], {"w": [R]}, redistribute_inputs=True)
    assert by_name(x, w=w).to_local().shape == (2, 4)


def test_one_layout_for_all_arguments(tp2: Any) -> None:
    x = put(torch.ones(4, 2), tp2, S0)
    assert local_map(torch.add, [S0], [S0])(x, x).shape == (4, 2)


def test_negative_dims(tp2: Any) -> None:
    x = put(torch.ones(4, 2), tp2, S1)
    y = local_map(lambda x: x * 2, [Shard(-1)], ([Shard(-1)],))(x)
    assert y.placements == (S1,)


Pair = namedtuple("Pair", "left right")


def test_trees_of_named_tuples() -> None:
    with fake_mesh(2, ("tp",)) as mesh:
        pair = Pair(put(torch.ones(4, 2), mesh, S0), put(torch.ones(2, 3), mesh, R))
        mapped = local_map(
            lambda pair: Pair(pair.left @ pair.right, 3),
            Pair([S0], None),
            (Pair([S0], [R]),),
        )
        result = mapped(pair)
    assert isinstance(result, Pair)
    assert (result.left.shape, result.right) == ((4, 3), 3)


def test_a_prefix_stands_for_a_tree(tp2: Any) -> None:
    x = put(torch.ones(4, 2), tp2, S0)
    mapped = local_map(lambda pair: pair, [S0], ([S0],))
    assert [t.placements for t in mapped([x, (x, 1)])[:1]] == [(S0,)]


class Projection(torch.nn.Module):
    """A module with a tied parameter and a buffer."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4, bias=False)
        weight = torch.nn.Parameter(put(torch.ones(4, 4), mesh, S0))
        self.first.weight = self.tied = weight
        self.register_buffer("scale", put(torch.ones(4), mesh, R))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not isinstance(self.scale, DTensor)
        return self.first(x * self.scale)


def test_modules_hold_local_parameters_inside(tp2: Any) -> None:
    module = Projection(tp2)
    x = put(torch.ones(3, 4), tp2, R).requires_grad_()
    mapped = local_map(lambda module, x: module(x), [S1], (None, [R]))
    y = mapped(module, x)
    assert y.shape == (3, 4)
    y.sum().backward()
    grad = module.first.weight.grad
    assert isinstance(grad, DTensor)
    assert grad.placements == (S0,)
    assert x.grad.placements == (R,)
    with pytest.raises(RuntimeError, match="must match the size"):
        mapped(module, put(torch.ones(3, 5), tp2, R))
    assert isinstance(module.first.weight, DTensor)
    assert isinstance(module.scale, DTensor)


def test_some_axes_local_others_left_alone() -> None:
    seen = []

    def body(x: DTensor, w: DTensor) -> DTensor:
        seen.append((x.shape, x.placements, w.placements, x.device_mesh.mesh_dim_names))
        return x @ w

    with fake_mesh((2, 4), ("dp", "tp")) as mesh:
        x = put(torch.ones(8, 6), mesh, S0, R).requires_grad_()
        w = put(torch.ones(6, 8), mesh, R, S1).requires_grad_()
        mapped = local_map(body, [S1], ([R], [S1]), axes=("tp",))
        with CommDebugMode() as mode:
            y = mapped(x, w)
            y.sum().backward()
        assert seen == [((8, 6), (S0,), (R,), ("dp",))]
        assert (y.shape, y.placements) == ((8, 8), (S0, S1))
        assert x.grad.placements == (S0, R)
        assert w.grad.full_tensor().shape == (6, 8)
        assert w.grad.placements[1] == S1
        assert mode.ledger.total(axis="tp", phase=Phase.BACKWARD).count == 1


def test_no_collectives_beyond_the_functions_own(tp4: Any) -> None:
    x = put(torch.ones(8, 4), tp4, S0).requires_grad_()
    w = put(torch.ones(4, 4), tp4, R)
    with CommDebugMode() as mode:
        local_map(mm, [S0], ([S0], [R]))(x, w).sum().backward()
        uneven = put(torch.ones(7, 4), tp4, S0).requires_grad_()
        local_map(mm, [S0], ([S0], [R]))(uneven, w)
    assert mode.ledger.total(phase=Phase.FORWARD).count == 0


def test_a_gather_before_becomes_a_scatter_behind(tp4: Any) -> None:
    x = put(torch.ones(8, 4), tp4, S0).requires_grad_()
    w = put(torch.ones(4, 8), tp4, S1).requires_grad_()
    mapped = local_map(mm, [S1], ([R], [S1]), redistribute_inputs=True)
    with CommDebugMode() as mode:
        mapped(x, w).sum().backward()
    kinds = [(event.kind, event.phase) for event in mode.ledger.events]
    assert kinds == [
        (Kind.ALL_GATHER, Phase.FORWARD),
        (Kind.REDUCE_SCATTER, Phase.BACKWARD),
    ]


class Block(torch.nn.Module):
    """A module with a region."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = torch.nn.Parameter(put(torch.ones(4, 4), mesh, S0))

    def forward(self, x: DTensor) -> DTensor:
        mapped = local_map(
            lambda x, w: funcol.all_reduce(x @ w, "sum", self.mesh), [R], ([S1], [S0])
        )
        return mapped(x, self.weight)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_ledger_and_activation_checkpointing(tp2: Any, use_reentrant: bool) -> None:
    block = Block(tp2)
    x = put(torch.ones(2, 4), tp2, S1).requires_grad_()
    with CommDebugMode(sources=True) as mode:
        y = checkpoint(block, x, use_reentrant=use_reentrant)
        y.to_local().sum().backward()
    phases = [event.phase for event in mode.ledger.events]
    # The other kind stops once the inputs of the product are there again.
    recomputed = [Phase.RECOMPUTE] if use_reentrant else []
    assert phases == [Phase.FORWARD, *recomputed, Phase.BACKWARD]
    forward = mode.ledger.events[0]
    assert forward.module.endswith("Block")
    assert forward.axis == "tp"
    assert forward.source is not None
    assert "test_local_map_calls.py" in forward.source
    assert block.weight.grad.placements == (S0,)


def test_whole_step_capture(tp2: Any) -> None:
    w = put(torch.ones(4, 4), tp2, R)

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = DTensor.from_local(x, tp2, [S0])
        weight = DTensor.from_local(weight, tp2, [R]).requires_grad_()
        y = local_map(mm, [S0], ([S0], [R]))(x, weight)
        (grad,) = torch.autograd.grad(y.to_local().sum(), weight)
        return grad.to_local()

    graph = make_fx(step, tracing_mode="fake")(torch.ones(2, 4), w.to_local())
    names = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    assert names.count("_c10d_functional.all_reduce.default") == 1
    assert graph(torch.ones(2, 4), torch.ones(4, 4)).shape == (4, 4)


def test_capture_with_symbolic_sizes(tp2: Any) -> None:

    def step(x: torch.Tensor) -> torch.Tensor:
        x = DTensor.from_local(x, tp2, [S0])
        return local_map(lambda x: x.sin() * 2, [S0], ([S0],))(x).to_local()

    graph = make_fx(step, tracing_mode="symbolic")(torch.ones(2, 4))
    assert torch.equal(graph(torch.zeros(6, 4)), torch.zeros(6, 4))


def test_results_of_several_kinds(tp2: Any) -> None:
    x = put(torch.ones(4, 4), tp2, S0)
    mapped = local_map(
        lambda x, kind: (x, x) if kind == "pair" else {0: x, 1: x},
        ([S0], [P]),
        ([S0], None),
    )
    assert [t.placements for t in mapped(x, "pair")] == [(S0,), (P,)]
    assert [t.placements for t in mapped(x, "dict").values()] == [(S0,), (P,)]
    assert mapped(x, "dict")[1].shape == (2, 4)


def test_fake_tensors_at_any_world_size() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with fake_mesh(1024, ("tp",)) as mesh, FakeTensorMode():
        x = DTensor.from_local(torch.empty(4, 8), mesh, [S0]).requires_grad_()
        w = DTensor.from_local(torch.empty(8, 3), mesh, [R]).requires_grad_()
        y = local_map(mm, [S0], ([S0], [R]), check=True)(x, w)
        assert y.shape == (4096, 3)
        y.sum().backward()
        assert w.grad.shape == (8, 3)


def test_double_backward(tp2: Any) -> None:
    x = put(torch.full((4, 2), 3.0), tp2, S0).requires_grad_()
    y = local_map(lambda x: x**3, [S0], ([S0],))(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert torch.equal(second.to_local(), torch.full((2, 2), 18.0))


def test_a_running_collective_is_not_waited_for(tp2: Any) -> None:
    x = put(torch.ones(4, 2), tp2, S0)
    y = local_map(lambda x: funcol.all_reduce(x, "sum", tp2), [R])(x)
    assert isinstance(y.to_local(), funcol.AsyncCollectiveTensor)
    y.to_local().wait()


def test_an_output_that_does_not_come_from_arguments() -> None:
    own = torch.ones(2, requires_grad=True)
    with fake_mesh(2, ("tp",)) as mesh:
        x = put(torch.ones(4, 2), mesh, R).requires_grad_()
        y = local_map(lambda x: own, [R])(x)
        y.sum().backward()
    assert torch.equal(own.grad, torch.ones(2))


def test_calls_do_not_pile_up(tp2: Any) -> None:
    mapped = local_map(lambda x, flag: x, [S0], ([S0], None))
    for size in range(2, 700, 2):
        mapped(put(torch.ones(size, 1), tp2, S0), 1)
    region = mapped.__closure__[0].cell_contents
    assert len(region._plans) == 1
    assert all(len(plan.memo) <= 256 for plan in region._plans.values())
