"""A norm between tensor-parallel layers, on a mesh of data and tensor parallelism."""

import pytest
import torch
from step_models import Heads
from torch.distributed.device_mesh import init_device_mesh
from training import train

from torchspmd.errors import CaptureError
from torchspmd.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchspmd.step import DataParallel, compile

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def build():
    torch.manual_seed(0)
    model = Heads().double()
    return model, torch.randn(4, 8, dtype=torch.float64)


def run_mode(mode):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    compiled = compile(parallel_mode=DataParallel(mode), mesh=mesh["dp"])(train)
    model, batch = build()
    parallelize_module(model, mesh["tp"], PLAN)
    optim = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(CaptureError) as caught:
        compiled(model, optim, batch)
    model, _ = build()
    norm = SequenceParallel(sequence_dim=-2)
    parallelize_module(model, mesh["tp"], {**PLAN, "norm": norm})
    optim = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        compiled(model, optim, batch)
    weights = [p.full_tensor() for p in model.parameters()]
    return str(caught.value), [weight.detach() for weight in weights]


@pytest.mark.parametrize("mode", ("replicate", "fully_shard"))
def test_a_norm_without_a_style_is_refused_and_with_one_is_right(mode, ranks4):
    model, batch = build()
    optim = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        train(model, optim, batch)
    for text, weights in ranks4.run(run_mode, mode):
        assert "Heads.norm.weight: along tp every rank has a gradient" in text
        for found, expected in zip(weights, model.parameters(), strict=True):
            torch.testing.assert_close(found, expected.detach())
