"""Rates that are measured on real ranks, and equal on all of them."""

import dataclasses
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from training import train

from torchspmd.errors import AgreementError, UsageError
from torchspmd.step import (
    CostModel,
    DataParallel,
    GraphModuleTransformation,
    compile,
    measure_cost,
)
from torchspmd.testing import fake_world


def measured():
    return measure_cost("cpu", dtype=torch.float32)


def test_all_ranks_get_the_rates_of_the_slowest(ranks2):
    one, other = ranks2.run(measured)
    assert one == other
    rates = dataclasses.asdict(one)
    assert rates.pop("operators") == rates.pop("axes") == {}
    for name, value in rates.items():
        assert 0 < value < 1e18, name
    assert one.network_bytes != CostModel.for_device("cpu").network_bytes
    transformation = GraphModuleTransformation(enable_graph_optimization=True, cost=one)
    assert not transformation.reports


def compiled_by_measuring():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    optim = torch.optim.AdamW(model.parameters(), fused=True)
    transformation = GraphModuleTransformation(
        enable_graph_optimization=True, overlap_iterations=True, cost="measure"
    )
    compiled = compile(
        train, gm_transformation=transformation, parallel_mode=DataParallel("replicate")
    )
    with compiled:
        for _ in range(3):
            compiled(model, optim, torch.ones(8, 64))
        exposure = compiled.exposure(model, optim, torch.ones(8, 64), runs=1)
        assert not any("guess" in line for line in exposure.notes)
        return transformation.cost, compiled.explain()


def test_a_step_is_measured_on_the_ranks_that_run_it(ranks2):
    (one, text), (other, _) = ranks2.run(compiled_by_measuring)
    assert one == other
    assert any(key.startswith("aten.addmm") for key in one.operators)
    assert one.network_bytes != CostModel.for_device("cpu").network_bytes
    assert "measured: forward and backward take" in text


def hybrid_by_measuring():
    """The cost of shards on two ranks and replicas of them on others."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    transformation = GraphModuleTransformation(
        enable_graph_optimization=True, cost="measure"
    )
    compiled = compile(
        train,
        gm_transformation=transformation,
        parallel_mode=DataParallel("fully_shard"),
        mesh=mesh,
        shadow=0,
    )
    with compiled:
        compiled(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(8, 64))
        told = compiled.explain()
    cost = transformation.cost
    events = compiled.programs[-1].ledger.events
    return cost, cost.axes, told, {e.axis: cost.link_of(e) for e in events}


def test_each_axis_has_a_network_of_its_own(ranks4):
    found = ranks4.run(hybrid_by_measuring)
    cost, links, told, used = found[0]
    assert all(each[0] == cost for each in found)
    assert used == links
    assert set(links) == {"replicate", "shard"}
    assert "; that of shard sends " in told
    assert "; that of replicate sends " in told


def fails_before_measuring():
    model = nn.Linear(4, 4)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    transformation = GraphModuleTransformation(
        enable_graph_optimization=True, cost="measure"
    )

    def unlucky_step(model, optim, batch):
        if dist.get_rank() == 1:
            raise ValueError("no luck")
        return train(model, optim, batch)

    start = time.monotonic()
    try:
        compile(unlucky_step, gm_transformation=transformation)(
            model, optim, torch.ones(2, 4)
        )
    except (AgreementError, ValueError) as error:
        found = str(error), time.monotonic() - start
    dist.barrier()
    return found


def test_ranks_that_measure_do_not_wait_for_one_that_failed(ranks2):
    (text, seconds), (own, _) = ranks2.run(fails_before_measuring)
    assert "no luck" in own
    assert "could not be built on every rank" in text
    assert "* rank 1: ValueError: no luck" in text
    assert seconds < 30


def test_without_others_the_network_is_a_guess():
    guess = CostModel.for_device("cpu")
    cost = measure_cost()
    assert (cost.network_bytes, cost.latency_seconds) == (
        guess.network_bytes,
        guess.latency_seconds,
    )
    assert cost.flops != guess.flops


def test_ranks_that_send_nothing_are_not_measured():
    with (
        fake_world(4),
        pytest.raises(UsageError, match=r"nothing to measure\. Start real ranks"),
    ):
        measure_cost()
