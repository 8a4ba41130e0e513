"""On real gloo ranks: nothing changes by being watched, and ranks see the same."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from torchspmd import CommDebugMode


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def with_ddp(mesh):
    return DistributedDataParallel(mlp(), process_group=mesh.get_group())


def with_fsdp(mesh):
    return fully_shard(mlp(), mesh=mesh)


def with_tensor_parallel(mesh):
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(mlp(), mesh, plan)


def train(build, watched):
    """Two steps; the parameters, and what was recorded, as plain values."""
    mesh = init_device_mesh(
        "cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("x",)
    )
    model = build(mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    mode = CommDebugMode()

    def steps():
        for _ in range(2):
            model(torch.ones(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    if watched:
        with mode:
            steps()
    else:
        steps()
    values = [
        p.full_tensor().detach().numpy()
        if hasattr(p, "full_tensor")
        else p.detach().numpy()
        for p in model.parameters()
    ]
    # Not the axis: meshes of other tests in these ranks may name the world group too.
    rows = mode.ledger.total_by("kind", "phase", "module")
    return values, {key: total.payload_bytes for key, total in rows.items()}


WEIGHTS = 4 * (8 * 16 + 16 + 16 * 8 + 8)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (with_ddp, {("all_reduce", "backward"): 2 * WEIGHTS}),
        (
            with_fsdp,
            {
                ("all_gather", "forward"): 2 * WEIGHTS,
                ("reduce_scatter", "backward"): 2 * WEIGHTS,
            },
        ),
        (with_tensor_parallel, {("all_reduce", "forward"): 2 * 4 * 8 * 4}),
    ],
)
def test_watching_changes_nothing(ranks2, build, expected):
    plain = ranks2.run(train, build, False)
    watched = ranks2.run(train, build, True)
    for (values, _), (watched_values, _) in zip(plain, watched, strict=True):
        for value, watched_value in zip(values, watched_values, strict=True):
            assert (value == watched_value).all()
    first, second = (rows for _, rows in watched)
    assert first == second
    found = {}
    for (kind, phase, _), payload in first.items():
        key = (kind, phase)
        found[key] = found.get(key, 0) + payload
    assert {key: found.get(key) for key in expected} == expected
