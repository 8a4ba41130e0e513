"""The tables, files and queries of CommDebugMode, and what it refuses."""

import gc
import json
import tracemalloc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from torchspmd import CommDebugMode
from torchspmd.errors import SpmdError, UsageError
from torchspmd.testing import fake_mesh

all_reduce = torch.ops.c10d_functional.all_reduce


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


@pytest.fixture
def parallel():
    with fake_mesh(4, ("tp",)) as mesh:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        yield parallelize_module(MLP(), mesh, plan)


def step(model):
    model(torch.ones(2, 8, requires_grad=True)).sum().backward()


@pytest.fixture
def traced(parallel):
    with CommDebugMode(operations=True) as mode:
        step(parallel)
    return mode, parallel


def test_module_counts_read_both_ways(traced):
    mode, _ = traced
    counts = mode.get_comm_module_counts()
    assert set(counts) == {"Global", "MLP", "MLP.up", "MLP.down"}
    assert counts["MLP"]["forward"] == counts["MLP.down"]["forward"] == {all_reduce: 1}
    assert counts["MLP.up"]["backward"] == {all_reduce: 1}
    assert counts["MLP"][all_reduce] == counts["Global"][all_reduce] == 2
    assert counts["MLP.up"][torch.ops.c10d.broadcast_] == 0
    with pytest.raises(KeyError):
        counts["MLP"]["sideways"]
    assert mode.comm_counts == {all_reduce: 2}
    assert mode.comm_module_counts.keys() == counts.keys()


COUNTS = """\
Global
  FORWARD PASS
  *c10d_functional.all_reduce: 1 (own 0), 64 bytes
  BACKWARD PASS
  *c10d_functional.all_reduce: 1 (own 0), 64 bytes
  MLP
    FORWARD PASS
    *c10d_functional.all_reduce: 1 (own 0), 64 bytes
    BACKWARD PASS
    *c10d_functional.all_reduce: 1 (own 0), 64 bytes
    MLP.up
      BACKWARD PASS
      *c10d_functional.all_reduce: 1 (own 1), 64 bytes
    MLP.down
      FORWARD PASS
      *c10d_functional.all_reduce: 1 (own 1), 64 bytes
"""


def test_module_table(traced, tmp_path):
    mode, _ = traced
    assert mode.generate_module_tracing_table() == COUNTS
    mode.log_module_tracing_table_to_file(tmp_path / "table.txt")
    assert (tmp_path / "table.txt").read_text() == COUNTS


def test_noise_levels(traced, tmp_path):
    mode, _ = traced
    tables = [mode.generate_comm_debug_tracing_table(noise_level=n) for n in range(4)]
    assert tables[0] == COUNTS
    assert "*module type: torch.nn.modules.linear.Linear" in tables[1]
    assert " *weight: (Shard(dim=0),)" in tables[1]
    dtensor_line = "**aten.addmm.default shapes: [16], [2, 8], [8, 16] layouts:"
    assert [dtensor_line in table for table in tables] == [False, True, True, True]
    assert ["**aten.relu.default" in table for table in tables] == [0, 0, 1, 1]
    assert ["**aten.detach.default" in table for table in tables] == [0, 0, 0, 1]
    mode.log_comm_debug_tracing_table_to_file(tmp_path / "log.txt", noise_level=1)
    assert (tmp_path / "log.txt").read_text() == tables[1]


@pytest.mark.parametrize("level", [-5, 4, 99, 1.5, True, "2"])
def test_bad_noise_level(traced, level, tmp_path):
    mode, _ = traced
    message = (
        rf"noise_level={level!r}: choose 0 \(counts\), 1 \(module types, parameters, "
        r"operators on DTensors\), 2 \(other operators\) or 3 \(all\)\."
    )
    for call in (
        mode.generate_comm_debug_tracing_table,
        lambda n: mode.generate_json_dump(tmp_path / "dump.json", n),
        lambda n: mode.log_comm_debug_tracing_table_to_file(tmp_path / "log", n),
    ):
        with pytest.raises(UsageError, match=message):
            call(level)
    assert not list(tmp_path.iterdir())


