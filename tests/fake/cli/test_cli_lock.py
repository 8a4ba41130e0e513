"""``torchspmd lock`` and ``torchspmd check``, as a user and as CI call them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchspmd._cli import main
from torchspmd.verify.lock.lockfile import load_lock

TRAIN = """\
import argparse
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torchspmd.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=4)
layers = parser.parse_args().layers
mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
model = nn.Sequential(*[
    nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(layers)
])
plan = {"*.0": ColwiseParallel(), "*.2": RowwiseParallel()}
parallelize_module(model, mesh["tp"], plan)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.ones(4, 16, device="cuda", requires_grad=True)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("a step")
"""


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    def state():
        return nn.Module.__call__, DeviceMesh.__init__, list(sys.path), Path.cwd()

    before = state()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    yield
    assert state() == before
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
    assert not dist.is_initialized()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(TRAIN)
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        yield tmp_path


def lock(*words):
    return main(["lock", "train.py", "--mesh", "dp=2,tp=4", *words])


def change(folder, old, new):
    text = (folder / "train.py").read_text()
    assert old in text
    (folder / "train.py").write_text(text.replace(old, new))


def test_lock_then_check(folder, capsys):
    assert lock() == 0
    captured = capsys.readouterr()
    assert captured.out == "comm.lock: 8 communications, 2.00 KiB payload, 8 rows.\n"
    assert "a step" in captured.err  # the script's words are not the answer
    text = (folder / "comm.lock").read_text()
    assert "\nscript train.py\nmesh dp=2,tp=4\nrank 0\nsteps 1\nskip 0\n" in text
    assert "\nforward Sequential.[0-3].2 all_reduce tp float32 1 256\n" in text
    assert "\nbackward Sequential.[0-3].0 all_reduce tp float32 1 256\n" in text
    weights = 4 * (2 * 16 * 32 + 32) // 4 + 4 * 16
    assert f"\nmemory parameters {4 * weights}\n" in text
    assert len(text.splitlines()) < 25
    assert main(["check"]) == 0
    assert capsys.readouterr().out == (
        "comm.lock: as locked, 8 communications, 2.00 KiB payload.\n"
    )


def test_check_tells_each_change_and_how_to_accept_it(folder, capsys):
    lock("--", "--layers", "2")
    change(folder, "RowwiseParallel()", "RowwiseParallel(output_layouts=Shard(0))")
    change(folder, "ColwiseParallel()", "ColwiseParallel(input_layouts=Shard(0))")
    change(folder, "AdamW(model.parameters())", "SGD(model.parameters())")
    capsys.readouterr()
    assert main(["check"]) == 1
    out = capsys.readouterr().out
    assert (
        "\n-1 all_reduce of float32 over tp, 256 B, forward of Sequential.[0-1].2 "
        "(each of 2)" in f"\n{out}"
    )
    assert (
        "+1 reduce_scatter of float32 over tp, 1.00 KiB, forward of Sequential" in out
    )
    assert "bytes of optimizer on a rank: 0 B instead of " in out
    assert out.splitlines()[-1].endswith(
        "To accept: torchspmd lock train.py --mesh dp=2,tp=4 -o comm.lock -- --layers 2"
    )
    accept = out.splitlines()[-1].partition("To accept: torchspmd ")[2]
    assert main(accept.split()) == 0
    assert main(["check", "comm.lock"]) == 0


def test_a_gather_that_sneaked_in_has_its_line(folder, capsys):
    lock()
    change(
        folder,
        "    optimizer.step()\n",
        "    model[3][2].weight.redistribute(placements=[Replicate()])\n"
        "    optimizer.step()\n",
    )
    capsys.readouterr()
    assert main(["check"]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first == (
        "+1 all_gather of float32 over tp, 2.00 KiB, forward of Global: redistribution "
        "from Shard(1) to Replicate at train.py:20 in <module>"
    )
    assert last.startswith("comm.lock: 1 change. To accept: torchspmd lock train.py")


def test_the_same_text_on_every_machine_and_run(folder, tmp_path):
    """Also the test of ``python -m torchspmd``."""
    lock("-o", "here.lock")
    elsewhere = tmp_path / "else" / "where"
    elsewhere.mkdir(parents=True)
    shutil.copy(folder / "train.py", elsewhere)
    command = [sys.executable, "-m", "torchspmd", "lock", "else/where/train.py"]
    subprocess.run(
        [*command, "--mesh", "dp=2,tp=4", "-o", str(elsewhere / "there.lock")],
        env={**os.environ, "PYTHONHASHSEED": "1234", "OMP_NUM_THREADS": "2"},
        check=True,
        capture_output=True,
    )
    assert (folder / "here.lock").read_text() == (elsewhere / "there.lock").read_text()


def test_any_world_size_steps_skip_and_rank(folder):
    change(folder, "(2, 4)", "(256, 4)")
    words = ["--steps", "2", "--skip", "1", "--rank", "3", "-o", "large.lock"]
    assert main(["lock", "train.py", "--mesh", "dp=256,tp=4", *words]) == 0
    large = load_lock(folder / "large.lock")
    assert large.total().count == 2 * 8
    assert (large.made_by.rank, large.made_by.steps, large.made_by.skip) == (3, 2, 1)


def test_more_skipped_than_made(folder, capsys):
    assert lock("--skip", "50") == 2
    told = (
        "--skip 50: the script made only 3 optimizer steps, so none is left to record"
    )
    assert f"torchspmd lock: {told}" in capsys.readouterr().err
    assert not (folder / "comm.lock").exists()
    assert lock("--skip", "2") == 0
    change(folder, "range(3)", "range(2)")
    assert main(["check"]) == 2
    assert "--skip 2: the script made only 2 optimizer" in capsys.readouterr().err


def test_fewer_steps_than_asked_for(folder, capsys):
    assert lock("--steps", "10") == 0
    told = "the script ended 7 steps before all that --steps asks for were made"
    assert f"{told}; the lock has 3." in capsys.readouterr().err
    assert lock("--steps", "3") == 0
    assert "asks for" not in capsys.readouterr().err


def test_help_of_every_option(capsys):
    with pytest.raises(SystemExit):
        main(["lock", "--help"])
    assert "write the lock to FILE (default: comm.lock)" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["trace", "lock", "check", "diff"])
def test_a_gpu_is_told_alike_everywhere(capsys, command):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "--fake use tensors without memory, for models of any size and" in words
    assert "--gpu NAME with --fake: the GPU that the script sees, such as" in words
    assert "--gpus-per-node N with --fake: ranks on each node (default: 8)" in words


def test_a_rehearsed_lock_knows_its_gpu(folder, capsys):
    batch = "8 if torch.cuda.get_device_name() == 'Mine' else 4"
    change(folder, "torch.ones(4, 16", f"torch.ones({batch}, 16")
    assert lock("--fake", "--gpu", "h100", "--gpus-per-node", "4") == 0
    text = (folder / "comm.lock").read_text()
    assert "\nfake yes\ngpu h100\ngpus_per_node 4\n" in text
    assert main(["check"]) == 0
    (folder / "own.toml").write_text('like = "h100"\ntitle = "Mine"\n')
    capsys.readouterr()
    assert main(["check", "--gpu", "own.toml"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    accept = last.partition("To accept: torchspmd ")[2]
    assert accept.endswith("--gpus-per-node 4 --fake --gpu own.toml")
    assert main(accept.split()) == 0
    assert main(["check"]) == 0


def test_the_file_of_a_gpu_lies_beside_the_lock(folder, monkeypatch):
    (folder / "own.toml").write_text('like = "h100"\ntitle = "Mine"\n')
    (folder / "locks").mkdir()
    words = ["--fake", "--gpu", "own.toml", "-o", "locks/comm.lock"]
    assert lock(*words) == 0
    assert "\ngpu ../own.toml\n" in (folder / "locks" / "comm.lock").read_text()
    monkeypatch.chdir(folder / "locks")
    assert main(["check"]) == 0
    monkeypatch.undo()


def test_a_lock_of_real_tensors_is_checked_by_a_rehearsal(folder):
    assert lock() == 0
    assert main(["check", "--fake", "--gpu", "h100"]) == 0


@pytest.mark.parametrize(
    ("mesh", "sentence"),
    [
        (
            "tp=8",
            "--mesh tp=8 is not what the script used: its axis tp has 4 ranks, not 8; it "
            "also made an axis dp. Its mesh was dp=2,tp=4.",
        ),
        (
            "data=2,tp=4",
            "--mesh data=2,tp=4 is not what the script used: the script made no axis data; "
            "it also made an axis dp. Its mesh was dp=2,tp=4.",
        ),
    ],
)
def test_another_mesh_than_the_scripts(folder, capsys, mesh, sentence):
    assert main(["lock", "train.py", "--mesh", mesh]) == 2
    assert capsys.readouterr().err.endswith(f"torchspmd lock: {sentence}\n")
    assert not (folder / "comm.lock").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["lock", "no.py", "--mesh", "tp=2"], "there is no script no.py."),
        (["lock", "train.py", "--mesh", "tp"], "write each axis once"),
        (
            ["lock", "train.py", "--mesh", "tp=2", "--rank", "2"],
            "--rank must be 0 to 1",
        ),
        (["lock", "train.py", "--mesh", "tp=2", "--steps", "-1"], "cannot be negative"),
        (
            ["lock", "train.py", "--mesh", "tp=2", "-o", "a/b"],
            "there is no folder a for",
        ),
        (["lock", ".", "--mesh", "tp=2"], ". is a folder, not a script."),
        (
            ["lock", "train.py", "--mesh", "tp=2", "-o", "."],
            "--out . is a folder: name a file in it, as in comm.lock.",
        ),
        (
            ["lock", "train.py", "--mesh", "tp=2", "--gpu", "h100"],
            "--gpu and --gpus-per-node are for --fake: add it.",
        ),
        (
            "lock train.py --mesh tp=2 --fake --gpus-per-node 0".split(),
            "--gpus-per-node must be at least 1",
        ),
        (["check"], "cannot read comm.lock: No such file or directory."),
        (
            ["check", "train.py"],
            "train.py is not a lock that `torchspmd lock` or pytest",
        ),
    ],
)
def test_wrong_use_is_one_sentence(folder, capsys, words, sentence):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"torchspmd {words[0]}: ") and sentence in error
    assert "Traceback" not in error and error.count("\n") == 1


def test_wrong_use_of_check(folder, capsys):
    lock()
    capsys.readouterr()
    assert main(["check", "--", "--layers", "2"]) == 2
    assert "comm.lock knows the script's arguments; write another" in (
        capsys.readouterr().err
    )
    assert main(["check", "--gpu", "h100"]) == 2
    assert "--gpu and --gpus-per-node are for --fake" in capsys.readouterr().err
    text = (folder / "comm.lock").read_text()
    of_test = text.replace("script train.py", "test test_a.py::test_b")
    for word in ("mesh", "rank", "steps", "skip"):
        of_test = "\n".join(x for x in of_test.split("\n") if not x.startswith(word))
    (folder / "test.lock").write_text(of_test)
    assert main(["check", "test.lock"]) == 2
    assert (
        "test.lock is the lock of a test, test_a.py::test_b: pytest compares it."
        in (capsys.readouterr().err)
    )


def test_another_version_of_torch_is_said(folder, capsys):
    lock()
    path = folder / "comm.lock"
    text = path.read_text()
    version = next(line for line in text.splitlines() if line.startswith("torch "))
    path.write_text(text.replace(version, "torch 2.9.1"))
    capsys.readouterr()
    assert main(["check"]) == 0
    assert "The lock was made with torch 2.9.1, this is " in capsys.readouterr().out


def test_a_script_that_fails_locks_nothing(folder, capsys):
    (folder / "train.py").write_text("raise ValueError('mine')")
    assert lock() == 1
    assert "ValueError: mine" in capsys.readouterr().err
    assert not (folder / "comm.lock").exists()


def test_a_script_without_mesh_or_steps(folder, capsys):
    (folder / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group()\n"
        "dist.all_reduce(torch.ones(4))\n"
    )
    assert lock() == 0
    assert "no module was called by itself; the lock has all that the" in (
        capsys.readouterr().err
    )
    text = (folder / "comm.lock").read_text()
    assert text.endswith('\nforward Global all_reduce "ranks 0-7" float32 1 16\n')
