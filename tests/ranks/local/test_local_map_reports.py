"""Cases from real reports: what torch's own local_map computes, and what ours does."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from layouts import S0, S1, P, R, leaf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.distributed.tensor.experimental import local_map as torch_local_map

from torchspmd.errors import LayoutError
from torchspmd.local import local_map


def make_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def whole(tensor):
    """The gathered gradient of a leaf."""
    return tensor.grad.full_tensor()


def refusal(call, *args):
    try:
        call(*args)
    except LayoutError as error:
        return str(error)
    raise AssertionError("not refused")


# --- torchtitan #2387 and #1805: a replicated input of split work -----------------------


def expert_inputs():
    """Tokens and router weights on every rank, each rank has its own experts."""
    mesh = make_mesh()
    x = torch.arange(6, dtype=torch.float64).reshape(3, 2) + 1
    router = torch.tensor([[1.0, -1.0], [0.5, 2.0]], dtype=torch.float64)
    experts = torch.arange(8, dtype=torch.float64).reshape(2, 4) / 8
    return mesh, x, router, experts


def moe(x, router, experts):
    return (x * (x @ router).sigmoid()) @ experts


def run_split_work(which):
    mesh, x, router, experts = expert_inputs()
    single = [t.clone().requires_grad_() for t in (x, router, experts)]
    moe(*single).square().sum().backward()
    layouts = ([R], [R], [S1])
    tensors = [
        leaf(t, mesh, layout)
        for t, layout in zip((x, router, experts), layouts, strict=True)
    ]
    mapped = which(moe, [S1], layouts)
    mapped(*tensors).square().sum().backward()
    return [
        torch.allclose(whole(t), s.grad) for t, s in zip(tensors, single, strict=True)
    ], [t.grad.to_local() for t in tensors[:2]]


def test_replicated_input_of_split_work(ranks2: Any) -> None:
    upstream = ranks2.run(run_split_work, torch_local_map)
    assert [result[0] for result in upstream] == [[False, False, True]] * 2
    # The weights of the router drift apart after one step, without a word.
    assert not torch.equal(upstream[0][1][1], upstream[1][1][1])

    ours = ranks2.run(run_split_work, local_map)
    assert [result[0] for result in ours] == [[True, True, True]] * 2
    assert torch.equal(ours[0][1][1], ours[1][1][1])


# --- pytorch #172932: local and back of a partial tensor --------------------------------


def run_partial_round_trip(which):
    mesh = make_mesh()
    x = leaf(torch.tensor([1.0, 2.0]), mesh, [R])
    w = leaf(torch.tensor([3.0, 5.0]), mesh, [S0])
    partial = (x * w).sum() * torch.ones(2)[0]
    assert partial.placements == (P,)
    same = which(lambda t: t, [P], ([P],))(partial)
    same.square().full_tensor().backward()
    return whole(x).tolist(), whole(w).tolist()


def test_round_trip_of_a_partial_tensor(ranks2: Any) -> None:
    # 2 * (3 + 10) * (3, 5) and 2 * 13 * (1, 2); torch 2.10 and before gave twice that.
    expected = [([78.0, 130.0], [26.0, 52.0])] * 2
    assert ranks2.run(run_partial_round_trip, local_map) == expected
    assert ranks2.run(run_partial_round_trip, torch_local_map) == expected


# --- pytorch #172812: uneven shards -----------------------------------------------------


def run_uneven(which):
    mesh = make_mesh()
    x = leaf(torch.arange(14.0).reshape(7, 2), mesh, [S0])
    y = which(lambda t: t * 2, [S0], ([S0],))(x)
    return tuple(y.shape)


def test_uneven_shards(ranks3: Any) -> None:
    assert ranks3.run(run_uneven, torch_local_map) == [(9, 2), (9, 2), (3, 2)]
    assert ranks3.run(run_uneven, local_map) == [(7, 2)] * 3


# --- pytorch #182031: trees of arguments and results ------------------------------------


def run_trees():
    mesh = make_mesh()
    batch = {
        "tokens": distribute_tensor(torch.ones(4, 2), mesh, [S0]),
        "extra": (distribute_tensor(torch.ones(2, 3), mesh, [R]), 5),
    }

    def body(batch, scale):
        y = batch["tokens"] @ batch["extra"][0]
        return {"y": y * scale, "stats": (y.sum(), batch["extra"][1])}

    mapped = local_map(
        body,
        out_placements={"y": [S0], "stats": ([P], None)},
        in_placements=({"tokens": [S0], "extra": ([R], None)}, None),
    )
    result = mapped(batch, 2.0)
    prefix = local_map(body, {"y": [S0], "stats": ([P], None)}, {"batch": None})
    again = prefix(batch, scale=2.0)
    assert torch.equal(again["y"].full_tensor(), result["y"].full_tensor())
    flat = local_map(body, ([P], None, [S0]), ([R], None, [S0], None))
    try:
        flat(batch, 2.0)
    except LayoutError:
        pass  # the flat order is that of the leaves: tokens, extra, 5
    flat = local_map(body, ([S0], [P], None), ([S0], [R], None, None))
    assert torch.equal(flat(batch, 2.0)["y"].full_tensor(), result["y"].full_tensor())
    total, number = result["stats"]
    return result["y"].full_tensor().sum().item(), total.full_tensor().item(), number


def test_trees(ranks2: Any) -> None:
    assert ranks2.run(run_trees) == [(48.0, 24.0, 5)] * 2


# --- pytorch #186030: None for a DTensor, and keyword arguments -------------------------


def run_none(which):
    mesh = make_mesh()
    x, w = leaf(torch.ones(4, 2), mesh, [S0]), leaf(torch.ones(2, 3), mesh, [R])
    try:
        y = which(lambda x, w: x @ w, [S0], ([S0], None))(x, w)
    except AssertionError as error:
        return str(error)[:13]
    y.sum().backward()
    return whole(w).tolist()


def run_keyword(which):
    mesh = make_mesh()
    x, w = leaf(torch.ones(4, 2), mesh, [S0]), leaf(torch.ones(2, 3), mesh, [R])
    seen = []

    def body(x, *, w):
        seen.append(type(w) is torch.Tensor)
        return x @ w

    try:
        y = which(body, [S0], ([S0],))(x, w=w)
    except Exception as error:
        return type(error).__name__
    y.sum().backward()
    return seen, whole(w).tolist()


def test_none_and_keywords(ranks2: Any) -> None:
    expected = [[4.0] * 3] * 2
    assert ranks2.run(run_none, torch_local_map) == ["DTensor input"] * 2
    assert ranks2.run(run_none, local_map) == [expected] * 2
    assert ranks2.run(run_keyword, torch_local_map) == ["RuntimeError"] * 2
    assert ranks2.run(run_keyword, local_map) == [([True], expected)] * 2


# --- reductions inside: doubled, redundant, invisible, custom ---------------------------


def mm_all_reduce(x, w):
    return funcol.all_reduce(x @ w, "sum", dist.group.WORLD)


def run_reduction(which):
    mesh = make_mesh()
    x, w = leaf(torch.ones(2, 4), mesh, [S1]), leaf(torch.ones(4, 3), mesh, [S0])
    y = which(mm_all_reduce, [R], ([S1], [S0]))(x, w)
    y.sum().backward()
    return whole(x)[0, 0].item(), whole(w)[0, 0].item()


def test_all_reduce_inside(ranks3: Any) -> None:
    """The gradient of a reduced value enters once, not once for each rank."""
    assert ranks3.run(run_reduction, torch_local_map) == [(9.0, 6.0)] * 3
    assert ranks3.run(run_reduction, local_map) == [(3.0, 2.0)] * 3


class CopyThrough(torch.autograd.Function):
    """An all-reduce whose backward passes the gradient on, as Megatron has it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def run_custom_reduction():
    mesh = make_mesh()
    layouts = ([S1], [S0])

    def body(x, w):
        return CopyThrough.apply(x @ w)

    def in_place(x, w):
        y = x @ w
        dist.all_reduce(y.detach())
        return y

    x, w = leaf(torch.ones(2, 4), mesh, [S1]), leaf(torch.ones(4, 3), mesh, [S0])
    texts = [refusal(local_map(f, [R], layouts), x, w) for f in (body, in_place)]
    grads = []
    for options in ({"out_grad_placements": [R]}, {"in_grad_placements": layouts}):
        x.grad = w.grad = None
        local_map(body, [R], layouts, check=True, **options)(x, w).sum().backward()
        grads.append((whole(x)[0, 0].item(), whole(w)[0, 0].item()))
    return texts, grads


