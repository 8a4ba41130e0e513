"""check_parity on real ranks: verdicts, compiled steps, local functions, own jobs."""

import functools

import check_parity as example
import parity_cases as cases
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from torchspmd import local_map
from torchspmd._cli import main
from torchspmd.errors import ParityError, RankError
from torchspmd.parallel import ColwiseParallel, parallelize_module
from torchspmd.step import DataParallel
from torchspmd.verify import (
    check_local_parity,
    check_parity,
    compare_recordings,
    record,
)
from torchspmd.verify.parity.match import whole_values
from torchspmd.verify.recording.recorder import take

BLOCKS = (("norm",), ("pair", 12), ("attention",))
RIGHT = functools.partial(cases.spread, blocks=BLOCKS, layouts=(True,) * 3)
WRONG = functools.partial(RIGHT, bug="blocks.1.down")
MODEL = (cases.build, cases.step, cases.batch())


# The verdict.


def test_agreement_says_what_was_compared(ranks2):
    verdict = check_parity(*MODEL, parallelize=RIGHT, mesh={"tp": 2}, ranks=ranks2)
    assert verdict.first is None
    assert verdict.compared["gradient of a parameter"] == 3 * 16
    assert verdict.compared["optimizer state"] == 3 * 16
    lines = str(verdict).splitlines()
    assert lines[0] == "parity: the parallel run (tp=2) agrees with one device"
    assert "gradients of parameters 48, losses 3" in lines[2]
    assert lines[3].startswith("  tolerance: ")
    assert lines[3].endswith("(float32, 11 module calls)")


def test_a_difference_is_raised_with_its_place_and_cause(ranks2):
    with pytest.raises(ParityError) as caught:
        check_parity(*MODEL, parallelize=WRONG, mesh={"tp": 2}, ranks=ranks2)
    first = caught.value.verdict.first
    assert (first.place, first.step, first.ranks) == ("blocks.1.down", 0, (0, 1))
    assert first.relative == pytest.approx(0.5, rel=0.2)
    text = str(caught.value)
    assert "the parallel run (tp=2) does not agree with one device" in text
    assert "first difference: blocks.1.down\n" in text
    assert (
        "activation 'blocks.1.down' in step 0, on rank 0, 1 [tp: Replicate]\n" in text
    )
    assert "likely cause (factor): right but for a constant factor of 1.5" in text
    assert "what follows from it, or differs too:" in text


def own_partial(model, mesh):
    """A parallel layer of the user's own, with a plain Linear inside it."""
    layer = model.blocks[1].down
    rank, size = mesh["tp"].get_local_rank(), mesh["tp"].size()
    model.blocks[1].down = Row(layer, rank, size)


class Row(nn.Module):
    def __init__(self, layer, rank, size):
        super().__init__()
        self.rank, self.size = rank, size
        self.inner = nn.Linear(
            layer.in_features // size, layer.out_features, bias=False
        )
        self.inner.weight = nn.Parameter(layer.weight.detach().chunk(size, 1)[rank])
        self.bias = layer.bias

    def forward(self, x):
        part = self.inner(x.chunk(self.size, -1)[self.rank])
        whole = part.detach().clone()
        dist.all_reduce(whole)
        return part + (whole - part.detach()) + self.bias


def test_parameters_under_another_name_are_missed_not_ignored(ranks2):
    verdict = check_parity(
        *MODEL, parallelize=own_partial, mesh={"tp": 2}, ranks=ranks2, raises=False
    )
    assert verdict.first.name == "blocks.1.down.weight"
    assert verdict.first.cause.text == "the parallel run has no such parameter"
    assert "only the parallel run has blocks.1.down.inner.weight" in str(verdict)


def same_everywhere(model, mesh):
    return DistributedDataParallel(model)


def test_ddp_with_the_same_rows_everywhere_proves_nothing(ranks2):
    verdict = check_parity(
        *MODEL, parallelize=same_everywhere, ranks=ranks2, raises=False
    )
    assert verdict.first is None
    assert verdict.vacuous[0].startswith(
        "the model is wrapped by DistributedDataParallel, but every rank got the whole"
    )


def failing(model, mesh):
    raise ValueError("no such plan")


def test_a_parallel_run_that_fails_is_told_with_its_own_error():
    with pytest.raises(RankError, match="no such plan"):
        check_parity(*MODEL, parallelize=failing, world_size=2)


# Bitwise.


def test_bitwise_on_request(ranks2):
    same = {"mesh": {"tp": 2}, "ranks": ranks2, "tolerance": "bitwise"}
    assert check_parity(*MODEL, **same)
    verdict = check_parity(*MODEL, parallelize=RIGHT, raises=False, **same)
    assert not verdict  # sums over ranks are taken in another order
    assert verdict.first.relative < 1e-5


# Compiled steps.


def compiled_step(model, optim, given):
    return cases.step(model, optim, given)[0]


def test_compiled_steps(ranks2):
    arguments = (cases.build, compiled_step, cases.batch())
    verdict = check_parity(*arguments, compile=True, steps=2, ranks=ranks2)
    assert "activations and their gradients are not seen" in str(verdict)
    assert verdict.compared["parameter"] == 3 * 16
    total = {"parallel_mode": DataParallel("replicate", reduce="sum")}
    verdict = check_parity(
        *arguments, compile=total, steps=2, ranks=ranks2, raises=False
    )
    assert verdict.first.place == "(optimizer)"
    assert verdict.first.cause.code == "update-factor"


