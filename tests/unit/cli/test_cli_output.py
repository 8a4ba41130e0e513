"""Output that nobody reads any more is no error, for all subcommands."""

import os
import subprocess
import sys

import pytest

from torchspmd.comm import CommEvent, Group, Kind, Ledger, save_ledger

pytestmark = pytest.mark.unit

TRAIN = """\
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters())
model(torch.ones(4)).sum().backward()
optimizer.step()
print("the script's own line", flush=True)
"""


@pytest.fixture
def folder(tmp_path):
    ledger = Ledger()
    save_ledger(ledger, tmp_path / "a.json")
    group = Group("0", (0, 1), "tp")
    ledger.append(CommEvent(Kind.ALL_REDUCE, "op", "float32", (8,), 32, 32, group))
    save_ledger(ledger, tmp_path / "b.json")
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def run_unread(folder, *words, **environment):
    """Its exit code and what it said on standard error; its output has no reader."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "torchspmd", *words],
        stdout=writer,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "", **environment},
        cwd=folder,
        text=True,
        check=False,
    )
    os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("words", "unbuffered", "code"),
    [
        (["diff", "a.json", "a.json"], "", 0),
        (["diff", "a.json", "b.json", "--json"], "1", 1),
        (["plan", "--help"], "", 0),
    ],
)
def test_the_exit_code_is_that_of_a_run_with_a_reader(folder, words, unbuffered, code):
    assert run_unread(folder, *words, PYTHONUNBUFFERED=unbuffered) == (code, "")


def test_the_script_goes_on_and_the_ledger_is_written(folder):
    words = ["trace", "train.py", "--world-size", "2", "--out", "out.json"]
    code, error = run_unread(folder, *words)
    assert code == 0, error
    assert error == "tracing train.py as rank 0 of 2 (simulated) ...\n"
    assert (folder / "out.json").exists()
