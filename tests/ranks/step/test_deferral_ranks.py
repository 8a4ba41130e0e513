"""Deferred updates on real ranks: the result of eager DistributedDataParallel."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchspmd.step import (
    DataParallel,
    GraphModuleTransformation,
    IterGraphModule,
    compile,
)
from torchspmd.step.graph.cost import CostModel
from torchspmd.step.graph.generated import RunningGraph
from torchspmd.step.passes import (
    comm_fusion_with_concat,
    defer_updates,
    iter_move_grads_and_optimizers,
    remove_copy_from_optimizer,
    schedule_comm_wait,
)

STEPS = 5
SLOW_WIRE = CostModel(1e10, 1e10, 5e7, launch_seconds=0.0)  # no updates are joined
OPTIMIZERS = {
    "fused adam": functools.partial(torch.optim.Adam, lr=0.01, fused=True),
    "foreach adamw": functools.partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "plain adam": functools.partial(torch.optim.Adam, lr=0.01, foreach=False),
    "foreach momentum": functools.partial(
        torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True
    ),
}


def build(make_optimizer):
    torch.manual_seed(0)
    layers = [each for _ in range(4) for each in (nn.Linear(16, 16), nn.Tanh())]
    model = nn.Sequential(*layers)
    return model, make_optimizer(model.parameters())


def local_step(model, optim, batch):
    loss = model(batch).square().sum()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def summed(model, optim, batch):
    """DistributedDataParallel averages; multiplied by the ranks it sums."""
    loss = model(batch).square().sum()
    loss.backward()
    for parameter in model.parameters():
        parameter.grad *= dist.get_world_size()
    optim.step()
    optim.zero_grad()
    return loss


def run(step, model, optim, **last):
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for index in range(STEPS):
        batch = torch.randn(4, 16, generator=generator)
        keywords = last if index == STEPS - 1 else {}
        losses.append(step(model, optim, batch, **keywords).detach())
    return losses


def state_of(model, optim):
    tensors = [parameter.detach() for parameter in model.parameters()]
    for entries in optim.state_dict()["state"].values():
        tensors += [value for value in entries.values() if torch.is_tensor(value)]
    return tensors


def count_different(one, other):
    pairs = list(zip(one, other, strict=True))
    return sum(not torch.equal(mine, theirs) for mine, theirs in pairs)


def compare_with_eager(name, start):
    """Tensors that differ from eager DDP, and what the last program deferred."""
    seen = []

    def transformation(gm):
        gm = IterGraphModule(gm)
        seen.append(defer_updates(gm, start=start, cost=SLOW_WIRE))
        return gm

    pair = build(OPTIMIZERS[name])
    mode = DataParallel("replicate", reduce="sum")
    step = compile(gm_transformation=transformation, parallel_mode=mode)(local_step)
    losses = run(step, *pair, last_train_step=True)
    model, optim = build(OPTIMIZERS[name])
    expected = run(summed, DistributedDataParallel(model), optim)
    different = count_different(losses, expected)
    different += count_different(state_of(*pair), state_of(model, optim))
    return different, seen[-1].outcome.changed


@pytest.mark.parametrize(
    ("name", "start"),  # "foreach adamw" follows below
    [("plain adam", "now"), ("foreach momentum", "now"), ("fused adam", "next")],
)
def test_deferred_updates_equal_eager(ranks2, name, start):
    for different, deferred in ranks2.run(compare_with_eager, name, start):
        assert different == 0
        assert deferred == 8


def compare_with_plain():
    """The default passes with overlap, against the same step without any, on 4 ranks."""
    results = []
    for transformation in (
        None,
        GraphModuleTransformation(
            passes=[
                functools.partial(
                    comm_fusion_with_concat, bucket_size_mb=0.003, layout="rank_major"
                ),
                schedule_comm_wait,
                remove_copy_from_optimizer,
                functools.partial(defer_updates, cost=SLOW_WIRE),
            ]
        ),
    ):
        pair = build(OPTIMIZERS["fused adam"])
        mode = DataParallel("replicate", reduce="sum")
        step = compile(gm_transformation=transformation, parallel_mode=mode)(local_step)
        with step:
            losses = run(step, *pair)
        results.append([*losses, *state_of(*pair)])
    reports = [report.name for report in transformation.reports]
    return count_different(*results), reports, transformation.reports[-1].outcome


def test_four_ranks_keep_their_bits(ranks4):
    for different, names, outcome in ranks4.run(compare_with_plain):
        assert different == 0
        assert names[-1] == "defer_updates"
        assert outcome.changed == outcome.matched > 1
        assert "ring" in outcome.keeps_bits


def move_one_bucket():
    """The passes by hand, as users of the original call them."""
    names = []

    def transformation(gm):
        gm = IterGraphModule(gm)
        comm_fusion_with_concat(gm, 0.0012)  # a bucket for each layer
        schedule_comm_wait(gm)
        remove_copy_from_optimizer(gm)
        iter_move_grads_and_optimizers(gm, "all_reduce_default_1", "tanh")
        names.append([region.before for region in gm.graph.regions])
        gm.finalize_setup()
        return gm

    pair = build(OPTIMIZERS["fused adam"])
    local_step(*pair, torch.ones(4, 16))  # equal on all ranks, so that they stay so
    mode = DataParallel("replicate", reduce="sum")
    step = compile(gm_transformation=transformation, parallel_mode=mode)(local_step)
    run(step, *pair, last_train_step=True)
    model, optim = build(OPTIMIZERS["fused adam"])
    local_step(model, optim, torch.ones(4, 16))
    run(summed, DistributedDataParallel(model), optim)
    return count_different(state_of(*pair), state_of(model, optim)), names


def test_one_bucket_by_name(ranks2):
    for different, names in ranks2.run(move_one_bucket):
        assert different == 0
        assert names == [["tanh"]]


def fail_and_repeat(name):
    """A step that raises after half of the pending updates, then goes on."""
    pair = build(OPTIMIZERS[name])
    passes = [functools.partial(defer_updates, cost=SLOW_WIRE)]
    mode = DataParallel("replicate")  # an average: gradients are divided in place too
    transformation = GraphModuleTransformation(passes=passes)
    step = compile(gm_transformation=transformation, parallel_mode=mode)(local_step)
    failed = []

    def failing(model, optim, batch, **keywords):
        run_of = step.programs[-1].run if step.programs else None
        if run_of is not None and run_of.is_pending and not failed:
            end = run_of._end

            def fail_later(region):
                end(region)
                if len(run_of._pending.done) == 4:
                    raise KeyboardInterrupt("the cable")

            failed.append(
                run_with(run_of, fail_later, lambda: step(model, optim, batch))
            )
        return step(model, optim, batch, **keywords)

    losses = run(failing, *pair, last_train_step=True)
    model, optim = build(OPTIMIZERS[name])
    expected = run(local_step, DistributedDataParallel(model), optim)
    different = count_different(losses, expected)
    different += count_different(state_of(*pair), state_of(model, optim))
    return different, failed, "8 of 8 pending updates are made" in step.explain()


def run_with(module, mark, call):
    """Call with another mark at the end of each region; how many were left to do."""
    runs = module._forms._runs
    steady, graph = runs["steady"], runs["steady"].graph
    ends = [n for n in graph.nodes if getattr(n.target, "__name__", "") == "_end"]
    for node in ends:
        node.target = mark
    runs["steady"] = RunningGraph.of(steady.module)
    with pytest.raises(KeyboardInterrupt, match="the cable"):
        call()
    for node in ends:
        node.target = module._end
    runs["steady"] = steady
    return len(module.unfinished)


@pytest.mark.parametrize("name", ["fused adam", "foreach adamw"])
def test_an_exception_between_updates_loses_nothing(ranks2, name):
    for different, failed, in_place in ranks2.run(fail_and_repeat, name):
        assert different == 0
        assert failed == [4]
        assert in_place
