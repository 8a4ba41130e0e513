"""``check=True``: what it finds on real ranks, what it says, and what it costs."""

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from layouts import S0, S1, P, R, leaf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from torchspmd import CommDebugMode
from torchspmd.errors import CheckError, LayoutError
from torchspmd.local import local_map


def make_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def violation(call):
    try:
        call()
    except CheckError as error:
        assert isinstance(error, ValueError)
        return str(error)
    raise AssertionError("nothing found")


def tensors(x_layout, w_layout, n=12):
    mesh = make_mesh()
    x = leaf(torch.arange(2.0 * n).reshape(2, n) / 7, mesh, x_layout)
    w = leaf(torch.arange(3.0 * n).reshape(n, 3) / 5, mesh, w_layout)
    return x, w


def mm(x, w):
    return x @ w


def mm_all_reduce(x, w):
    return funcol.all_reduce(x @ w, "sum", dist.group.WORLD)


class CopyThrough(torch.autograd.Function):
    """Identity forward, all-reduce backward: it reduces gradients by itself."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def run_not_replicated():
    x, w = tensors([S1], [S0])
    with torch.no_grad():
        return violation(lambda: local_map(mm, [R], ([S1], [S0]), check=True)(x, w))


def test_an_output_that_is_not_replicated(ranks3: Any) -> None:
    texts = ranks3.run(run_not_replicated)
    assert len(set(texts)) == 1  # every rank says the same, and none waits for another
    assert texts[0].startswith(
        "local_map on 'mm': an output is not what out_placements says (mesh tp=3)\n\n"
        "  * output: declared Replicate() over 'tp', but rank 1 of 'tp' differs from rank "
        "0 by up to "
    )
    assert "Declare output as Partial() over 'tp' if it is a partial value" in texts[0]


def run_summed_twice():
    x, w = tensors([S1], [S0])
    mapped = local_map(mm_all_reduce, [P], ([S1], [S0]), check=True)
    with_graph = violation(lambda: mapped(x, w))
    with torch.no_grad():
        without = violation(lambda: mapped(x, w))
        # Equal terms of a sum are no proof: nothing was reduced here.
        ones = local_map(lambda x: torch.ones(3), [P], ([S1],), check=True)
        assert ones(x).full_tensor()[0] == dist.get_world_size()
    return with_graph, without


def test_an_output_that_is_summed_twice(ranks2: Any) -> None:
    for text in ranks2.run(run_summed_twice)[0]:
        assert "output: declared Partial() over 'tp', but the function reduces" in text
        assert "all 2 ranks hold the same values" in text
        assert "it would be summed twice" in text


def run_gradient_differs():
    """The function splits its work, and nothing in its layouts says so."""
    x, w = tensors([R], [R])
    half = x.shape[1] // dist.get_world_size()
    start = half * dist.get_rank()

    def by_rank(x, w):
        mine = x[:, start : start + half] @ w[start : start + half]
        whole = mine.detach().clone()
        dist.all_reduce(whole)
        return mine + (whole - mine.detach())

    mapped = local_map(by_rank, [R], ([R], [R]), check=True)
    return violation(lambda: mapped(x, w).sum().backward())


def test_a_gradient_that_is_not_replicated(ranks2: Any) -> None:
    texts = ranks2.run(run_gradient_differs)
    assert len(set(texts)) == 1
    assert "a gradient is not what its layout says (mesh tp=2)" in texts[0]
    assert "'w': its gradient is taken as Replicate() over 'tp', but rank 1" in texts[0]
    assert "Write Partial() for 'tp' in in_grad_placements" in texts[0]


def run_gradient_summed_twice():
    x, w = tensors([R], [S1])

    def body(x, w):
        return CopyThrough.apply(x) @ w

    mapped = local_map(body, [S1], ([R], [S1]), check=True)
    text = violation(lambda: mapped(x, w).square().sum().backward())
    x.grad = w.grad = None
    declared = local_map(body, [S1], ([R], [S1]), ([R], None), check=True)
    declared(x, w).square().sum().backward()
    single = [t.full_tensor().detach().requires_grad_() for t in (x, w)]
    mm(*single).square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), single[0].grad)
    return text


def test_a_gradient_that_is_summed_twice(ranks3: Any) -> None:
    text = ranks3.run(run_gradient_summed_twice)[0]
    assert "args[0] 'x': its gradient is taken as Partial() over 'tp'" in text
    assert "region reduces over 'tp' in backward and all 3 ranks hold the same" in text
    assert "Write Replicate() for 'tp' in in_grad_placements" in text


def run_badly_cut():
    mesh = make_mesh()
    rank = dist.get_rank()
    x = leaf(torch.ones(4, 2), mesh, [R])
    mapped = local_map(
        lambda x: x[: 3 if rank == 0 else 1], [S0], ([R],), out_shapes=(4, 2)
    )
    try:
        mapped(x)
    except LayoutError as error:
        return str(error)
    raise AssertionError("not refused")


def test_pieces_of_another_size(ranks2: Any) -> None:
    for text in ranks2.run(run_badly_cut):
        assert "out_shapes give it the whole shape [4, 2]" in text
        assert "this rank's part of which is [2, 2]" in text


def run_pieces_unseen():
    """Sizes that one rank cannot know to be wrong."""
    mesh, rank = make_mesh(), dist.get_rank()
    x = leaf(torch.ones(4, 2), mesh, [R])
    uneven = local_map(lambda x: x[: 1 + rank], [S0], ([R],), check=True)
    return violation(lambda: uneven(x))


def test_pieces_that_only_all_ranks_can_judge(ranks2: Any) -> None:
    text = ranks2.run(run_pieces_unseen)[0]
    assert "but rank 0 of 'tp' holds 1 of 3 along dim 0, not the 2 that" in text


def run_nan_and_dtypes():
    mesh = make_mesh()
    x = leaf(torch.tensor([1.0, float("nan"), 3.0]), mesh, [R])
    flags = distribute_tensor(torch.tensor([True, False]), mesh, [R])
    numbers = distribute_tensor(torch.ones(2, dtype=torch.complex64), mesh, [R])
    same = local_map(lambda *t: t, ([R], [R], [R]), check=True)
    same(x, flags, numbers)
    rank = dist.get_rank()

    def differ(x):
        return x * float("nan") if rank == 1 else x

    return violation(lambda: local_map(differ, [R], check=True)(x))


def test_values_that_are_not_finite(ranks2: Any) -> None:
    text = ranks2.run(run_nan_and_dtypes)[0]
    assert "differs from rank 0 by its shape, its dtype or a value that is not" in text


def run_ledger():
    """Checks are in the ledger, marked, and off means none."""
    x, w = tensors([S1], [S0])
    counts = {}
    for name, options in {
        "off": {},
        "on": {"check": True},
        "environment": {},
        "overruled": {"check": False},
    }.items():
        if name in ("environment", "overruled"):
            os.environ["TORCHSPMD_CHECK"] = "1"
        mapped = local_map(mm_all_reduce, [R], ([S1], [S0]), **options)
        try:
            with CommDebugMode() as mode:
                mapped(x, w).sum().backward()
        finally:
            os.environ.pop("TORCHSPMD_CHECK", None)
        total = mode.ledger.total
        counts[name] = (total(check=False).count, total(check=True).count)
    return counts


def test_checks_are_marked_in_the_ledger(ranks2: Any) -> None:
    counts = ranks2.run(run_ledger)[0]
    assert counts["off"] == counts["overruled"] == (2, 0)
    for name in ("on", "environment"):
        assert counts[name][0] == 2
        assert counts[name][1] > 0


def run_wrong_size_on_one_rank():
    """One row for two ranks, declared as replicas of the whole: rank 1 has none of it."""
    mesh = make_mesh()
    x = leaf(torch.ones(1, 4), mesh, [S0])
    shapes = ((1, 4), (1, 4))
    mapped = local_map(
        lambda x: (x * 2, x * 3), ([S0], [R]), ([S0],), out_shapes=shapes, check=True
    )
    try:
        mapped(x)
    except (CheckError, LayoutError) as error:
        return str(error)
    return ""


def test_a_refusal_on_one_rank_is_one_on_all(ranks2: Any) -> None:
    first, second = ranks2.run(run_wrong_size_on_one_rank, timeout=60.0)
    assert "rank 1 has refused this call" in first
    assert "Its error says why." in first
    assert "output[1]: has [0, 4] here" in second
