"""A loss that reads the joined weight of a fused layer: the gradients of one device."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from tp_parity import CLOSE, tp_mesh

from torchspmd.parallel import FusedColwiseParallel, parallelize_module
from torchspmd.testing import Ranks


def penalty(weight: Any, bias: Any, rows: Any) -> Any:
    """Every row counts differently."""
    return (weight.square() * rows[:, None]).sum() + (bias.exp() * rows).sum()


def gradients(layer: nn.Module) -> list[torch.Tensor]:
    found = [
        torch.cat([p.grad.full_tensor() for p in held])
        for held in (layer.weight_parts, layer.bias_parts)
    ]
    layer.zero_grad()
    return found


def trains(parts: tuple[int, ...], num_heads: tuple[int, ...] | None) -> None:
    mesh = tp_mesh()
    torch.manual_seed(5)
    plain = nn.Linear(8, sum(parts)).double()
    style = FusedColwiseParallel(parts=parts, num_heads=num_heads)
    layer: Any = parallelize_module(copy.deepcopy(plain), mesh, style)
    rows = torch.arange(1.0, sum(parts) + 1, dtype=torch.float64)
    same = distribute_tensor(rows, mesh, (Replicate(),), src_data_rank=None)
    x = torch.ones(3, 8, dtype=torch.float64)
    penalty(plain.weight, plain.bias, rows).backward()
    layer(x).square().sum().backward()
    alone = gradients(layer)
    for term in (
        lambda: penalty(layer.weight, layer.bias, same).full_tensor(),
        lambda: penalty(layer.weight.full_tensor(), layer.bias.full_tensor(), rows),
    ):
        (layer(x).square().sum() + term()).backward()
        for found, without, expected in zip(
            gradients(layer), alone, (plain.weight.grad, plain.bias.grad), strict=True
        ):
            torch.testing.assert_close(found - without, expected, **CLOSE)


@pytest.mark.parametrize(
    ("parts", "num_heads"), [((5, 3, 4), None), ((8, 4, 4), (2, 1, 1))]
)
def test_a_penalty_on_the_joined_weight(
    parts: tuple[int, ...], num_heads: tuple[int, ...] | None, ranks2: Ranks
) -> None:
    ranks2.run(trains, parts, num_heads)


def trains_in_ddp() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(5)
    plain = nn.Linear(8, 12).double()
    style = FusedColwiseParallel(parts=(8, 4))
    layer: Any = parallelize_module(copy.deepcopy(plain), mesh["tp"], style)
    wrapped = DistributedDataParallel(layer, device_mesh=mesh["dp"])
    shards = dict(wrapped.named_parameters())  # DDP shows them until the first forward
    x = torch.arange(32, dtype=torch.float64).view(4, 8) / 32
    mine = x.chunk(2)[mesh["dp"].get_local_rank()]
    rows = torch.arange(1.0, 13, dtype=torch.float64)
    for _ in range(2):  # from the second on, DDP holds the parts as attributes
        plain.zero_grad()
        for shard in shards.values():
            shard.grad = None
        (plain(x).square().mean() + penalty(plain.weight, plain.bias, rows)).backward()
        terms = (layer.weight.full_tensor(), layer.bias.full_tensor(), rows)
        (wrapped(mine).square().mean() + penalty(*terms)).backward()
        for name in ("weight", "bias"):
            found = torch.cat(
                [p.grad for n, p in shards.items() if f"{name}_parts" in n]
            )
            torch.testing.assert_close(found, getattr(plain, name).grad, **CLOSE)


def test_a_penalty_with_data_parallelism(ranks2: Ranks) -> None:
    ranks2.run(trains_in_ddp)
