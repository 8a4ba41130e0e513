"""Values and gradients of mapped functions against one device, on real ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from layouts import S0, S1, P, R, all_gather, leaf_of_terms, reduce_scatter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, distribute_tensor

from torchspmd.local import local_map


def check_parity(mesh, mapped, whole, shapes, layouts, *, out=None):
    """Run a mapped function and its one-device meaning; compare everything."""
    torch.manual_seed(0)
    fulls = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes]
    expected = whole(*fulls)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    tensors = [
        leaf_of_terms(f.detach(), mesh, lay)
        for f, lay in zip(fulls, layouts, strict=True)
    ]
    result = mapped(*tensors)
    if out is not None:
        assert result.placements == tuple(out), result.placements
    assert result.shape == expected.shape, (result.shape, expected.shape)
    w = distribute_tensor(weight, mesh, [R] * mesh.ndim, src_data_rank=None)
    (result * w).sum().full_tensor().backward()
    torch.testing.assert_close(result.full_tensor(), expected)
    for index, (tensor, full) in enumerate(zip(tensors, fulls, strict=True)):
        grad = tensor.grad
        assert not any(p.is_partial() for p in grad.placements), (
            index,
            grad.placements,
        )
        torch.testing.assert_close(
            grad.full_tensor(), full.grad, msg=lambda m, i=index: f"argument {i}: {m}"
        )


# --- bodies -----------------------------------------------------------------------------


def mm(x, w):
    return x @ w


def gelu_mm(x, w):
    return torch.nn.functional.gelu(x) @ w


def mesh_of(*sizes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])


def mm_reduce(x, w):
    return funcol.all_reduce(x @ w, "sum", dist.group.WORLD)


def mm_gather(x, w):
    return all_gather(x @ w, 0, dist.group.WORLD)


def mm_scatter(x, w):
    return reduce_scatter(x @ w, "sum", 0, dist.group.WORLD)


def one_axis_cases():
    """(body, meaning, shapes, layouts, output layout) that need nothing written."""
    n = dist.get_world_size()
    a, b, c = 2 * n, 3 * n, n
    shapes = [(a, b), (b, c)]
    return {
        "rows of x": (mm, mm, shapes, [[S0], [R]], [S0]),
        "columns of w": (gelu_mm, gelu_mm, shapes, [[R], [S1]], [S1]),
        "partial output": (gelu_mm, gelu_mm, shapes, [[S1], [S0]], [P]),
        "all_reduce inside": (mm_reduce, mm, shapes, [[S1], [S0]], [R]),
        "all_gather inside": (mm_gather, mm, shapes, [[S0], [R]], [R]),
        "reduce_scatter inside": (mm_scatter, mm, shapes, [[S1], [S0]], [S0]),
        "same work": (gelu_mm, gelu_mm, shapes, [[R], [R]], [R]),
        "partial input": (mm, mm, shapes, [[P], [R]], [P]),
    }


def run_one_axis():
    mesh = mesh_of(dist.get_world_size())
    for name, (body, meaning, shapes, layouts, out) in one_axis_cases().items():
        mapped = local_map(body, out, tuple(layouts))
        try:
            check_parity(mesh, mapped, meaning, shapes, layouts, out=out)
            checked = local_map(body, out, tuple(layouts), check=True)
            check_parity(mesh, checked, meaning, shapes, layouts, out=out)
        except Exception as error:
            raise AssertionError(name) from error


def run_uneven():
    mesh = mesh_of(dist.get_world_size())
    n = dist.get_world_size()
    for rows in (2 * n + 1, 2 * n - 1, n, n - 1, 1):
        for body, layouts, out in (
            (mm, [[S0], [R]], [S0]),
            (gelu_mm, [[R], [S1]], [S1]),
            (gelu_mm, [[S1], [S0]], [P]),
            (mm_reduce, [[S1], [S0]], [R]),
        ):
            shapes = [(rows, 3), (3, rows)]
            if layouts[0] == [S1]:
                shapes = [(3, rows), (rows, 3)]
            meaning = mm if body is mm_reduce else body
            mapped = local_map(body, out, tuple(layouts), check=True)
            check_parity(mesh, mapped, meaning, shapes, layouts, out=out)


def run_two_axes():
    mesh = mesh_of(2, dist.get_world_size() // 2)
    shapes = [(8, 6), (6, 4)]
    cases = [
        (gelu_mm, [[S0, R], [R, S1]], [S0, S1]),
        (gelu_mm, [[S0, S1], [R, S0]], [S0, P]),
        (gelu_mm, [[S0, S0], [R, R]], [S0, S0]),
        (gelu_mm, [[R, R], [S1, S1]], [S1, S1]),
        (gelu_mm, [[R, R], [R, S1]], [R, S1]),
        (gelu_mm, [[S1, S0], [S0, R]], [P, S0]),
    ]
    for body, layouts, out in cases:
        mapped = local_map(body, out, tuple(layouts), check=True)
        check_parity(mesh, mapped, body, shapes, layouts, out=out)

    def reduce_over_tp(x, w):
        return funcol.all_reduce(x @ w, "sum", mesh.get_group("tp"))

    mapped = local_map(reduce_over_tp, [S0, R], ([S0, S1], [R, S0]), check=True)
    check_parity(mesh, mapped, mm, shapes, [[S0, S1], [R, S0]], out=[S0, R])
    mapped = local_map(reduce_over_tp, [R, R], ([R, S1], [R, S0]), check=True)
    check_parity(mesh, mapped, mm, shapes, [[R, S1], [R, S0]], out=[R, R])


def run_averages():
    """A mean over ranks, and a split that only the function knows about."""
    mesh = mesh_of(dist.get_world_size())
    n, rank = dist.get_world_size(), dist.get_rank()
    mapped = local_map(
        lambda x, w: (x @ w).mean(), [Partial("avg")], ([S0], [R]), check=True
    )
    check_parity(
        mesh, mapped, lambda x, w: (x @ w).mean(), [(2 * n, 3), (3, 2)], [[S0], [R]]
    )

    def by_rank(x, w):
        mine = torch.zeros(n, 1, dtype=x.dtype)
        mine[rank] = 1
        return funcol.all_reduce(x @ w * mine, "sum", dist.group.WORLD)

    mapped = local_map(by_rank, [R], ([R], [R]), check=True)
    check_parity(mesh, mapped, mm, [(n, 3), (3, 2)], [[R], [R]], out=[R])


def run_residual():
    """A value that a region and plain DTensor code share adds up both gradients."""
    mesh = mesh_of(dist.get_world_size())
    torch.manual_seed(0)
    x, w = torch.randn(4, 6).double(), torch.randn(6, 12).double()
    single = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    shared = single[0].sin()
    loss = (shared @ single[1]).square().sum() + (shared * shared.exp()).sum()
    loss.backward()
    a, b = leaf_of_terms(x, mesh, [R]), leaf_of_terms(w, mesh, [S1])
    shared = a.sin()
    y = local_map(mm, [S1], ([R], [S1]), check=True)(shared, b)
    loss = y.square().sum().redistribute(placements=[R]) + (shared * shared.exp()).sum()
    loss.backward()
    torch.testing.assert_close(a.grad.full_tensor(), single[0].grad)
    torch.testing.assert_close(b.grad.full_tensor(), single[1].grad)


def run_several_outputs():
    """Outputs of all kinds at once, some of them unused."""
    mesh = mesh_of(dist.get_world_size())
    torch.manual_seed(0)
    n = dist.get_world_size()
    x, w = torch.randn(2 * n, 6).double(), torch.randn(6, 3).double()

    def body(x, w):
        y = x @ w
        total = funcol.all_reduce(y.square().sum(), "sum", dist.group.WORLD)
        return y, y.sum(0), total, w.square().sum(), x.detach()

    for used in ((0, 1, 2, 3), (0,), (1,), (2,), (3,), (1, 3), (2, 3)):
        single = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        y = single[0] @ single[1]
        whole = [y.exp().sum(), y.sum(0).sin().sum(), y.square().sum() ** 2]
        whole.append(single[1].square().sum() ** 3)
        sum(whole[i] for i in used).backward()
        a, b = leaf_of_terms(x, mesh, [S0]), leaf_of_terms(w, mesh, [R])
        out = ([S0], [P], [R], [R], [S0])
        got = local_map(body, out, ([S0], [R]), check=True)(a, b)
        parts = [
            got[0].exp().sum().full_tensor(),
            got[1].redistribute(placements=[R]).sin().sum().to_local(),
            got[2].to_local() ** 2,
            got[3].to_local() ** 3,
        ]
        sum(parts[i] for i in used).backward()
        for tensor, one in ((a, single[0]), (b, single[1])):
            if one.grad is None:
                assert tensor.grad is None or not tensor.grad.full_tensor().any()
            else:
                torch.testing.assert_close(tensor.grad.full_tensor(), one.grad)


def test_residuals(ranks3: Any) -> None:
    ranks3.run(run_residual)


@pytest.mark.parametrize("ranks", ["ranks2", "ranks3"])
def test_several_outputs(ranks: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(ranks).run(run_several_outputs)


@pytest.mark.parametrize("ranks", ["ranks2", "ranks3", "ranks4"])
def test_one_axis(ranks: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(ranks).run(run_one_axis)


@pytest.mark.parametrize("ranks", ["ranks2", "ranks3", "ranks4"])
def test_uneven_sizes(ranks: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(ranks).run(run_uneven)


def test_two_axes(ranks4: Any) -> None:
    ranks4.run(run_two_axes)


@pytest.mark.parametrize("ranks", ["ranks2", "ranks3"])
def test_averages_and_hidden_splits(ranks: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(ranks).run(run_averages)
