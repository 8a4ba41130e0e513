"""What autograd does not see: in-place collectives, and writes into copies."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from layouts import S0, P, R, put

from torchspmd.errors import LayoutError
from torchspmd.local import local_map
from torchspmd.testing import fake_mesh

pytestmark = [
    # torch's own word about an in-place collective, in backward
    pytest.mark.filterwarnings("ignore:c10d.*autograd kernel was not registered")
]


def reduce_in_place(x: Any, w: Any) -> Any:
    term = (x * w).square().sum()
    dist.all_reduce(term)
    return term


def reduce_silently(x: Any, w: Any) -> Any:
    term = (x * w).square().sum().clone()
    with torch.no_grad():
        dist.all_reduce(term)
    return term


def reduce_twin(x: Any, w: Any) -> Any:
    term = (x * w).square().sum()
    dist.all_reduce(term.data)
    return term


def scale_by_total(x: Any, w: Any) -> Any:
    total = (x * w).sum()
    dist.all_reduce(total.detach())
    return x * w * total


@pytest.mark.parametrize("check", [None, True])
@pytest.mark.parametrize(
    ("body", "out"),
    [
        (reduce_in_place, [R]),
        (reduce_silently, [R]),
        (reduce_twin, [R]),
        (scale_by_total, [S0]),
    ],
)
def test_in_place_collectives(
    tp2: Any, body: Any, out: Any, check: bool | None
) -> None:
    """Data without a gradient, so that it is not in the recorded graph."""
    x = put(torch.ones(4, 3), tp2, S0)
    w = put(torch.ones(3), tp2, R).requires_grad_()
    mapped = local_map(body, out, ([S0], [R]), check=check)
    for _ in range(2):  # a region that was refused stays watched
        with pytest.raises(LayoutError) as caught:
            mapped(x, w)
    text = str(caught.value)
    assert "a gradient's layout cannot be derived (mesh tp=2)" in text
    assert (
        "c10d::allreduce_ over 'tp': was called in place on a tensor with a "
        "gradient; autograd does not see it"
    ) in text
    assert "return the partial value as Partial() over 'tp'" in text
    assert "t.detach().clone()" in text
    mapped(x, w.detach())  # no gradient, no question


def send_on(x: Any) -> Any:
    dist.send(x, 1)
    got = torch.empty_like(x)
    dist.recv(got, 1)
    return x * got


def gather_parts(x: Any) -> Any:
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x)
    return x * sum(parts)


def scatter_parts(x: Any) -> Any:
    got = torch.empty_like(x[:1])
    dist.reduce_scatter(got, list(x.chunk(2)))
    return x * got


def broadcast_one(x: Any) -> Any:
    return x * funcol.broadcast(x, 0, dist.group.WORLD)


SENDING = {
    send_on: "c10d::send",
    gather_parts: "c10d::allgather_",
    scatter_parts: "c10d::reduce_scatter_",
    broadcast_one: "_c10d_functional::broadcast",
}


@pytest.mark.parametrize("body", SENDING)
def test_collectives_that_send_a_tensor_with_a_gradient(tp2: Any, body: Any) -> None:
    x = put(torch.ones(4, 3), tp2, S0)
    for options in ({}, {"in_grad_placements": ([S0],)}, {"check": True}):
        mapped = local_map(body, [S0], ([S0],), **options)
        for _ in range(2):
            with pytest.raises(LayoutError) as caught:
                mapped(x.detach().requires_grad_())
    text = str(caught.value)
    assert (
        f"{SENDING[body]} over 'tp': sends a tensor with a gradient; autograd does not "
        "see it, so the gradient of what other ranks compute with it is lost"
    ) in text
    assert "send t.detach()" in text
    mapped(x)  # no gradient, no question

    def stopped(x: Any) -> Any:
        with torch.no_grad():
            return x + body(x)

    local_map(stopped, [S0], ([S0],))(x.detach().requires_grad_())


def test_in_place_collectives_that_somebody_answers_for(tp2: Any) -> None:
    x = put(torch.ones(4, 3), tp2, S0)
    w = put(torch.ones(3), tp2, R).requires_grad_()
    for options in ({"out_grad_placements": [R]}, {"in_grad_placements": (None, [P])}):
        local_map(reduce_in_place, [R], ([S0], [R]), **options)(x, w).backward()
        assert w.grad is not None
        # The whole gradient enters; fake reductions leave each rank's own term.
        assert w.grad.to_local().tolist() == [4.0] * 3
        w.grad = None


class Reduce(torch.autograd.Function):
    """Reduces in place with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(value)
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def gather(x: Any) -> Any:
    whole = x.new_empty(2 * len(x), *x.shape[1:])
    dist.all_gather(list(whole.chunk(2)), x)
    return whole


def total_of(x: Any) -> Any:
    total = x.detach().sum()
    dist.all_reduce(total)
    return total


@pytest.mark.parametrize(
    ("body", "out"),
    [
        (lambda x, w: gather(x) * w, [R]),
        (lambda x, w: funcol.all_reduce(x, "sum", dist.group.WORLD) * w, [R]),
        (lambda x, w: x * w * total_of(x), [S0]),
        (lambda x, w: x * w * Reduce.apply((x * w).sum()), [S0]),
        (lambda x, w: x * w * total_of(x).requires_grad_(), [S0]),
    ],
)
def test_collectives_that_stay_allowed(tp2: Any, body: Any, out: Any) -> None:
    x = put(torch.ones(4, 3), tp2, S0)
    w = put(torch.ones(3), tp2, R).requires_grad_()
    local_map(body, out, ([S0], [R]))(x, w).sum().backward()
    assert w.grad is not None


def test_only_regions_with_in_place_collectives_stay_watched() -> None:
    watched = []

    def body(x: Any, w: Any, is_data: bool) -> Any:
        modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        watched.append(len(modes))
        return (gather(x) if is_data else x) * w

    with fake_mesh(2, ("tp",)) as mesh:
        x = put(torch.ones(4, 3), mesh, S0)
        w = put(torch.ones(3), mesh, R).requires_grad_()
        for is_data, out in ((False, [S0]), (True, [R])):
            mapped = local_map(body, out)
            for _ in range(3):
                mapped(x, w, is_data)
    assert watched == [1, 0, 0, 1, 1, 1]


def append(cache: Any, value: Any) -> Any:
    cache.add_(value)
    return cache.sum(0)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_a_write_into_a_redistributed_argument(mode: Any) -> None:
    with fake_mesh(2, ("tp",)) as mesh, mode():
        cache, value = put(torch.zeros(4, 3), mesh, R), put(torch.ones(4, 3), mesh, S0)
        mapped = local_map(append, [P], ([S0], [S0]), redistribute_inputs=True)
        with pytest.raises(LayoutError) as caught:
            mapped(cache, value)
        text = str(caught.value)
        assert "local_map on 'append': a write would be lost (mesh tp=2)" in text
        assert (
            "args[0] 'cache': has [Replicate()], and the function wrote into the copy "
            "that redistribute_inputs=True made of it"
        ) in text
        assert "Redistribute args[0] 'cache' before the call" in text
        cache = put(torch.zeros(4, 3), mesh, S0)
        mapped(cache, put(torch.ones(4, 3), mesh, R))  # only read
        assert cache.to_local().tolist() == [[1.0] * 3] * 2