def test_operators_that_were_not_recorded_are_refused(parallel, tmp_path):
    with CommDebugMode() as mode:
        step(parallel)
    message = (
        r"noise_level=3 lists operators, and they were not recorded\. Make the mode with "
        r"CommDebugMode\(operations=True\), or ask for noise_level=0 \(counts\) or 1"
    )
    for call in (
        mode.generate_comm_debug_tracing_table,
        lambda: mode.generate_json_dump(tmp_path / "dump.json"),
        lambda: mode.log_comm_debug_tracing_table_to_file(tmp_path / "log"),
    ):
        with pytest.raises(UsageError, match=message):
            call()
    assert not list(tmp_path.iterdir())
    table = mode.generate_comm_debug_tracing_table(noise_level=1)
    assert "*module type: torch.nn.modules.linear.Linear" in table
    assert table.endswith(
        "Note: Operators were not recorded: make the mode with "
        "CommDebugMode(operations=True).\n"
    )


def test_json_dump(traced, tmp_path):
    mode, _ = traced
    mode.generate_json_dump(tmp_path / "dump.json", noise_level=2)
    tree = json.loads((tmp_path / "dump.json").read_text())
    (mlp,) = tree["children"]
    assert (tree["fqn"], mlp["fqn"]) == ("Global", "MLP")
    up, down = mlp["children"]
    assert up["module_type"] == "torch.nn.modules.linear.Linear"
    assert up["parameters"][0] == ["weight", "(Shard(dim=0),)"]
    assert up["collectives_backward"] == [["c10d_functional.all_reduce", 1]]
    assert down["collectives_forward"] == [["c10d_functional.all_reduce", 1]]
    names = [operation["name"] for operation in down["operations_forward"]]
    assert "aten.addmm.default" in names and "aten.detach.default" not in names


def test_parameter_and_sharding_info(traced, capsys):
    mode, model = traced
    info = mode.get_parameter_info()
    assert set(info) == {"MLP.up", "MLP.down"}
    assert info["MLP.up"]["weight"].placements == model.up.weight.placements
    assert mode.get_sharding_info()["MLP.down.weight"] == (Shard(1),)
    mode.print_sharding_info()
    assert "MLP.down.weight: (Shard(dim=1),)\n" in capsys.readouterr().out
    mode.print_parameter_info()
    printed = capsys.readouterr().out
    assert "MLP.up.weight: [16, 8] torch.float32 (Shard(dim=0),)\n" in printed
    mode.print_paramater_info()
    assert capsys.readouterr().out == printed


def test_entering_twice_is_refused(parallel):
    mode = CommDebugMode()
    with mode:
        with pytest.raises(UsageError, match="this object was entered twice"):
            mode.__enter__()
        step(parallel)
    assert len(mode.ledger) == 2


def test_bad_limit():
    with pytest.raises(SpmdError, match="max_events=-1"):
        CommDebugMode(max_events=-1)


def test_dropped_events_are_counted_and_said(parallel):
    with CommDebugMode(max_events=3) as mode:
        for _ in range(3):
            step(parallel)
    assert (len(mode.ledger.events), mode.ledger.dropped, len(mode.ledger)) == (3, 3, 6)
    assert (
        "Note: 3 single events were dropped (the limit is 3), with their causes and "
        "lines; counts and bytes include them."
    ) in mode.generate_module_tracing_table()


def test_take_ledger_goes_on_with_an_empty_one(parallel):
    with CommDebugMode() as mode:
        step(parallel)
        first = mode.take_ledger()
        step(parallel)
        step(parallel)
    assert (len(first), len(mode.ledger)) == (2, 4)


def test_many_steps_do_not_grow_memory(monkeypatch):
    monkeypatch.setattr("torchspmd.trace.modules._FIRST_BOUNDARIES", 64)
    monkeypatch.setattr("torchspmd.trace.modules._MAX_BOUNDARIES", 128)
    model = MLP()
    for linear in (model.up, model.down):
        linear.register_forward_hook(lambda *_: dist.all_reduce(torch.ones(1)))
    x = torch.ones(2, 8)

    def run(num_steps):
        for _ in range(num_steps):
            model(x).sum().backward()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    with fake_mesh(4, ("tp",)), CommDebugMode(max_events=100) as mode:
        tracemalloc.start()
        before = run(300)  # everything that has a fixed end is full
        after = run(500)
        tracemalloc.stop()
    assert after - before < 10_000
    assert (len(mode.ledger), mode.ledger.dropped) == (1_600, 1_500)


def test_without_a_process_group_the_error_is_torchs_own():
    with CommDebugMode(), pytest.raises(ValueError, match="group has not been init"):
        nn.Linear(2, 2)(torch.ones(2))
        dist.all_reduce(torch.ones(2))
