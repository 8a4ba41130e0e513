"""Updates that were moved before ``defer_updates`` runs stay; the rest is deferred."""

import pytest
import torch
from torch import nn
from training import train_silently

from torchspmd.step import DataParallel, IterGraphModule, compile
from torchspmd.step.passes import (
    defer_updates,
    iter_move_grads_and_optimizers,
    remove_copy_from_optimizer,
)
from torchspmd.testing import fake_world


@pytest.fixture(scope="module")
def warm():
    """The captured graph of a step whose optimizer has its states."""
    found = []

    def keep(gm):
        found.append(gm)
        return gm

    layers = [
        each for _ in range(3) for each in (nn.Linear(4, 4, bias=False), nn.Tanh())
    ]
    model = nn.Sequential(*layers)
    optim = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    step = compile(gm_transformation=keep, parallel_mode=DataParallel("replicate"))
    with fake_world(2):
        compiled = step(train_silently)
        for _ in range(2):
            compiled(model, optim, torch.ones(2, 4))
        yield found[-1]


def moved_nodes(gm):
    return [name for region in gm.graph.regions for name in region.nodes]


@pytest.mark.parametrize("start", ["now", "next"])
@pytest.mark.parametrize("moving", ["all_reduce", "wait_tensor"])
@pytest.mark.parametrize("place", ["t", "t_2"])
def test_the_rest_is_deferred_behind_a_move_by_hand(warm, start, moving, place):
    gm = IterGraphModule(warm)
    remove_copy_from_optimizer(gm)
    iter_move_grads_and_optimizers(gm, moving, place)
    (by_hand,) = gm.graph.regions
    outcome = defer_updates(gm, start=start).outcome
    assert (outcome.matched, outcome.changed) == (3, 2)
    first = moving if start == "next" else "wait_tensor"
    assert outcome.refused == (f"all_reduce: {first} is moved already",)
    assert gm.graph.regions[0] == by_hand and len(gm.graph.regions) == 3
    assert len(set(moved_nodes(gm))) == len(moved_nodes(gm))
    assert set(gm.forms) == {"whole", "first", "steady", "last", "flush"}


def test_deferring_twice_changes_nothing_and_says_why(warm):
    gm = IterGraphModule(warm)
    defer_updates(gm)
    regions = list(gm.graph.regions)
    with pytest.warns(match="defer_updates changed nothing: .*is moved already"):
        outcome = defer_updates(gm).outcome
    assert outcome.changed == 0 and len(outcome.refused) == 3
    assert all(line.endswith("is moved already") for line in outcome.refused)
    assert gm.graph.regions == regions