def test_custom_reductions(ranks2: Any) -> None:
    texts, grads = ranks2.run(run_custom_reduction)[0]
    assert (
        "args[0] 'x': has [Shard(1)], while output is Replicate() over 'tp'" in texts[0]
    )
    assert "the custom autograd function 'CopyThrough' is between them" in texts[0]
    assert "no differentiable collective is between them" in texts[1]
    for text in texts:
        assert "Return output as Partial() over 'tp' and let DTensor reduce it" in text
        assert "out_grad_placements=[Replicate()]" in text
        assert "in_grad_placements=... for every argument" in text
    assert grads == [(3.0, 2.0)] * 2


def run_forward_only():
    """Without a gradient nothing is refused for its sake."""
    mesh = make_mesh()
    x = distribute_tensor(torch.ones(2, 4), mesh, [S1])
    w = leaf(torch.ones(4, 3), mesh, [S0])
    mapped = local_map(lambda x, w: CopyThrough.apply(x @ w), [R], ([S1], [S0]))
    with torch.no_grad():
        first = mapped(x, w).full_tensor()
    return torch.equal(first, mapped(x, w.detach()).full_tensor())


def test_forward_only_is_never_refused(ranks2: Any) -> None:
    assert ranks2.run(run_forward_only) == [True, True]


