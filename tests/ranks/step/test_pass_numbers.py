"""Steps with fused, scheduled and prefetched communication give the same numbers."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from comm_graphs import all_gather, all_reduce, captured, copied, reduce_scatter
from torch import nn
from training import train as step

from torchspmd.errors import PassWarning
from torchspmd.step import DataParallel, compile
from torchspmd.step.passes import (
    comm_fusion_with_concat,
    dedupe_collectives,
    prefetch_gathers,
    remove_dead_code,
    schedule_comm_wait,
)

MODES = {
    "default": None,
    "average": DataParallel("replicate", reduce="avg"),
    "sharded": DataParallel("fully_shard", reduce="sum"),
}


def passes(layout, budget):
    def transformation(gm):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PassWarning)
            dedupe_collectives(gm)
            reports.append(comm_fusion_with_concat(gm, 1e-3, layout=layout))
            prefetch_gathers(gm)
            schedule_comm_wait(gm, memory_budget_mb=budget)
            remove_dead_code(gm)
        return gm

    reports = []
    return transformation, reports


def train(mode, layout, budget):
    """Whether two steps with and without the passes agree to the bit."""
    torch.manual_seed(0)
    layers = [each for _ in range(3) for each in (nn.Linear(9, 9), nn.ReLU())]
    plain = nn.Sequential(*layers)
    edited = copy.deepcopy(plain)
    transformation, reports = passes(layout, budget)
    steps = [
        compile(parallel_mode=MODES[mode])(step),
        compile(parallel_mode=MODES[mode], gm_transformation=transformation)(step),
    ]
    optims = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, edited)]
    same = True
    for number in range(2):
        torch.manual_seed(10 * number + dist.get_rank())
        batch = torch.randn(4, 9)
        losses = [
            each(model, optim, batch.clone())
            for each, model, optim in zip(steps, (plain, edited), optims, strict=True)
        ]
        same = same and torch.equal(*losses)
    pairs = zip(local(plain), local(edited), strict=True)
    same = same and all(torch.equal(left, right) for left, right in pairs)
    counts = [len(each.programs[-1].ledger.events) for each in steps]
    return same, counts, reports[-1].outcome.changed


def local(model):
    states = model.state_dict().values()
    return [each.to_local() if hasattr(each, "to_local") else each for each in states]


@pytest.mark.parametrize(
    ("mode", "budget"),
    [("default", None), ("average", None), ("sharded", None), ("sharded", 0.01)],
)
def test_two_ranks(ranks2, mode, budget):
    for same, (plain, edited), changed in ranks2.run(train, mode, "plain", budget):
        assert same and edited < plain and changed


def test_four_ranks_keep_bits_in_rank_major_buckets(ranks4):
    found = ranks4.run(train, "average", "rank_major", None)
    for same, (plain, edited), changed in found:
        assert same and edited < plain and changed


SIZES = {
    "small": [7, 33, 1001, 5, 1],
    "even": [128, 512, 8192],
    "several segments": [700_001, 1000, 300_000],
}
SENDS = {
    "all_reduce": all_reduce,
    "reduce_scatter": lambda x: reduce_scatter(x, 4),
    "all_gather": lambda x: all_gather(x, 4),
}


def compare(kind, sizes, layout, dtype):
    """The share of elements that a bucket changes, and what the pass claimed."""
    torch.manual_seed(dist.get_rank())
    rows = 4 if kind == "reduce_scatter" else 1
    tensors = [torch.randn(size * rows).to(dtype) for size in SIZES[sizes]]
    gm = captured(lambda *sent: [SENDS[kind](each) for each in sent], *tensors)
    fused = copied(gm)
    report = comm_fusion_with_concat(fused, 100, first_bucket_mb=None, layout=layout)
    pairs = list(zip(gm(*tensors), fused(*tensors), strict=True))
    different = sum((left != right).sum().item() for left, right in pairs)
    total = sum(left.numel() for left, _ in pairs)
    return different / total, report.outcome.keeps_bits


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_major_bucket_keeps_bits_on_gloo(ranks4, sizes, dtype):
    for share, kept in ranks4.run(compare, "all_reduce", sizes, "rank_major", dtype):
        assert share == 0 and kept == ("rank", "ring")


def test_a_plain_bucket_does_not_and_says_so(ranks4):
    for share, kept in ranks4.run(
        compare, "all_reduce", "even", "plain", torch.float32
    ):
        assert 0.01 < share < 0.5 and kept == ("rank",)


@pytest.mark.parametrize("sizes", SIZES)
def test_scatters_and_gathers_hold_to_what_they_claim(ranks4, sizes):
    for kind in ("reduce_scatter", "all_gather"):
        found = ranks4.run(compare, kind, sizes, "rank_major", torch.float32)
        for share, kept in found:
            assert share == 0 or "ring" not in kept
    assert found[0] == (0, ("rank", "ring", "tree"))
