"""What a captured step communicates: kinds, bytes, axis, phase and module."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.experimental import register_sharding
from training import train

from torchspmd import CommDebugMode
from torchspmd.errors import CaptureError, UsageError
from torchspmd.step import (
    DataParallel,
    GraphModuleTransformation,
    build_ledger,
    compile,
)
from torchspmd.testing import fake_mesh


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def run(mode=None, mesh=None, function=train):
    model = Net()
    optim = torch.optim.AdamW(model.parameters(), foreach=True)
    compiled = compile(parallel_mode=mode, mesh=mesh)(function)
    for _ in range(2):
        compiled(model, optim, torch.randn(3, 8))
    return model, compiled


@pytest.fixture(scope="module")
def dense():
    """The default mode on eight ranks, captured once; the group is gone again."""
    with fake_mesh(8, ("dp",)) as mesh:
        return run(None, mesh)


@pytest.mark.parametrize("mode", [None, DataParallel("replicate", reduce="sum")])
def test_one_reduction_for_each_gradient(mode, dense):
    with fake_mesh(8, ("dp",)) as mesh:
        model, compiled = dense if mode is None else run(mode, mesh)
        ledger = compiled.programs[0].ledger
        gradients = sum(p.numel() for p in model.parameters()) * 4
        backward = ledger.total(kind="all_reduce", axis="dp", phase="backward")
        assert backward.count == len(list(model.parameters()))
        assert backward.payload_bytes == gradients
        assert backward.wire_bytes == gradients * 2 * 7 // 8
        modules = ledger.total_by("module", phase="backward")
        assert modules[("Net.blocks.1.up",)].count == 2
        assert set(modules) == {
            (f"Net.blocks.{n}.{name}",) for n in (0, 1) for name in ("up", "down")
        }
        # The default mode returns the loss of the whole batch: one more number.
        rest = ledger.total(phase="forward")
        assert rest.payload_bytes == (4 if mode is None else 0)
        assert ledger == build_ledger(compiled.programs[0].graph)


def test_reductions_stand_where_backward_makes_the_gradients(dense):
    _, compiled = dense
    names = [node.name for node in compiled.programs[0].graph.graph.nodes]
    first, last = names.index("all_reduce"), names.index("all_reduce_7")
    assert "mm" in "".join(names[first:last])  # backward goes on in between
    assert last < names.index("_foreach_add")


def test_the_ledger_is_what_running_the_graph_sends():
    with fake_mesh(8, ("dp",)) as mesh:
        model, compiled = run(None, mesh)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled(model, optim, torch.randn(3, 8))
        with CommDebugMode() as mode:
            compiled(model, optim, torch.randn(3, 8))
        seen, told = mode.ledger, compiled.programs[-1].ledger
        by = ("kind", "dtype", "axis", "op")
        assert seen.total_by(*by) == told.total_by(*by)


def test_the_mesh_is_all_ranks_by_default():
    with fake_mesh(4, ("dp",)):
        _, compiled = run()
        (event, *_) = compiled.programs[0].ledger.events
        assert event.group.ranks == (0, 1, 2, 3)


def test_a_mesh_of_two_axes_is_refused():
    with (
        fake_mesh((2, 2), ("dp", "tp")) as mesh,
        pytest.raises(UsageError, match=r"pass its data axis alone"),
    ):
        run(None, mesh)


@torch.library.custom_op("torchspmd_step_test::odd", mutates_args=())
def odd(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


odd.register_fake(torch.empty_like)


def test_an_operator_without_a_rule():
    def oddly(model, optim, batch):
        return odd(model(batch).detach())

    with fake_mesh(4, ("dp",)), pytest.raises(CaptureError) as caught:
        run(function=oddly)
    text = str(caught.value)
    assert "an operator has no sharding rule" in text
    assert "torchspmd_step_test.odd" in text
    assert "return odd(model(batch).detach())" in text
    assert "register_sharding" in text and "DataParallel('replicate'" in text


@torch.library.custom_op("torchspmd_step_test::odder", mutates_args=())
def odder(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


odder.register_fake(torch.empty_like)


def test_an_operator_whose_rule_fails():
    @register_sharding(torch.ops.torchspmd_step_test.odder.default)
    def rule(x):
        raise RuntimeError("it cannot be sharded so")

    def oddly(model, optim, batch):
        return odder(model(batch).detach())

    with fake_mesh(4, ("dp",)), pytest.raises(CaptureError) as caught:
        run(function=oddly)
    text = str(caught.value)
    assert (
        "the sharding rule of an operator does not take what it gets here (RuntimeError: "
        "it cannot be sharded so)"
    ) in text
    assert "DataParallel('replicate'" in text


def test_a_model_with_layouts_needs_a_choice():
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        model = nn.Sequential(nn.Linear(8, 8))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(
            CaptureError, match=r"Sequential.0.weight and 1 more tensors"
        ):
            compile(mesh=mesh["dp"])(train)(model, optim, torch.randn(3, 8))
        mode = DataParallel("replicate", reduce="sum")
        compiled = compile(mesh=mesh["dp"], parallel_mode=mode)(train)
        compiled(model, optim, torch.randn(3, 8))
        ledger = compiled.programs[0].ledger
        assert ledger.total(axis="dp", phase="backward").count == 2


# ----------------------------------------------------------------------------
# A step that outlives its process groups says so.


def test_a_step_whose_groups_were_destroyed():
    model = nn.Linear(4, 4)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    overlapping = GraphModuleTransformation(
        enable_graph_optimization=True, overlap_iterations=True
    )
    step = compile(
        train, parallel_mode=DataParallel("replicate"), gm_transformation=overlapping
    )
    with fake_mesh(2, names=("data",)):
        for _ in range(3):
            step(model, optim, torch.ones(2, 4))
    for batch in (torch.ones(2, 4), torch.ones(3, 4)):  # known, and to be captured
        for use in (step, step.exposure):
            with pytest.raises(UsageError) as caught:
                use(model, optim, batch)
            assert str(caught.value) == (
                "train: this step was captured for the mesh data=2, whose process groups "
                "were destroyed since, so that it cannot be called any more. Call it "
                "before destroy_process_group(), or compile its function again behind "
                "init_process_group()."
            )
    step.close()  # what is pending needs no group any more