def run_redundant():
    mesh = make_mesh()
    x, w = leaf(torch.ones(2, 4), mesh, [R]), leaf(torch.ones(4, 3), mesh, [R])
    text = refusal(local_map(lambda x, w: x @ w, [R], ([R], [R]), ([P], [R])), x, w)
    upstream = torch_local_map(lambda x, w: x @ w, [R], ([R], [R]), ([P], [R]))
    upstream(x, w).sum().backward()
    return text, whole(x)[0, 0].item()


def test_redundant_reduction(ranks2: Any) -> None:
    text, upstream = ranks2.run(run_redundant)[0]
    assert upstream == 6.0  # twice the gradient
    assert "args[0] 'x': in_grad_placements asks [Partial()]" in text
    assert "reducing it would multiply the gradient by 2" in text


def run_averaged():
    mesh = make_mesh()
    x, w = leaf(torch.ones(2, 4), mesh, [S0]), leaf(torch.ones(4, 3), mesh, [R])

    def body(x, w):
        return mm_all_reduce(x, w).sum()

    mapped = local_map(body, [R], ([S0], [R]), (None, [Partial("avg")]))
    return refusal(mapped, x, w)


def test_a_mean_of_divided_gradients(ranks2: Any) -> None:
    text = ranks2.run(run_averaged)[0]
    assert "asks [Partial('avg')]" in text
    assert "is divided by the 2 ranks of 'tp'" in text


def run_other_reductions():
    mesh = make_mesh()
    x = leaf(torch.ones(4, 2), mesh, [S0])
    most = local_map(lambda x: x.amax(0), [Partial("max")], ([S0],))
    mean = DTensor.from_local(torch.ones(2), mesh, [Partial("avg")]).requires_grad_()
    same = local_map(lambda x: x * 2, [Partial("avg")], ([Partial("avg")],))
    return refusal(most, x), refusal(same, mean)


def test_reductions_that_are_no_sum(ranks2: Any) -> None:
    most, same = ranks2.run(run_other_reductions)[0]
    assert (
        "output: has [Partial('max')]; the gradient through a reduction by 'max'"
        in most
    )
    assert "args[0] 'x': has [Partial('avg')]" in same
    assert "or reduce by sum" in same


# --- pieces of other sizes: each rank would have another whole shape --------------------


def keep_some(x):
    return x[: dist.get_rank() + 1]


def keep_two(x):
    return x[:2]


def make_pieces():
    mesh = make_mesh()
    x = leaf(torch.ones(8, 2), mesh, [S0])
    found = []
    for body in (keep_two, keep_some):
        try:
            found.append(tuple(local_map(body, [S0], ([S0],))(x).shape))
        except LayoutError as error:
            found.append(str(error))
        dist.barrier()
    return found


def test_pieces_of_other_sizes(ranks2):
    """The rank that comes second says so, and nobody waits for a collective."""
    even, pieces = zip(*ranks2.run(make_pieces), strict=True)
    assert set(even) == {(4, 2)}
    (text,) = [piece for piece in pieces if isinstance(piece, str)]
    assert "local_map on 'keep_some': an output's size (mesh tp=2)" in text
    assert "makes [2, 2]" in text and "makes [4, 2]" in text
    assert "write the whole shape of output in out_shapes" in text
