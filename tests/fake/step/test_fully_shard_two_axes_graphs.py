"""Fully sharded over dp, laid out over tp: what is sent, held and refused."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from training import train_silently

from torchspmd import _torch
from torchspmd.comm import Phase
from torchspmd.errors import CaptureError, UsageError
from torchspmd.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchspmd.step import DataParallel, compile
from torchspmd.step.graph.metadata import owner_of
from torchspmd.step.modes.shard_layout import can_describe
from torchspmd.testing import fake_mesh

MODE = DataParallel("fully_shard")
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
BY_TOKEN = {
    "up": ColwiseParallel(input_layouts=Shard(0)),
    "down": RowwiseParallel(output_layouts=Shard(0)),
    "norm": SequenceParallel(sequence_dim=0),
}


class Net(nn.Module):
    def __init__(self, hidden=12):
        super().__init__()
        self.up = nn.Linear(8, hidden)
        self.down = nn.Linear(hidden, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(self.down(torch.relu(self.up(x))))


def train(plan=PLAN, *, rank=0, shape=(2, 2), model=None, mode=MODE, batch=(3, 8)):
    """A model and its program after a step on a fake mesh."""
    with fake_mesh(shape, ("dp", "tp"), rank=rank) as mesh:
        model = parallelize_module(model or Net(), mesh["tp"], plan)
        optim = torch.optim.AdamW(model.parameters(), lr=0.1)
        compiled = compile(parallel_mode=mode, mesh=mesh["dp"])(train_silently)
        compiled(model, optim, torch.randn(batch))
        return model, optim, compiled.programs[0]


def test_layouts_are_those_of_fully_shard():
    for rank, hidden in ((0, 12), (3, 9)):  # 9 rows: 5 and 4, then 3 and 2, 2 and 2
        model, optim, _ = train(rank=rank, model=Net(hidden))
        with fake_mesh((2, 2), ("dp", "tp"), rank=rank) as mesh:
            theirs = parallelize_module(Net(hidden), mesh["tp"], PLAN)
            fully_shard(theirs, mesh=mesh["dp"])
        for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
            assert p.placements == q.placements
            assert p.device_mesh.mesh_dim_names == q.device_mesh.mesh_dim_names
            assert (p.shape, p.to_local().shape) == (q.shape, q.to_local().shape)
            moment = optim.state[p]["exp_avg"]
            assert moment.placements == p.placements
            assert moment.to_local().shape == p.to_local().shape
        assert model.norm.weight.placements == (Shard(0),)
        assert len(model.up.weight.placements) == 2


def test_what_is_sent_over_which_axis():
    _, _, program = train()
    counts = {
        key: total.count
        for key, total in program.ledger.total_by("axis", "kind", "phase").items()
    }
    assert counts == {
        ("dp", "all_gather", "forward"): 6,
        # No gradient flows into the batch; biases are not needed in backward.
        ("dp", "all_gather", "backward"): 2 + 1,
        ("dp", "reduce_scatter", "backward"): 6,
        ("tp", "all_reduce", "forward"): 1,
    }
    rows = program.ledger.total_by("module", "kind", "phase")
    share = rows["Net.up", "all_gather", "forward"].payload_bytes
    assert share == 4 * (6 * 8 + 6)  # this rank's half of the weight and the bias


def test_only_parameters_are_gathered_again():
    _, _, program = train(BY_TOKEN, batch=(4, 8))
    rows = program.ledger.total_by("axis", "kind", "phase")
    # The batch in forward, and the gradient of the scattered sum in backward.
    assert rows["tp", "all_gather", "forward"].count == 1
    assert rows["tp", "all_gather", "backward"].count == 1
    gathers = list(parameter_gathers(program.graph.graph))
    assert len(gathers) == 6
    for node in gathers:
        (wait,) = node.users
        assert {owner_of(user).phase for user in wait.users} == {Phase.FORWARD}


def parameter_gathers(graph):
    """Those of forward."""
    for node in graph.find_nodes(op="call_function", target=_torch.ALL_GATHER):
        (source,) = node.all_input_nodes
        name = source.meta.get("torchspmd_name", "")
        if name.startswith("Net.") and owner_of(node).phase is Phase.FORWARD:
            yield node


def test_ranks_of_the_data_axis_have_the_same_nodes():
    for pair in ((0, 2), (1, 3)):
        graphs = [train(rank=rank, model=Net(9))[2].graph for rank in pair]
        first, second = ([(n.op, n.target) for n in g.graph.nodes] for g in graphs)
        assert first == second


def test_tied_frozen_and_marked_parameters():
    model = Net()
    model.extra = nn.Linear(8, 12, bias=False)
    model.extra.weight = model.up.weight
    model.down.requires_grad_(False)
    model.norm.weight.is_special = True
    model, _, program = train({**PLAN, "extra": ColwiseParallel()}, model=model)
    assert model.extra.weight is model.up.weight
    assert not model.down.weight.requires_grad
    assert len(model.down.weight.placements) == 2
    assert model.norm.weight.is_special
    totals = program.ledger.total_by("module", "kind")
    assert ("Net.down", "reduce_scatter") not in totals
    assert totals["Net.up", "reduce_scatter"].count == 2


def test_parts_without_rows_are_not_cut_again():
    """Three rows on four ranks of tp: the last one has nothing to gather."""
    model, _, _ = train({"down": ColwiseParallel()}, shape=(2, 4), model=Thin())
    assert model.down.weight.placements == (Replicate(), Shard(0))
    assert model.up.weight.placements == (Shard(0),)


class Thin(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.down(self.up(x))


def test_a_second_step_takes_the_shards():
    with fake_mesh((2, 2, 2), ("pp", "dp", "tp"), rank=5) as mesh:  # a part of a mesh
        model = parallelize_module(Net(), mesh["tp"], PLAN)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        compile(parallel_mode=MODE, mesh=mesh["dp"])(train_silently)(
            model, optim, torch.ones(3, 8)
        )
        before = list(model.parameters())
        again = compile(parallel_mode=MODE, mesh=mesh["dp"])(train_silently)
        again(model, optim, torch.randn(3, 8))
        after = model.parameters()
        assert all(p is q for p, q in zip(before, after, strict=True))
        assert model.up.weight.device_mesh == mesh["dp", "tp"]


def test_state_and_gradients_from_before_are_cut_too():
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        model = parallelize_module(Net(), mesh["tp"], PLAN)
        optim = torch.optim.AdamW(model.parameters(), lr=0.1)
        train_silently(model, optim, torch.randn(3, 8))
        model(torch.randn(3, 8)).sum().backward()
        grad = model.up.weight.grad.to_local().clone()

        def adds(model, optim, batch):
            model(batch).sum().backward()

        compile(parallel_mode=MODE, mesh=mesh["dp"])(adds)(
            model, optim, torch.ones(3, 8)
        )
        weight = model.up.weight
        assert weight.grad.to_local().shape == (3, 8) != grad.shape
        assert optim.state[weight]["exp_avg"].placements == weight.placements
        assert type(optim.state[weight]["step"]) is torch.Tensor


def refusal(build, *, shape=(2, 2), function=train_silently, batch=(3, 8)):
    """The text of the refusal; the model is as before."""
    with fake_mesh(shape, ("dp", "tp")) as mesh:
        model, optim = build(mesh)
        before = list(model.parameters())
        with pytest.raises(CaptureError) as caught:
            compiled = compile(parallel_mode=MODE, mesh=mesh["dp"])(function)
            compiled(model, optim, torch.randn(batch))
        after = model.parameters()
        assert all(p is q for p, q in zip(before, after, strict=True))
    return str(caught.value)


def sgd(model):
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_rows_that_no_layout_describes():
    text = refusal(
        lambda mesh: sgd(parallelize_module(Net(7), mesh["tp"], PLAN)), shape=(3, 2)
    )
    assert "Net.up.weight is a DTensor [Shard(dim=0)] on DeviceMesh((tp=2)" in text
    assert "7 rows over 2 ranks, and each part again over 3, is a layout that" in text
    assert "Pad it to a multiple of 2 rows, or use DataParallel('replicate')" in text
    assert "Net.up.bias is" in text and "Nothing was changed" in text
    assert "Net.down" not in text  # its seven columns are no problem


def test_rows_of_two_axes_as_torch_counts_them():
    """The rule is torch's own: sizes and offsets of every rank, for many sizes."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    from torchspmd.layout.shards import shard_bounds

    def is_right(rows, dp, tp):
        layout = (_StridedShard(0, split_factor=tp), Shard(0))
        for rank in range(dp * tp):
            place = divmod(rank, tp)
            first, last = shard_bounds(rows, tp, place[1])
            start, stop = shard_bounds(last - first, dp, place[0])
            found = _compute_local_shape_and_global_offset(
                (rows,), (dp, tp), list(place), layout
            )
            if found[0] != (stop - start,):
                return False
            if stop > start and found[1] != (first + start,):
                return False
        return True

    cases = [(r, d, t) for r in range(1, 18) for d in range(1, 5) for t in range(2, 5)]
    described = [can_describe(*case) for case in cases]
    assert described == [is_right(*case) for case in cases]
    assert True in described and False in described


