"""Bytes equal the closed formulas, exactly."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from torchspmd import CommDebugMode
from torchspmd.comm import Total
from torchspmd.testing import fake_mesh

pytestmark = pytest.mark.fake

BATCH, SEQ, WIDTH, HIDDEN, LAYERS, FLOAT = 2, 12, 24, 48, 3, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)
        )

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def model():
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def activation(seq=SEQ):
    return torch.randn(BATCH, seq, WIDTH, requires_grad=True)


ACTIVATION = BATCH * SEQ * WIDTH * FLOAT
PARAMETERS = sum(p.numel() for p in Block().parameters()) * FLOAT


def ring_all_reduce(payload, n):
    return 2 * (n - 1) * payload // n


def ring_shard(payload, n):
    return (n - 1) * payload // n


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_tensor_parallel(n):
    with fake_mesh(n, ("tp",)) as mesh:
        plan = {"*.mlp.0": ColwiseParallel(), "*.mlp.2": RowwiseParallel()}
        parallel = parallelize_module(model(), mesh, plan)
        with CommDebugMode() as mode:
            parallel(activation()).sum().backward()
    # One reduction of the activation a block, forward and backward.
    for phase in ("forward", "backward"):
        assert mode.ledger.total(kind="all_reduce", phase=phase, axis="tp") == Total(
            LAYERS, LAYERS * ACTIVATION, LAYERS * ring_all_reduce(ACTIVATION, n)
        )
    assert len(mode.ledger) == 2 * LAYERS


@pytest.mark.parametrize("n", [2, 3, 4])
def test_sequence_parallel(n):
    with fake_mesh(n, ("tp",)) as mesh:
        plan = {
            "*.norm": SequenceParallel(),
            "*.mlp": PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate()
            ),
            "*.mlp.0": ColwiseParallel(),
            "*.mlp.2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallel = parallelize_module(model(), mesh, plan)
        with CommDebugMode() as mode:
            parallel(activation(SEQ // n)).sum().backward()
    # A gather and a scatter of the activation a block, forward and backward.
    each = Total(LAYERS, LAYERS * ACTIVATION, LAYERS * ring_shard(ACTIVATION, n))
    for phase in ("forward", "backward"):
        for kind in ("all_gather", "reduce_scatter"):
            assert mode.ledger.total(kind=kind, phase=phase) == each
    assert len(mode.ledger) == 4 * LAYERS


@pytest.mark.parametrize("n", [2, 3, 8])
def test_ddp(n):
    with fake_mesh(n, ("dp",)) as mesh:
        replicated = DistributedDataParallel(
            model(), process_group=mesh.get_group(), init_sync=False
        )
        with CommDebugMode() as mode:
            replicated(activation()).sum().backward()
    gradients = LAYERS * PARAMETERS
    assert mode.ledger.total() == Total(1, gradients, ring_all_reduce(gradients, n))
    assert mode.ledger.total(kind="all_reduce", phase="backward", axis="dp").count == 1


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2(n, reshard):
    with fake_mesh(n, ("dp",)) as mesh:
        sharded = model()
        for block in sharded:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        with CommDebugMode() as mode:
            sharded(activation()).sum().backward()
    gathers = LAYERS if not reshard else 2 * LAYERS
    assert mode.ledger.total(kind="all_gather") == Total(
        gathers, gathers * PARAMETERS, gathers * ring_shard(PARAMETERS, n)
    )
    assert mode.ledger.total(kind="reduce_scatter", phase="backward") == Total(
        LAYERS, LAYERS * PARAMETERS, LAYERS * ring_shard(PARAMETERS, n)
    )
    # Each block's parameters count for the block, although gathers are issued ahead.
    for place in range(LAYERS):
        inside = mode.ledger.total(kind="all_gather", module=f"Sequential.{place}")
        assert inside.count == gathers // LAYERS
