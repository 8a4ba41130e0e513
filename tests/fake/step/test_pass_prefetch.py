"""Gathers of parameters that start before an earlier layer computes."""

import pytest
import torch
from comm_graphs import all_gather, captured, names, reduce_scatter
from torch import nn

from torchspmd.errors import PassWarning, UsageError
from torchspmd.step import DataParallel, compile
from torchspmd.step.graph.collectives import get_all_comm_blocks
from torchspmd.step.graph.memory import live_bytes
from torchspmd.step.passes import prefetch_gathers
from torchspmd.testing import fake_mesh

pytestmark = pytest.mark.fake


@pytest.fixture(autouse=True)
def mesh():
    with fake_mesh(4, ("dp",)) as mesh:
        yield mesh


def layers(x, *shards):
    """Each layer gathers a weight and a bias, and computes with them."""
    for pair in zip(shards[::2], shards[1::2], strict=True):
        weight, bias = [all_gather(each, 4) for each in pair]
        x = torch.addcmul(bias, x, weight)
    return [x]


def four_layers():
    return captured(layers, *[torch.ones(size) for size in (4096, *[1024] * 8)])


def stages(gm):
    """The starts and the layers, in order: G for a gather, L for a layer."""
    return "".join(
        "G" if "gather" in n else "L" for n in names(gm, "gather", "addcmul")
    )


@pytest.mark.parametrize(
    ("distance", "expected"),
    [(1, "GGGGLGGLGGLL"), (2, "GGGGGGLGGLLL"), (9, "GGGGGGGGLLLL")],
)
def test_it_fires(distance, expected):
    gm = four_layers()
    assert stages(gm) == "GGLGGLGGLGGL"
    outcome = prefetch_gathers(gm, distance).outcome
    assert stages(gm) == expected
    assert (outcome.matched, outcome.changed) == (8, 6)
    assert outcome.detail[0] == "all_gather_into_tensor_2: starts before addcmul"
    with pytest.warns(PassWarning, match="prefetch_gathers changed nothing"):
        prefetch_gathers(gm, distance)


def test_it_leaves_other_collectives_alone():
    def function(x, shard):
        return [all_gather(x.exp(), 4) + reduce_scatter(shard, 4).sum()]

    gm = captured(function, torch.ones(8), torch.ones(8))
    with pytest.warns(PassWarning, match="it found nothing to work on"):
        prefetch_gathers(gm)


def test_parameters_overtake_gradients():
    """In backward the next layer's gather stands behind this layer's reduce-scatter."""

    def function(x, first, second):
        x = x * all_gather(first, 4)
        gradient = reduce_scatter(x.exp(), 4)
        return [x.exp() * all_gather(second, 4), gradient]

    gm = captured(function, torch.ones(8), torch.ones(2), torch.ones(2))
    prefetch_gathers(gm)
    assert names(gm, "gather", "scatter") == [
        *("all_gather_into_tensor", "all_gather_into_tensor_1"),
        "reduce_scatter_tensor",
    ]


@pytest.mark.parametrize("limit", [1, 3, 5])
def test_bytes_in_flight_are_bounded(limit):
    size = 4096 * 4  # bytes of one gathered tensor
    gm = four_layers()
    outcome = prefetch_gathers(gm, 9, in_flight_mb=limit * size / 2**20).outcome
    assert _most_in_flight(gm) == limit * size
    assert f"{16 * (limit + 1)}.0 KiB would be on their way" in outcome.refused[0]


def _most_in_flight(gm):
    blocks = get_all_comm_blocks(gm)
    return max(
        sum(
            b.event.payload_bytes
            for b in blocks
            if not node < b.start and node < b.wait
        )
        for node in gm.graph.nodes
    )


def test_the_memory_budget_holds():
    gm = four_layers()
    before = max(live_bytes(gm).values())
    budget = 4096 * 4 / 2**20
    outcome = prefetch_gathers(gm, 9, memory_budget_mb=budget).outcome
    after = max(live_bytes(gm).values())
    assert before < after <= before + budget * 2**20
    assert any("the memory budget is used up" in line for line in outcome.refused)


def test_refusals():
    gm = four_layers()
    with pytest.raises(UsageError) as caught:
        prefetch_gathers(gm, 0, in_flight_mb=0)
    assert str(caught.value) == (
        "prefetch_gathers: distance=0: a gather starts 1 or more layers ahead, a "
        "whole number; in_flight_mb=0: use more than 0, a finite number of MiB, or None."
    )
    writing = captured(lambda x: [all_gather(x, 4) + 1, x.add_(1)], torch.ones(8))
    with pytest.warns(PassWarning, match="writes in place: prefetch before new"):
        prefetch_gathers(writing)


def test_a_fully_sharded_step(mesh):
    outcomes, orders = [], []

    def transformation(gm):
        orders.append(names(gm, "gather", "mm"))
        outcomes.append(prefetch_gathers(gm).outcome)
        orders.append(names(gm, "gather", "mm"))
        return gm

    def step(model, optim, batch):
        model(batch).square().mean().backward()
        optim.step()
        optim.zero_grad()

    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    mode = DataParallel("fully_shard")
    compiled = compile(parallel_mode=mode, mesh=mesh, gm_transformation=transformation)
    compiled(step)(model, optim, torch.randn(3, 8))
    # All but the first layer's weight and bias; in backward the weights of two layers.
    assert outcomes[0].matched == 8 and outcomes[0].changed == 6
    before, after = orders
    assert sorted(before) == sorted(after) and before != after
    assert after.index("all_gather_into_tensor_2") < after.index("addmm")
