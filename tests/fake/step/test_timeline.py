"""Simulated runs of a graph: what of its communication is hidden, and why."""

import functools

import pytest
import torch
from torch import nn

from torchspmd.step import DataParallel, IterGraphModule, compile
from torchspmd.step.graph.cost import CostModel
from torchspmd.step.graph.simulate import simulate, simulate_steady
from torchspmd.step.passes import defer_updates, schedule_comm_wait
from torchspmd.testing import fake_world

pytestmark = pytest.mark.fake

WIDTH, BATCH, LAYERS = 64, 32, 6
# Only matrix products and bytes on the wire take time, so that it can be counted.
COST = CostModel(
    flops=1e9,
    memory_bytes=1e30,
    network_bytes=1e6,
    launch_seconds=0.0,
    latency_seconds=0.0,
)
MATMUL = 2 * BATCH * WIDTH * WIDTH / 1e9
REDUCED = 2 * (4 - 1) / 4 * WIDTH * WIDTH * 4 / 1e6  # an all-reduce on 4 ranks


@functools.cache
def timelines(cost, **deferral):
    """Of the captured step, after scheduling, and with deferred updates."""
    found = []

    def transformation(gm):
        gm = IterGraphModule(gm)
        found.append(simulate(gm.graph, cost))
        schedule_comm_wait(gm)
        found.append(simulate(gm.graph, cost))
        defer_updates(gm, cost=cost, **deferral)
        steady = gm.forms["steady"].graph
        found.append(simulate_steady(steady, cost, gm.num_carried))
        return gm

    with fake_world(4):
        model = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        )
        optim = torch.optim.SGD(model.parameters(), lr=0.1)

        @compile(
            gm_transformation=transformation, parallel_mode=DataParallel("replicate")
        )
        def step(model, optim, batch):
            model(batch).sum().backward()
            optim.step()
            optim.zero_grad()

        step(model, optim, torch.ones(BATCH, WIDTH), last_train_step=True)
    return found


def test_one_step_by_hand():
    captured, scheduled, deferred = timelines(COST)
    # The first layer needs no gradient of its input.
    compute = (3 * LAYERS - 1) * MATMUL
    for timeline in (captured, scheduled, deferred):
        assert timeline.compute_seconds == pytest.approx(compute)
        assert timeline.comm_seconds == pytest.approx(LAYERS * REDUCED)
    assert captured.step_seconds == pytest.approx(compute + LAYERS * REDUCED)
    first_gradient = LAYERS * MATMUL + MATMUL  # forward, and one product of backward
    assert scheduled.step_seconds == pytest.approx(first_gradient + LAYERS * REDUCED)
    # The wire never stands still: no schedule is faster.
    assert deferred.step_seconds == pytest.approx(deferred.limit_seconds, rel=0.02)
    assert deferred.step_seconds < scheduled.step_seconds < captured.step_seconds


def test_what_is_exposed_has_a_reason():
    captured, scheduled, deferred = timelines(COST)
    assert {each.reason for each in captured.exposures} == {
        "its result is needed right after it starts"
    }
    assert len(captured.exposures) == LAYERS
    queued = [each.reason for each in scheduled.exposures if each.reason]
    assert all("ms for earlier collectives of its group" in text for text in queued)
    assert queued
    assert captured.exposed_seconds > deferred.exposed_seconds


def test_a_fast_wire_is_hidden():
    fast = CostModel(1e9, 1e30, 1e9, launch_seconds=0.0, latency_seconds=0.0)
    _, scheduled, deferred = timelines(fast)
    assert (
        scheduled.exposed_seconds > 0.0
    )  # the last gradient has nothing to hide behind
    assert deferred.step_seconds <= scheduled.step_seconds
    assert all(each.exposed_seconds == 0 for each in deferred.exposures[1:])


def test_reductions_can_be_moved_as_a_whole():
    _, scheduled, moved = timelines(COST, start="next")
    # Each is started where it is needed: nothing overlaps.
    assert moved.exposed_seconds == pytest.approx(LAYERS * REDUCED)
    assert moved.step_seconds > scheduled.step_seconds


def test_costs_of_nodes():
    assert CostModel.for_device("cpu").network_bytes < CostModel().network_bytes
