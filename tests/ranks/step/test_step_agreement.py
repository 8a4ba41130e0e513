"""Ranks that would not send the same: told on every rank, in seconds, without a hang."""

import gc
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from training import train

from torchspmd.errors import AgreementError
from torchspmd.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchspmd.step import DataParallel, compile, rank_agreement, runtime
from torchspmd.testing import Ranks


def refused(model, batch, mode=None):
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    start = time.monotonic()
    before = [p.detach().clone() for p in model.parameters()]
    try:
        compile(parallel_mode=mode)(train)(model, optim, batch)
    except AgreementError as error:
        same = all(
            torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)
        )
        dist.barrier()  # the group still works
        return str(error), time.monotonic() - start, same
    return None


def with_another_layer():
    width = 4 if dist.get_rank() == 1 else 5
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
    return refused(model, torch.ones(3, 4), DataParallel("replicate"))


def with_another_batch():
    return refused(nn.Linear(4, 2), torch.ones(3 + dist.get_rank(), 4))


def with_another_step():
    model = nn.Linear(4, 2)
    if dist.get_rank() == 1:
        model.bias.requires_grad_(False)
    return refused(model, torch.ones(3, 4))


class ByRank(nn.Module):
    """Each rank takes another one of two layers of the same shape."""

    def __init__(self, frozen):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.ways = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.ways.requires_grad_(not frozen)

    def forward(self, x):
        return self.ways[dist.get_rank()](self.first(x))


def with_another_parameter(mode, frozen):
    return refused(ByRank(frozen), torch.ones(2, 4), mode)


REDUCED = "rank 0 has ByRank.ways.0.weight from collective 1, rank 1 has ByRank.ways.1"
# The group is called after whichever mesh is alive: that of an earlier test, perhaps.
GATHERED = "rank 0 has all_gather float32[2] of ByRank.ways.0.bias over "


@pytest.mark.parametrize(
    ("mode", "frozen", "line"),
    [
        (None, False, REDUCED),
        (DataParallel("replicate"), False, REDUCED),
        (DataParallel("fully_shard"), False, GATHERED),
        (DataParallel("fully_shard"), True, GATHERED),
    ],
)
def test_another_parameter_of_the_same_shape(ranks2, mode, frozen, line):
    for text, _, unchanged in ranks2.run(with_another_parameter, mode, frozen):
        assert "ranks would send different parameters to each other" in text
        assert line in text
        assert "Every rank must use the same parameters in the same order" in text
        assert unchanged


def test_another_layer(ranks2):
    for text, seconds, unchanged in ranks2.run(with_another_layer):
        assert "ranks would not run the same communication" in text
        assert "program 0 of 'train', mesh data=2" in text
        assert "rank 0 has all_reduce float32[5] (sum) over" in text
        assert "rank 1 has all_reduce float32[4] (sum) over" in text
        assert "Give every rank batches of the same shape" in text
        assert unchanged
        assert seconds < 30


def test_uneven_batches(ranks2):
    for text, _, unchanged in ranks2.run(with_another_batch):
        assert "tensor argument 0: rank 0 has args[2] input float32[3, 4]" in text
        assert "rank 1 has args[2] input float32[4, 4]" in text
        assert unchanged


def test_a_collective_less(ranks2):
    for text, _, _ in ranks2.run(with_another_step):
        assert "has none" in text


def lonely_step(model, optim, batch):
    return train(model, optim, batch)


def late():
    """Rank 1 never calls the step."""
    rank_agreement.PLAN_SECONDS = 1.0
    found = None
    if dist.get_rank() == 0:
        model = nn.Linear(4, 2)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        try:  # under a name of its own: rank 1 does not count it
            compile(lonely_step)(model, optim, torch.ones(3, 4))
        except AgreementError as error:
            found = str(error)
    rank_agreement.PLAN_SECONDS = 300.0
    dist.barrier()
    return found


def test_a_rank_that_does_not_come(ranks2):
    text, _ = ranks2.run(late)
    assert "is captured here: rank 1 did not come within 1 s. Every rank must" in text
    assert "may be running a program that it has already" in text


class Settings:
    scale = 1.0


def scaled(model, optim, batch):
    loss = model(batch).square().mean() * SETTINGS.scale
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


SETTINGS = Settings()


