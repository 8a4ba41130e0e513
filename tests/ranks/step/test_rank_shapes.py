"""Ranks with batches of other sizes: trained as one process would, without a hang."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchspmd.step import DataParallel, GraphModuleTransformation, compile

# Of rank 0 and rank 1 in each step: alike, one of them new, both new, one known already.
LATER = ((5, 5), (5, 5), (5, 7), (3, 5), (4, 9), (5, 5))
AT_ONCE = ((5, 7), (5, 5), (2, 9))
PASSES = {"enable_graph_optimization": True}
MODES = {
    "replicate": ("replicate", None),
    "replicate with passes": ("replicate", PASSES),
    "replicate with overlap": ("replicate", {**PASSES, "overlap_iterations": True}),
    "fully_shard": ("fully_shard", None),
    "fully_shard with passes": ("fully_shard", PASSES),
}


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.ReLU())
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model, tokens):
    return model(tokens).square().mean() * tokens.shape[1]


def step(model, optim, tokens):
    loss = loss_of(model, tokens)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def in_one_process(batches):
    model, optim = make()
    losses = []
    for pair in batches:
        found = [loss_of(model, tokens) for tokens in pair]
        (sum(found) / 2).backward()
        optim.step()
        optim.zero_grad()
        losses.append([loss.item() for loss in found])
    return losses, [p.tolist() for p in model.parameters()]


def worst(lengths, style, passes):
    """How far losses and weights of this rank are off, and how many programs it has."""
    draw = torch.Generator().manual_seed(1)
    batches = [
        [torch.randint(0, 9, (2, n), generator=draw) for n in pair] for pair in lengths
    ]
    rank = dist.get_rank()
    losses, weights = in_one_process(batches)
    transformation = GraphModuleTransformation(**passes) if passes else None
    compiled = compile(
        step, parallel_mode=DataParallel(style), gm_transformation=transformation
    )
    model, optim = make()
    with compiled:
        ours = [compiled(model, optim, pair[rank]).item() for pair in batches]
    off = [abs(loss - both[rank]) for loss, both in zip(ours, losses, strict=True)]
    for parameter, expected in zip(model.parameters(), weights, strict=True):
        whole = parameter.full_tensor() if style == "fully_shard" else parameter
        off.append((whole - torch.tensor(expected)).abs().max().item())
    return max(off), len(compiled.programs)


@pytest.mark.parametrize("mode", MODES)
def test_batches_of_other_lengths(ranks2, mode):
    lengths = AT_ONCE if mode.endswith("passes") else LATER
    for off, programs in ranks2.run(worst, lengths, *MODES[mode]):
        assert off < 1e-6
        # Without momentum yet, with it, and for any size.
        assert programs <= 3
