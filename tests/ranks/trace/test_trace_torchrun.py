"""``torchspmd trace`` under torchrun: the real thing, one report for all ranks."""

import signal
import subprocess
import sys

import pytest
from processes import run_forked
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import LaunchConfig, elastic_launch

from torchspmd import load_ledger
from torchspmd._cli import main

TRAIN = """\
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(2, 4)).sum().backward()
    if "odd" in sys.argv and dist.get_rank() == 1:
        dist.send(torch.ones(8), 0)
    elif "odd" in sys.argv:
        dist.recv(torch.ones(8), 1)
    if "fail" in sys.argv and dist.get_rank() == 1:
        raise ValueError("rank 1 fails")
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def torchrun(script, *options):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "torchspmd",
        "trace",
        str(script),
        *options,
    ]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False
    )


def launch(words):
    """What torchrun does, with forks of this process for workers."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="none",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    try:
        elastic_launch(config, run_command)(words)
    except ChildFailedError:
        return 1
    return 0


def run_command(words):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the handler of the launcher
    if main(["trace", *words]):
        raise SystemExit(1)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def check_sum(done, out, num_steps):
    """One report of the steps of both ranks, on the screen and in the file."""
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Communication by module") == 1
    assert f"the sum of 2 ranks, {num_steps} optimizer steps" in done.stdout
    total = load_ledger(out).total(kind="all_reduce", phase="backward")
    assert (total.count, total.payload_bytes) == (2 * num_steps, 2 * num_steps * 80)
    # Of an all_reduce over two ranks each sends its whole payload: 80 bytes a step.
    rows = [line.split() for line in done.stdout.splitlines()]
    (row,) = [row for row in rows if row[:1] == ["all_reduce"] and "backward" in row]
    assert row[-4:] == [str(160 * num_steps), "B", str(80 * num_steps), "B"]


def test_one_report_with_the_sum_of_all_ranks(script, tmp_path):
    out = tmp_path / "report.json"
    words = [str(script), "--steps", "0", "--out", str(out)]
    done = run_forked(launch, words, folder=tmp_path)
    check_sum(done, out, 3)
    assert "differs" not in done.stdout


def test_a_rank_that_differs_is_a_line(script, tmp_path):
    out = tmp_path / "report.json"
    done = torchrun(script, "--steps", "2", "--out", str(out), "--", "odd")
    check_sum(done, out, 2)
    words = " ".join(done.stdout.split())
    assert (
        "Rank 1 differs from rank 0: 0 instead of 2 recv (float32, 0 instead of 64 bytes) "
        "in forward of Global; 2 instead of 0 send (float32, 64 instead of 0 bytes) in "
        "forward of Global."
    ) in words


def test_a_rank_that_fails_ends_the_run(script, tmp_path):
    done = run_forked(launch, [str(script), "--", "fail"], folder=tmp_path)
    assert done.returncode != 0
    assert "ValueError: rank 1 fails" in done.stderr
    assert "Communication by module" not in done.stdout