def changes_alone(parallel):
    """A value changes on rank 1, which then takes that back; then it does on both."""
    torch.manual_seed(0)
    rank_agreement.LONG_SECONDS, rank = 0.5, dist.get_rank()
    model, SETTINGS.scale = nn.Linear(4, 2), 1.0
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    step, batch = compile(scaled, parallel=parallel, shadow=0), torch.ones(2, 4)
    found, seconds = "", 0.0
    for number in range(8):
        if number == 3 and rank == 1:
            start, SETTINGS.scale = time.monotonic(), 0.5
            try:
                step(model, optim, batch)
            except AgreementError as error:
                found, seconds = str(error), time.monotonic() - start
            SETTINGS.scale = 1.0
        if number == 5:
            SETTINGS.scale = 0.25
        step(model, optim, batch)
    rank_agreement.LONG_SECONDS = 5.0
    return found, seconds, len(step.programs)


@pytest.mark.parametrize("parallel", (None, "replicate", "fully_shard"))
def test_a_value_that_changes_on_one_rank_alone(parallel, ranks2):
    first, second = ranks2.run(changes_alone, parallel)
    assert first == ("", 0.0, 2)
    text, seconds, programs = second
    assert programs == 2 and seconds < 60
    assert "program 1 of 'scaled' is captured by rank 1 alone, while other" in text
    assert "SETTINGS.scale: 1.0 -> 0.5" in text
    assert "Change it on all of them, or pass it as a tensor" in text


def fails_on_one(model=None, **options):
    """Rank 1 cannot make the program at first; with ``verify`` it would be the same."""
    tries = []

    def transformation(graph):
        tries.append(graph)
        if dist.get_rank() == 1 and len(tries) == 1:
            raise ValueError("no such bucket\nand more")
        return graph

    model = model or nn.Linear(4, 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    start = time.monotonic()
    again = compile(gm_transformation=transformation, **options)(train)
    try:
        again(model, optim, torch.ones(3, 4))
    except (AgreementError, ValueError) as error:
        found = f"{type(error).__name__}: {error}", time.monotonic() - start
    loss = again(model, optim, torch.ones(3, 4))
    return *found, loss.item()


def test_a_rank_that_fails_is_named_at_once(ranks2):
    (text, seconds, loss), (own, _, same) = ranks2.run(fails_on_one)
    assert loss == same  # they can try again
    assert own == "ValueError: no such bucket\nand more"
    assert "program 0 of 'train', mesh data=2 could not be built on every rank" in text
    assert "  * rank 1: ValueError: no such bucket\n\nNothing was run." in text
    assert seconds < 30


def fails_alone_on_its_data_axis(style):
    """The ranks of the other axis have another data axis each, of one rank."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    layers = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    model = parallelize_module(model, mesh["tp"], layers)
    return fails_on_one(model, parallel_mode=DataParallel(style), mesh=mesh["dp"])


def test_a_rank_that_fails_alone_on_its_data_axis_tells_the_others():
    """On ranks of its own: a mesh that lives on would name the axes of other tests."""
    with Ranks(2) as ranks:
        for style in ("replicate", "fully_shard"):
            found = ranks.run(fails_alone_on_its_data_axis, style, timeout=30)
            check_told(found)


def check_told(found):
    (text, seconds, loss), (own, _, same) = found
    assert loss == same
    assert own == "ValueError: no such bucket\nand more"
    assert "compile: program 0 of 'train'" in text
    assert "could not be built on every rank\n\n  * rank 1: ValueError: no such" in text
    assert seconds < 15  # not after the time-out of an exchange, nor of a collective


def compiles_slowly():
    """Compiling takes longer on one rank than ranks wait for a plan."""
    rank_agreement.PLAN_SECONDS, lower = 1.0, runtime.lower

    def slow(graph, compiled):
        if dist.get_rank() == 1:
            time.sleep(2.0)
        return graph, "not compiled"

    runtime.lower = slow
    model = nn.Linear(4, 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        loss = compile(train, backend="inductor")(model, optim, torch.ones(3, 4))
    finally:
        rank_agreement.PLAN_SECONDS, runtime.lower = 300.0, lower
    return loss.shape


def test_a_rank_that_compiles_slowly_is_waited_for(ranks2):
    assert ranks2.run(compiles_slowly) == [torch.Size([])] * 2


def with_a_mesh_that_is_forgotten():
    """Both ranks lay another mesh over the same ranks; one of them keeps it."""
    kept = [init_device_mesh("cpu", (2,), mesh_dim_names=("other",))]
    if dist.get_rank() == 1:
        kept.clear()
        gc.collect()
    return refused(nn.Linear(4, 2), torch.ones(3, 4), DataParallel("replicate"))


def test_ranks_may_know_a_group_by_other_names(ranks2):
    assert ranks2.run(with_a_mesh_that_is_forgotten) == [None, None]
