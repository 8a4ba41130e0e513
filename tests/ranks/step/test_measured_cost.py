"""Rates that are measured on real ranks, and equal on all of them."""

import dataclasses

import pytest
import torch

from torchspmd.errors import UsageError
from torchspmd.step import CostModel, GraphModuleTransformation, measure_cost
from torchspmd.testing import fake_world

pytestmark = pytest.mark.ranks


def measured():
    return measure_cost("cpu", dtype=torch.float32)


def test_all_ranks_get_the_rates_of_the_slowest(ranks2):
    one, other = ranks2.run(measured)
    assert one == other
    for name, value in dataclasses.asdict(one).items():
        assert 0 < value < 1e18, name
    assert one.network_bytes != CostModel.for_device("cpu").network_bytes
    transformation = GraphModuleTransformation(enable_graph_optimization=True, cost=one)
    assert not transformation.reports


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