def test_axes_of_two_meshes():
    def build(mesh):
        other = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
        return sgd(parallelize_module(Net(), other, PLAN))

    text = refusal(build)
    assert "its axis and the data axis are not two axes of one mesh" in text
    assert "lay the model out over mesh['tp'] and pass mesh=mesh['dp']" in text


def test_the_axis_of_a_style_is_no_data_axis():
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        plan = {"up": ColwiseParallel(output_layouts=Replicate())}
        model = parallelize_module(Net(), mesh["tp"], plan)
        compiled = compile(parallel_mode=MODE, mesh=mesh["tp"])(lambda m, x: m(x))
        with pytest.raises(CaptureError) as caught:
            compiled(model, torch.randn(3, 8))
    text = str(caught.value)
    assert "Net.up has a style that computes on shards over this very axis" in text
    assert "pass the data axis, mesh=mesh['dp']" in text


def test_axes_of_one_rank():
    model, _, program = train(shape=(1, 1))
    assert model.up.weight.device_mesh.mesh_dim_names == ("dp", "tp")
    assert model.norm.weight.device_mesh.mesh_dim_names == ("dp",)
    assert program.ledger.total(axis="tp").count == 0


def test_layouts_that_are_no_shards():
    def build(mesh):
        model = nn.Linear(8, 8)
        partial = DTensor.from_local(torch.ones(8), mesh["tp"], [Partial()])
        model.bias = nn.Parameter(partial)
        two = distribute_tensor(torch.ones(8, 8), mesh, [Shard(1), Replicate()])
        model.weight = nn.Parameter(two)
        return sgd(model)

    text = refusal(build)
    assert "Linear.bias is a DTensor [Partial(sum)] on" in text
    assert "Linear.weight is a DTensor [Shard(dim=1), Replicate()] on" in text
    assert "only Shard(dim) or Replicate() over one other axis" in text