def test_compiled_fully_sharded_steps(ranks2):
    """Shards take the place of the parameters in the first step; these are compared."""
    verdict = check_parity(
        cases.build,
        compiled_step,
        cases.batch(),
        mesh={"dp": 2},
        compile={"parallel_mode": DataParallel("fully_shard"), "mesh": "dp"},
        steps=2,
        ranks=ranks2,
    )
    assert verdict.compared["parameter"] == 3 * 16


# Local functions.


def product(x, weight):
    return x @ weight


@local_map(out_placements=[Partial()], in_placements=([Shard(1)], [Shard(0)]))
def mapped(x, weight):
    return x @ weight


# It has the name of the other function.
product_mapped = local_map(
    product, out_placements=[Partial()], in_placements=([Shard(1)], [Shard(0)])
)


@local_map(
    out_placements=[Shard(0)],
    in_placements=([Shard(0)], [Replicate()]),
    in_grad_placements=([Shard(0)], [Replicate()]),
)
def mislabelled(x, weight):
    return x @ weight


def test_local_functions(ranks2):
    arguments = (torch.randn(4, 6), torch.randn(6, 3))
    layouts = ([Shard(1)], [Shard(0)])
    options = {"mesh": {"tp": 2}, "ranks": ranks2}
    for function in (mapped, product_mapped):
        assert check_local_parity(function, product, arguments, layouts, **options)
    rows = ([Shard(0)], [Replicate()])
    verdict = check_local_parity(
        mislabelled, product, arguments, rows, **options, raises=False
    )
    assert verdict.first.name == "argument1"
    assert verdict.first.cause.code == "missing-reduction"


@pytest.mark.parametrize("seed", [22, 38])
def test_a_loss_whose_terms_cancel_may_round(ranks2, seed):
    torch.manual_seed(seed)
    arguments = (torch.randn(4, 6), torch.randn(6, 8))
    layouts = ([Shard(1)], [Shard(0)])
    options = {"mesh": {"tp": 2}, "ranks": ranks2}
    assert check_local_parity(mapped, product, arguments, layouts, **options)


# In a job of one's own, compared later.


def own_job(folder, axis, bug=""):
    size = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(0)
    model, mesh = cases.build(), None
    if size > 1:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=(axis,))
        layouts = (axis == "tp",) * 3
        data = "" if axis == "tp" else "fsdp"
        model = cases.spread(model, mesh, BLOCKS, layouts, data, bug)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    split = axis == "dp" and size > 1
    axes = ("dp",) if split else ()
    with record(folder, model, optimizer, mesh=mesh, data_axes=axes) as recorder:
        for number in range(2):
            given = cases.batch(number)
            if split:
                given = [part.chunk(size)[dist.get_rank()] for part in given]
            recorder.end_step(*cases.step(model, optimizer, given))


def test_recordings_of_different_jobs(ranks2, ranks4, tmp_path, capsys):
    own_job(tmp_path / "one", "tp")
    ranks2.run(own_job, str(tmp_path / "tp2"), "tp")
    ranks4.run(own_job, str(tmp_path / "tp4"), "tp")
    ranks2.run(own_job, str(tmp_path / "dp2"), "dp")
    ranks2.run(own_job, str(tmp_path / "wrong"), "tp", "blocks.2")
    for name in ("tp2", "tp4", "dp2"):
        verdict = compare_recordings(tmp_path / "one", tmp_path / name)
        assert verdict, str(verdict)
    for left, right in (("tp2", "tp4"), ("dp2", "tp2"), ("tp4", "dp2")):
        verdict = compare_recordings(tmp_path / left, tmp_path / right)
        assert verdict, str(verdict)
        assert verdict.compared["parameter"] == 3 * 16
    wrong = [str(tmp_path / "one"), str(tmp_path / "wrong")]
    assert main(["parity", *wrong]) == 1
    assert "first difference: blocks.2\n" in capsys.readouterr().out


def test_a_rank_that_is_missing(ranks2, tmp_path):
    own_job(tmp_path / "one", "tp")
    ranks2.run(own_job, str(tmp_path / "tp2"), "tp")
    (tmp_path / "tp2" / "rank1.json").unlink()
    with pytest.raises(ValueError, match="rank 1 of 2 did not finish its recording"):
        compare_recordings(tmp_path / "one", tmp_path / "tp2")


# The example.


def test_example(ranks2):
    right, wrong = example.check(ranks2)
    assert right
    assert wrong.first.place == "2.down"
    assert wrong.first.cause.code == "missing-reduction"


# Layouts are put together as DTensor does.


def shards_of_a_2d_layout():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    weight = model[0].weight
    return take(weight, dist.get_rank(), 1 << 20), weight.full_tensor().detach()


def test_strided_shards(ranks4):
    found = ranks4.run(shards_of_a_2d_layout)
    pieces = [piece for piece, _ in found]
    assert pieces[0].layout[0].startswith("_S(0")
    for value in whole_values(pieces):
        assert torch.equal(value, found[0][1])
