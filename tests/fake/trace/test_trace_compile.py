"""Regions run by torch.compile are recorded, or the ledger says what was not seen."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from training import train

from torchspmd import CommDebugMode, DataParallel, compile
from torchspmd.testing import fake_mesh

GROUP = "0"


class Reduces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = torch.ops._c10d_functional.all_reduce(self.linear(x), "sum", GROUP)
        return torch.ops._c10d_functional.wait_tensor(x) + 1


@pytest.fixture(autouse=True)
def mesh():
    torch._dynamo.reset()
    counters.clear()
    with fake_mesh(4, ("tp",)) as mesh:
        yield mesh
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_region_counts_as_eager_does(backend):
    """Upstream (pytorch #164143): a dispatch mode silently turns compilation off."""
    model = Reduces()
    with torch.no_grad(), CommDebugMode() as eager:
        model(torch.ones(2, 4))
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad(), CommDebugMode() as first:  # compiles and runs
        compiled(torch.ones(2, 4))
    with torch.no_grad(), CommDebugMode() as second:
        compiled(torch.ones(2, 4))
    assert (
        first.get_comm_counts() == second.get_comm_counts() == eager.get_comm_counts()
    )
    assert first.ledger.total() == eager.ledger.total()
    assert counters["stats"]["unique_graphs"] == 1


def test_recording_does_not_compile_again():
    compiled = torch.compile(Reduces(), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        compiled(torch.ones(2, 4))
        with CommDebugMode() as mode:
            compiled(torch.ones(2, 4))
        compiled(torch.ones(2, 4))
    assert len(mode.ledger) == 1
    assert counters["stats"]["unique_graphs"] == 1


def test_the_ledger_says_that_modules_inside_are_not_told_apart():
    compiled = torch.compile(Reduces(), backend="aot_eager")
    with torch.no_grad(), CommDebugMode() as mode:
        compiled(torch.ones(2, 4))
    (event,) = mode.ledger.events
    assert (event.compiled, event.module) == (True, "Reduces")
    (note,) = mode.ledger.notes
    assert note == (
        "communication inside a region compiled by torch.compile is attributed to the "
        "module that was called, not to those inside it"
    )


def test_operators_of_compiled_regions_are_said_to_be_missing():
    compiled = torch.compile(Reduces(), backend="aot_eager")
    with torch.no_grad(), CommDebugMode(operations=True) as mode:
        compiled(torch.ones(2, 4))
    assert counters["stats"]["unique_graphs"] == 1
    assert (
        "operators inside regions compiled by torch.compile are not listed one by one: "
        "Reduces"
    ) in mode.ledger.notes


def test_module_compiled_in_place():
    model = nn.Sequential(Reduces(), Reduces())
    model[1].compile(backend="aot_eager")
    with torch.no_grad(), CommDebugMode() as mode:
        model(torch.ones(2, 4))
    modules = [(event.module, event.compiled) for event in mode.ledger.events]
    assert modules == [("Sequential.0", False), ("Sequential.1", True)]


def test_replay_of_a_cuda_graph_is_a_line_in_the_ledger(monkeypatch):
    plain_replay = torch.cuda.CUDAGraph.replay
    replays = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: replays.append(1))
    fake_replay = torch.cuda.CUDAGraph.replay
    with CommDebugMode() as outer, CommDebugMode() as inner:
        torch.cuda.CUDAGraph.replay(None)
    torch.cuda.CUDAGraph.replay(None)
    assert torch.cuda.CUDAGraph.replay is fake_replay
    assert len(replays) == 2
    for mode in (outer, inner):
        (note,) = mode.ledger.notes.items()
        text = (
            "a CUDA graph was replayed: what it communicates cannot be seen; record the "
            "run that captures it"
        )
        assert note == (text, 1)
    monkeypatch.undo()
    assert torch.cuda.CUDAGraph.replay is plain_replay


def test_gradients_of_compiled_modules_belong_to_their_owners():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    compiled = torch.compile(model, backend="aot_eager")
    with CommDebugMode() as mode:
        compiled(torch.ones(2, 4)).sum().backward()
    assert {
        key: total.count for key, total in mode.ledger.total_by("module").items()
    } == {("Sequential.0",): 2, ("Sequential.1",): 2}


def test_tracing_with_make_fx_counts_each_communication_once():
    from torch.fx.experimental.proxy_tensor import make_fx

    model = Reduces()
    with torch.no_grad(), CommDebugMode() as mode:
        make_fx(model)(torch.ones(2, 4))
    assert len(mode.ledger) == 1


def test_plain_calls_after_recording_are_left_alone():
    with CommDebugMode():
        dist.all_reduce(torch.ones(4))
    for name in ("c10d::allreduce_", "_c10d_functional::all_reduce"):
        table = torch._C._dispatch_dump_table(name)
        (line,) = [row for row in table.splitlines() if row.startswith("BackendSelect")]
        assert "fallthrough" in line


compiled_step = compile(train, parallel_mode=DataParallel("replicate"))


def test_compiled_steps_are_counted_once_with_module_and_phase():
    """Neither a capture nor the run after it counts twice; nodes know whose they are."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optim = torch.optim.AdamW(model.parameters())
    for _ in range(3):  # two captures: optimizer states appear in the first step
        with CommDebugMode() as mode:
            compiled_step(model, optim, torch.ones(2, 4))
        by_module = mode.ledger.total_by("module", "phase")
        assert mode.ledger.rows == compiled_step.programs[-1].ledger.rows
        assert {key: total.count for key, total in by_module.items()} == {
            ("Sequential.0", "backward"): 2,
            ("Sequential.1", "backward"): 2,
        }
        assert not mode.ledger.notes
