"""DistributedDataParallel around parallel modules of each kind: training, state dicts."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from tp_parity import CLOSE, assert_same_state

from torchspmd.parallel import (
    ColwiseParallel,
    ExpertParallel,
    FusedColwiseParallel,
    ReplicateParallel,
    RowwiseParallel,
    parallelize_module,
)
from torchspmd.testing import Ranks


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 8, 6) / 3)
        self.down = nn.Parameter(torch.randn(4, 6, 8) / 3)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(torch.einsum("td,edh->teh", x, self.up))
        added = torch.einsum("teh,ehd,te->td", hidden, self.down, weights)
        return added * self.scale


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.experts = (
            nn.LayerNorm(8),
            nn.Linear(8, 4),
            Experts(),
        )
        self.gate_up, self.down = nn.Linear(8, 24), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        x = x + self.experts(x, self.router(x).softmax(-1))
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(gate.sigmoid() * up)


PLAN = {
    "norm": ReplicateParallel(),
    "router": ReplicateParallel(),
    "experts": ExpertParallel(
        parameter_placements={"up": Shard(0), "down": Shard(0), "scale": Replicate()},
        input_layouts=(Replicate(), Replicate()),
        desired_input_layouts=(Replicate(), Shard(-1)),
    ),
    "gate_up": FusedColwiseParallel(parts=(12, 12)),
    "down": RowwiseParallel(),
}


def build(mesh: DeviceMesh) -> tuple[nn.Module, nn.Module, nn.Module]:
    """One device's model, the parallel one, and that inside of DDP."""
    torch.manual_seed(3)
    plain = Mixture().double()
    model = parallelize_module(copy.deepcopy(plain), mesh["tp"], PLAN)
    return plain, model, DistributedDataParallel(model, device_mesh=mesh["dp"])


def whole_mesh() -> DeviceMesh:
    size = (2, dist.get_world_size() // 2)
    return init_device_mesh("cpu", size, mesh_dim_names=("dp", "tp"))


def batch(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 8, dtype=torch.float64, generator=generator)


def trains() -> None:
    mesh = whole_mesh()
    plain, model, wrapped = build(mesh)
    assert_same_state(model, plain)  # before the first forward
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, wrapped)
    ]
    for seed in range(3):
        whole = batch(seed)
        mine = whole.chunk(2)[mesh["dp"].get_local_rank()]
        for optimizer in optimizers:
            optimizer.zero_grad()
        plain(whole).square().mean().backward()
        wrapped(mine).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(wrapped(batch(9)), plain(batch(9)), **CLOSE)
    found = model.state_dict()
    assert all(isinstance(value, DTensor) for value in found.values())
    assert set(found) == set(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name].full_tensor(), value, **CLOSE)


def test_training_and_saving(ranks4: Ranks) -> None:
    ranks4.run(trains)


def loads(after_forward: bool, laid_out: bool) -> None:
    mesh = whole_mesh()
    _, model, wrapped = build(mesh)
    if after_forward:
        wrapped(batch(1))
    torch.manual_seed(4)
    other = Mixture().double()
    state: dict[str, Any] = other.state_dict()
    if laid_out:
        state = parallelize_module(copy.deepcopy(other), mesh["tp"], PLAN).state_dict()
    model.load_state_dict(state)
    torch.testing.assert_close(wrapped(batch(2)), other(batch(2)), **CLOSE)
    del state["down.bias"]
    state["router.weight"] = torch.zeros(3, 8)
    with pytest.raises(RuntimeError, match=r"down\.bias") as error:
        model.load_state_dict(state)
    assert "router.weight" in str(error.value)


@pytest.mark.parametrize("after_forward", (False, True))
@pytest.mark.parametrize("laid_out", (False, True))
def test_loading(after_forward: bool, laid_out: bool, ranks4: Ranks) -> None:
    ranks4.run(loads, after_forward, laid_out)


def reads_a_fused_weight() -> None:
    plain, model, wrapped = build(whole_mesh())
    for _ in range(2):
        joined = model.gate_up.weight
        assert torch.equal(joined.full_tensor(), plain.gate_up.weight)
        wrapped(batch(1))


def test_the_joined_weight(ranks4: Ranks) -> None:
    ranks4.run(reads_a_fused_weight)


def column_wise() -> None:
    mesh = whole_mesh()
    plain = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8)).double()
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    model = parallelize_module(copy.deepcopy(plain), mesh["tp"], plan)
    wrapped = DistributedDataParallel(model, device_mesh=mesh["dp"])
    with torch.no_grad():
        wrapped(batch(1))
    assert_same_state(model, plain)


def test_the_state_after_an_evaluation(ranks4: Ranks) -> None:
    ranks4.run(column_wise)