def test_a_gradient_in_another_layout():
    def build(mesh):
        model, optim = sgd(parallelize_module(Net(), mesh["tp"], PLAN))
        wrong = distribute_tensor(torch.ones(12, 8), mesh["tp"], [Replicate()])
        model.up.weight.grad = wrong
        return model, optim

    text = refusal(build)
    assert (
        "Net.up.weight.grad is [Replicate()], its parameter [Shard(dim=0)] on" in text
    )
    assert "zero_grad()" in text


def test_a_norm_over_two_meshes():
    def clips(model, optim, batch):
        model(batch).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def build(mesh):
        return sgd(parallelize_module(Net(), mesh["tp"], PLAN))

    text = refusal(build, function=clips)
    assert "an operator gets DTensors of several meshes" in text
    assert "Use torchspmd.clip_grad_norm_ instead" in text


def test_whole_parameters_of_tp_are_not_used_by_mistake():
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        model, optim = sgd(parallelize_module(Net(), mesh["tp"], PLAN))
        weight = model.up.weight
        elsewhere = torch.optim.SGD([weight], lr=0.1)
        compile(parallel_mode=MODE, mesh=mesh["dp"])(train_silently)(
            model, optim, torch.ones(3, 8)
        )
        with pytest.raises(UsageError, match=r"Net.up.weight: this is the whole"):
            weight.sum()
        with pytest.raises(UsageError, match=r"pass every optimizer"):
            elsewhere.zero_grad()
            elsewhere.step()
        assert repr(weight) == "<Net.up.weight: replaced by its shard>"
