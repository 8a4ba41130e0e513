"""The gradient norm is that of one device, for every mesh and layout."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from tp_parity import CLOSE, tp_mesh

from torchspmd.parallel import clip_grad_norm_
from torchspmd.testing import Ranks

NORMS = (1.0, 2.0, 3.5, float("inf"))


def placed(mesh: object, placements: tuple, shape: tuple[int, ...]) -> tuple:
    """A parameter with a gradient in a layout, and the same on one device."""
    gradient = torch.randn(shape, dtype=torch.float64)
    expected = nn.Parameter(torch.zeros_like(gradient))
    expected.grad = gradient.clone()
    layout = tuple(Replicate() if isinstance(p, Partial) else p for p in placements)
    found = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, layout))
    local = distribute_tensor(gradient, mesh, layout).to_local()
    if layout != placements:
        local = local / mesh.size()
        found.grad = DTensor.from_local(local, mesh, placements)
    else:
        found.grad = distribute_tensor(gradient, mesh, layout)
    return found, expected


def compare(pairs: list, norm: float, foreach: bool | None) -> None:
    found, expected = zip(*pairs, strict=True)
    ours = clip_grad_norm_(found, 0.5, norm, foreach=foreach)
    theirs = nn.utils.clip_grad_norm_(expected, 0.5, norm)
    assert not isinstance(ours, DTensor)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    for a, b in pairs:
        grad = a.grad.full_tensor() if isinstance(a.grad, DTensor) else a.grad
        torch.testing.assert_close(grad, b.grad, **CLOSE)


def one_axis() -> None:
    mesh = tp_mesh()
    for norm in NORMS:
        for foreach in (None, False):
            layouts = ((Shard(0),), (Shard(1),), (Replicate(),), (Partial(),))
            pairs = [placed(mesh, layout, (5, 7)) for layout in layouts]
            pairs.append(placed(mesh, (Shard(0),), (1,)))  # most ranks hold nothing
            plain = nn.Parameter(torch.zeros(3, dtype=torch.float64))
            plain.grad = torch.ones(3, dtype=torch.float64)
            other = nn.Parameter(torch.zeros(3, dtype=torch.float64))
            other.grad = plain.grad.clone()
            compare([*pairs, (plain, other)], norm, foreach)


def test_one_axis(ranks: Ranks) -> None:
    ranks.run(one_axis)


def several_meshes() -> None:
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    for norm in NORMS:
        pairs = [
            placed(both, (Shard(0), Shard(1)), (5, 7)),
            placed(both, (Replicate(), Shard(0)), (5, 7)),
            placed(both, (Shard(0), Replicate()), (3, 2)),
            placed(both["tp"], (Shard(0),), (4, 3)),
            placed(alone, (Shard(0),), (9,)),
        ]
        compare(pairs, norm, None)


def test_several_meshes(ranks4: Ranks) -> None:
    ranks4.run(several_meshes)


def edges() -> None:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(torch.zeros(4))
    assert clip_grad_norm_(parameter, 1.0) == 0
    parameter.grad = torch.full((4,), float(dist.get_rank()))
    assert clip_grad_norm_(parameter, 100.0) == 2.0 * dist.get_rank()
    assert torch.equal(parameter.grad, torch.full((4,), float(dist.get_rank())))
    half = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    half.grad = torch.full((4,), 3e4, dtype=torch.float16)
    assert torch.isfinite(clip_grad_norm_([half], 1.0))
    half.grad.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_([half], 1.0, error_if_nonfinite=True)
    for bad in range(4):  # a maximum over the ranks may drop NaN
        shards = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
        values = torch.ones(4).index_fill(0, torch.tensor(bad), float("nan"))
        shards.grad = distribute_tensor(values, mesh, [Shard(0)])
        assert clip_grad_norm_([shards], 1.0, float("inf")).isnan()
    with pytest.raises(ValueError, match="norm_type is 0"):
        clip_grad_norm_([half], 1.0, 0)


def test_edges(ranks2: Ranks) -> None:
    ranks2.run(edges)
