"""Styles together with FSDP2, DDP, activation checkpointing and torch.compile."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from tp_parity import CLOSE, assert_same_gradients, assert_same_state, full, tp_mesh

from torchspmd.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    clip_grad_norm_,
    parallelize_module,
)
from torchspmd.testing import Ranks


class MLP(nn.Module):
    def __init__(self, remember: bool = True) -> None:
        super().__init__()
        self.remember = remember
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.remember:
            return x + self.inner(x)
        return x + checkpoint(self.inner, x, use_reentrant=False)


def build(**options: Any) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(MLP(**options) for _ in range(2))).double()


PLAN = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
# The norm on a part of the sequence: gathered before `up`, scattered after `down`.
SEQUENCE_PLAN = {
    "*.norm": SequenceParallel(use_local_output=True),
    "*.up": ColwiseParallel(input_layouts=Shard(1)),
    "*.down": RowwiseParallel(output_layouts=Shard(1)),
}


def batch(seed: int) -> torch.Tensor:
    return torch.randn(
        4, 12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def train(model: nn.Module, batches: list[torch.Tensor], clip: Any) -> torch.Tensor:
    """Two steps of training; the second norm is that of a changed model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for value in batches:
        optimizer.zero_grad()
        model(value).square().mean().backward()
        norm = clip(model.parameters(), 0.1)
        optimizer.step()
    return full(norm).detach()


def expect(batches: list[torch.Tensor]) -> tuple[nn.Module, torch.Tensor]:
    model = build()
    return model, train(model, batches, nn.utils.clip_grad_norm_)


def with_fully_shard() -> None:
    mesh = init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp")
    )
    reference, expected = expect([batch(1), batch(2)])
    for plan in (PLAN, {**PLAN, "*.norm": PrepareModuleInput()}):
        model = parallelize_module(build(), mesh["tp"], plan)
        for block in model:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        mine = [batch(seed).chunk(2)[mesh["dp"].get_local_rank()] for seed in (1, 2)]
        found = train(model, mine, clip_grad_norm_)
        torch.testing.assert_close(found, expected, **CLOSE)
        assert_same_state(model, reference)


def test_fully_shard_on_the_data_axis(ranks4: Ranks) -> None:
    ranks4.run(with_fully_shard)


def with_ddp(by_token: bool) -> None:
    mesh = init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp")
    )
    tp = mesh["tp"]

    def mine(value: torch.Tensor) -> torch.Tensor:
        return value.chunk(tp.size(), 1)[tp.get_local_rank()] if by_token else value

    plan = SEQUENCE_PLAN if by_token else PLAN
    model = parallelize_module(build(), tp, plan)
    wrapped = DistributedDataParallel(model, device_mesh=mesh["dp"])
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    plain = build()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for whole in (batch(1), batch(2), batch(3)):
        optimizer.zero_grad()
        theirs.zero_grad()
        rows = whole.chunk(2)[mesh["dp"].get_local_rank()]
        loss = wrapped(mine(rows)).square().sum() / rows.numel()
        loss.backward()
        plain(whole).square().mean().backward()
        optimizer.step()
        theirs.step()
    output = wrapped(mine(batch(4)))
    torch.testing.assert_close(output, mine(plain(batch(4))), **CLOSE)


@pytest.mark.parametrize("by_token", (False, True), ids=("whole", "by_token"))
def test_ddp_on_the_data_axis(by_token: bool, ranks4: Ranks) -> None:
    ranks4.run(with_ddp, by_token)


def with_checkpointing() -> None:
    reference, expected = expect([batch(1), batch(2)])
    mesh = tp_mesh()
    model = parallelize_module(build(remember=False), mesh, PLAN)
    found = train(model, [batch(1), batch(2)], clip_grad_norm_)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert_same_state(model, reference)


def test_activation_checkpointing(ranks3: Ranks) -> None:
    ranks3.run(with_checkpointing)


def sequence_parallel() -> None:
    reference, expected = expect([batch(1), batch(2)])
    mesh = tp_mesh()
    model = parallelize_module(build(), mesh, SEQUENCE_PLAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for seed in (1, 2):
        optimizer.zero_grad()
        mine = batch(seed).chunk(mesh.size(), 1)[mesh.get_local_rank()]
        loss = model(mine).square().sum() / batch(seed).numel()
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    torch.testing.assert_close(norm, expected, **CLOSE)
    assert_same_state(model, reference)


def test_sequence_parallel_training(ranks: Ranks) -> None:
    ranks.run(sequence_parallel)


def compiled() -> None:
    """On a part of the sequence; test_compose_compile.py has whole inputs."""
    torch._dynamo.reset()
    mesh = tp_mesh()
    reference = build()
    value = batch(1)
    expected = reference(value)
    expected.square().mean().backward()
    model = parallelize_module(build(), mesh, SEQUENCE_PLAN)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    output = run(value.chunk(mesh.size(), 1)[mesh.get_local_rank()])
    loss = output.square().sum() / value.numel()
    loss.backward()
    found = DTensor.from_local(output, mesh, (Shard(1),)).full_tensor()
    torch.testing.assert_close(found, expected, **CLOSE)
    assert_same_gradients(model, reference)


def test_compile_in_one_graph(ranks2: Ranks) -> None:
    ranks2.run(compiled)
