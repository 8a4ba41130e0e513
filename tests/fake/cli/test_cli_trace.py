"""``torchspmd trace`` and ``torchspmd diff``, as a user calls them."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import run_forked
from torch import nn

import torchspmd
from torchspmd import load_ledger
from torchspmd._cli import main
from torchspmd._cli.simulate import simulated_world

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_gpt_tp.py"

TRAIN = """\
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl", init_method="env://")
torch.cuda.set_device(0)
device = torch.device("cuda", 0)
model = DistributedDataParallel(nn.Linear(4, 4).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1]) if len(sys.argv) > 1 else 5):
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("finished after", step + 1)
"""


def current_environment():
    own = ("PYTEST_CURRENT_TEST",)
    return {name: value for name, value in os.environ.items() if name not in own}


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    environment, call, path = current_environment(), nn.Module.__call__, list(sys.path)
    start = dist.init_process_group
    yield
    assert current_environment() == environment
    assert sys.path == path
    assert nn.Module.__call__ is call
    assert dist.init_process_group is start
    assert not dist.is_initialized()


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return str(path)


def test_ordinary_script_with_its_own_group_and_cuda(script, tmp_path, capsys):
    out = tmp_path / "report.json"
    assert main(["trace", script, "--world-size", "16", "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert "rank 0 of 16 (simulated), 1 optimizer step" in captured.out
    assert "finished" not in captured.out  # it ends after the step that was asked for
    assert "tracing" in captured.err
    ledger = load_ledger(out)
    assert ledger.total(kind="all_reduce", phase="backward").payload_bytes == 80
    assert ledger.total(kind="all_reduce").wire_bytes == 80 * 2 * 15 // 16


def test_steps_skip_and_script_arguments(script, tmp_path, capsys):
    out = tmp_path / "report.json"
    options = ["--world-size", "4", "--steps", "2", "--skip", "1", "--out", str(out)]
    assert main(["trace", script, *options]) == 0
    assert "2 optimizer steps" in capsys.readouterr().out
    assert load_ledger(out).total(kind="all_reduce").count == 2
    assert main(["trace", script, "--world-size", "4", "--steps", "0", "--", "3"]) == 0
    captured = capsys.readouterr().out
    assert "finished after 3" in captured and "3 optimizer steps" in captured


COMPILED = """\
import torch, torch.distributed as dist
from torch import nn
from torchspmd import DataParallel, compile

@compile(parallel_mode=DataParallel("replicate"))
def step(model, optim, batch):
    loss = model(batch).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()

dist.init_process_group("gloo")
model = nn.Linear(4, 4)
optim = torch.optim.AdamW(model.parameters())
for _ in range(6):
    step(model, optim, torch.ones(2, 4))
"""

TWO_OPTIMIZERS = "\n    second.step()\n    optimizer.step()"


def test_two_optimizers_make_one_step(tmp_path, capsys):
    script = tmp_path / "train.py"
    text = TRAIN.replace("\n    optimizer.step()", TWO_OPTIMIZERS)
    make = "second = torch.optim.SGD(model.parameters(), lr=0.1)\nfor step in"
    script.write_text(text.replace("for step in", make))
    words = ["trace", str(script), "--world-size", "2", "--steps", "0", "--", "3"]
    assert main(words) == 0
    assert "3 optimizer steps" in capsys.readouterr().out


IN_TURN = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
critic, actor = DDP(nn.Linear(4, 4)), DDP(nn.Linear(4, 8))
first = torch.optim.SGD(critic.parameters(), lr=0.1)
second = torch.optim.AdamW(actor.parameters())
for _ in range(5):
    for model, optimizer in ((critic, first), (actor, second)):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(("skip", "steps"), [(1, 1), (2, 2), (1, 0)])
def test_optimizers_in_turn_make_one_step(tmp_path, capsys, skip, steps):
    script, out = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(IN_TURN)
    words = ["--skip", str(skip), "--steps", str(steps), "--out", str(out)]
    assert main(["trace", str(script), "--world-size", "8", *words]) == 0
    recorded = steps or 5 - skip
    assert f"{recorded} optimizer step" in capsys.readouterr().out
    assert load_ledger(out).total(kind="all_reduce", phase="backward").count == (
        2 * recorded  # a bucket of each model
    )


def test_a_part_of_a_round_is_not_recorded_as_a_step(tmp_path, capsys):
    """Three steps of one optimizer are skipped; the other one makes its first."""
    script, out = tmp_path / "train.py", tmp_path / "report.json"
    turns = "((critic, first),) * 3 + ((actor, second),)"
    script.write_text(IN_TURN.replace("((critic, first), (actor, second))", turns))
    words = ["--skip", "3", "--steps", "1", "--out", str(out)]
    assert main(["trace", str(script), "--world-size", "8", *words]) == 0
    ledger = load_ledger(out)
    assert ledger.total(kind="all_reduce", phase="backward").count == 4


def test_optimizers_that_made_no_step_are_named(tmp_path, capsys):
    """One step, of which nobody knows yet that another optimizer follows."""
    script, out = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(IN_TURN)
    assert main(["trace", str(script), "--world-size", "8", "--out", str(out)]) == 0
    assert "1 of 2 optimizers (AdamW) made no step in" in capsys.readouterr().out
    assert any("(AdamW) made no step" in each for each in load_ledger(out).notes)


@pytest.mark.parametrize(("skip", "steps"), [(0, 1), (1, 1), (3, 2), (1, 0)])
def test_each_call_of_a_compiled_step_is_one_step(tmp_path, capsys, skip, steps):
    script, out = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(COMPILED)
    words = ["--skip", str(skip), "--steps", str(steps), "--out", str(out)]
    assert main(["trace", str(script), "--world-size", "8", *words]) == 0
    recorded = steps or 6 - skip
    assert f"{recorded} optimizer step" in capsys.readouterr().out
    by_module = load_ledger(out).total_by("module", "phase")
    assert {key: total.count for key, total in by_module.items()} == {
        ("Linear", "backward"): 2 * recorded
    }


@pytest.mark.parametrize(
    ("steps", "skip", "sentence"),
    [
        (
            "3",
            "50",
            "--skip 50: the script made only 3 optimizer steps, so none is left",
        ),
        ("1", "1", "--skip 1: the script made only 1 optimizer step, so none is left"),
        ("3", "3", "Record with --skip 2 or less, or let the script make more steps."),
    ],
)
def test_more_skipped_than_made(script, tmp_path, capsys, steps, skip, sentence):
    out = tmp_path / "report.json"
    words = ["--world-size", "4", "--skip", skip, "--out", str(out), "--", steps]
    assert main(["trace", script, *words]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and "Communication" not in captured.out
    assert not out.exists()
    assert main(["trace", script, "--world-size", "4", "--skip", "2", "--", "3"]) == 0


def test_skipped_without_an_optimizer(tmp_path, capsys):
    script = tmp_path / "plain.py"
    script.write_text("from torch import nn, ones\nnn.Linear(2, 2)(ones(2))")
    assert main(["trace", str(script), "--world-size", "2", "--skip", "1"]) == 2
    assert "--skip 1: the script made no optimizer step" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--layers", "2"], ["two words"]])
@pytest.mark.parametrize("command", ["trace", "lock"])
def test_arguments_of_the_script_go_after_two_dashes(capsys, command, words):
    given = {"trace": ["--world-size", "8"], "lock": ["--mesh", "tp=8"]}[command]
    with pytest.raises(SystemExit) as end:
        main([command, "s.py", *given, *words])
    assert end.value.code == 2
    error, told = capsys.readouterr().err, shlex.join(words)
    assert error.startswith(f"usage: torchspmd {command} script.py ")
    assert f"unrecognized arguments: {told}. Arguments of the script go after" in error
    assert error.endswith(f"as in torchspmd {command} s.py ... -- {told}\n")


def test_no_such_option_of_a_command_without_a_script(capsys):
    with pytest.raises(SystemExit):
        main(["diff", "a", "b", "--wrong"])
    assert capsys.readouterr().err.endswith("unrecognized arguments: --wrong\n")


def test_cuda_is_cuda_again_afterwards():
    torch.get_device_module.cache_clear()
    is_available, count = torch.cuda.is_available, torch.cuda.device_count()
    with simulated_world(16, 3, use_gpu=False):
        assert torch.cuda.device_count() == 16
        assert torch.get_device_module("cuda").is_available()
    assert torch.get_device_module("cuda").is_available is is_available
    assert torch.cuda.device_count() == count


def test_setup_is_told_apart(script, capsys):
    assert main(["trace", script, "--world-size", "2"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "Set-up, before the first module call and not in the tables: " in words


def test_example_gpt(tmp_path, capsys):
    out = tmp_path / "report.json"
    assert main(["trace", str(EXAMPLE), "--world-size", "8", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "layers.[0-3] x4" in text
    # Paths are as long as the machine has them.
    named = (str(EXAMPLE), str(out))
    lines = [line for line in text.splitlines() if not any(map(line.count, named))]
    assert max(map(len, lines)) <= 80
    ledger = load_ledger(out)
    # 2 gathers and 2 scatters a layer each way, one for the embedding, two for the head.
    assert ledger.total(phase="forward", axis="tp").count == 4 * 4 + 1 + 2
    assert ledger.total(phase="optimizer").count == 0
    assert ledger.total(implicit=True).count == 0


def test_example_gpt_with_torchs_styles(tmp_path, capsys):
    """pytorch PR #121669: all-reduces in the optimizer that surprised everybody."""
    out = tmp_path / "report.json"
    command = ["trace", str(EXAMPLE), "--world-size", "8", "--out", str(out)]
    assert main([*command, "--", "--torch"]) == 0
    assert load_ledger(out).total(phase="optimizer", implicit=True).count == 54
    assert "54 of 91 were implicit" in capsys.readouterr().out


SPAWNS = """\
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

def train(rank, world_size):
    print("rank", rank, "of", world_size)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()

if __name__ == "__main__":
    mp.spawn(train, args=(4,), nprocs=4)
"""


def test_a_script_that_starts_its_ranks_itself_plays_one(tmp_path, capsys):
    script, out = tmp_path / "train.py", tmp_path / "ledger.json"
    script.write_text(SPAWNS)
    spawn = torch.multiprocessing.spawn
    words = ["trace", str(script), "--world-size", "4", "--rank", "2"]
    assert main([*words, "--out", str(out)]) == 0
    assert "rank 2 of 4" in capsys.readouterr().out
    assert load_ledger(out).total(kind="all_reduce").count == 1
    assert torch.multiprocessing.spawn is spawn


def test_a_script_that_starts_another_number_of_ranks(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(SPAWNS)
    assert main(["trace", str(script), "--world-size", "8"]) == 1
    text = capsys.readouterr().err
    assert (
        "UsageError: the script starts 4 ranks on a node by itself "
        "(torch.multiprocessing.spawn), and a node has 8 here. Give --world-size 4, or for "
        "several nodes --gpus-per-node 4.\n"
    ) in text
    assert "line 16, in <module>" in text
    assert "world.py" not in text  # ours


def test_lines_of_code_are_in_the_ledger(script, tmp_path, capsys):
    out = tmp_path / "ledger.json"
    words = ["trace", script, "--world-size", "2", "--sources"]
    assert main(words) == 2
    assert (
        "--sources is for the ledger's file: give --out FILE" in capsys.readouterr().err
    )
    assert main([*words, "--out", str(out)]) == 0
    assert ".py:" in load_ledger(out).events[0].source


def test_script_that_fails(tmp_path, capsys):
    script = tmp_path / "fails.py"
    script.write_text("raise ValueError('the user did this')")
    out = tmp_path / "report.json"
    assert main(["trace", str(script), "--world-size", "2", "--out", str(out)]) == 1
    captured = capsys.readouterr()
    assert "ValueError: the user did this" in captured.err
    assert "failed after 0 optimizer steps; no report was written." in captured.err
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import json\njson.loads('{')", ["line 2, in <module>", "json/decoder.py"]),
        ("if True\n    pass", ["line 1\n", "SyntaxError"]),
    ],
)
def test_a_traceback_is_that_of_the_script(tmp_path, capsys, text, told):
    script = tmp_path / "fails.py"
    script.write_text(text)
    assert main(["trace", str(script), "--world-size", "2"]) == 1
    error = capsys.readouterr().err
    assert all(part in error for part in told)
    assert error.partition("File ")[2].startswith(f'"{script}"')
    assert "_cli" not in error and "runpy" not in error


@pytest.mark.parametrize(("code", "answer"), [("0", 0), ("None", 0), ("3", 1)])
def test_script_that_exits(tmp_path, code, answer):
    script = tmp_path / "exits.py"
    script.write_text(f"import sys; sys.exit({code})")
    assert main(["trace", str(script), "--world-size", "2"]) == answer


def test_script_without_optimizer_or_modules(tmp_path, capsys):
    script = tmp_path / "plain.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group()\n"
        "dist.all_reduce(torch.ones(4))\n"
        "dist.destroy_process_group()\n"
    )
    assert main(["trace", str(script), "--world-size", "2"]) == 0
    text = capsys.readouterr().out
    assert "no optimizer step was seen" in text
    assert "No module was called: everything the script sent is in the table." in text
    assert "all_reduce" in text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["missing.py", "--world-size", "2"], "there is no script missing.py"),
        (["SCRIPT"], "give --world-size N to simulate N ranks, or start with torchrun"),
        (["SCRIPT", "--world-size", "0"], "--world-size must be at least 1"),
        (["SCRIPT", "--world-size", "2", "--rank", "2"], "--rank must be 0 to 1"),
        (["SCRIPT", "--world-size", "2", "--steps", "-1"], "cannot be negative"),
        (
            ["SCRIPT", "--world-size", "2", "--out", "no/where.json"],
            "there is no folder no",
        ),
        (["FOLDER", "--world-size", "2"], "FOLDER is a folder, not a script."),
        (
            ["SCRIPT", "--world-size", "2", "--out", "FOLDER"],
            "--out FOLDER is a folder: name a file in it, as in FOLDER/report.json.",
        ),
    ],
)
def test_bad_use_is_one_sentence(script, capsys, options, sentence):
    places = {"SCRIPT": script, "FOLDER": str(Path(script).parent)}
    arguments = [places.get(option, option) for option in options]
    assert main(["trace", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("torchspmd trace: ")
    assert sentence.replace("FOLDER", places["FOLDER"]) in error
    assert "Traceback" not in error and error.count("\n") == 1


def test_all_problems_at_once(capsys):
    assert main(["trace", "missing.py", "--steps", "-1"]) == 2
    error = capsys.readouterr().err
    assert (
        "there is no script" in error
        and "negative" in error
        and "--world-size" in error
    )


def test_diff(script, tmp_path, capsys):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    main(["trace", script, "--world-size", "2", "--out", str(a)])
    main(["trace", script, "--world-size", "2", "--steps", "2", "--out", str(b)])
    capsys.readouterr()
    assert main(["diff", str(a), str(a)]) == 0
    assert capsys.readouterr().out == "The two ledgers are equal.\n"
    assert main(["diff", str(a), str(b)]) == 1
    assert "1 -> 2" in capsys.readouterr().out
    assert main(["diff", str(a), str(b), "--json"]) == 1
    changes = json.loads(capsys.readouterr().out)
    (change,) = [change for change in changes if change["kind"] == "all_reduce"]
    assert change["after"]["count"] - change["before"]["count"] == 1


@pytest.fixture
def forked_commands(monkeypatch, tmp_path):
    """``python -m torchspmd`` in a fork, which need not import torch anew."""

    def run(command, stdout, check):
        assert command[:3] == [sys.executable, "-m", "torchspmd"]
        assert (stdout, check) == (2, False)
        done = run_forked(main, command[3:], folder=tmp_path)
        sys.stderr.write(done.stdout + done.stderr)
        return done

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.forks
@pytest.mark.usefixtures("forked_commands")
def test_diff_of_scripts(tmp_path, capsys):
    """Each imports a module of its own, of the same name."""
    scripts = []
    for name, width in (("old", 4), ("new", 8)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sizes.py").write_text(f"WIDTH = {width}")
        scripts.append(str(tmp_path / name / "train.py"))
        text = TRAIN.replace("Linear(4, 4)", "Linear(4, WIDTH)")
        Path(scripts[-1]).write_text(f"from sizes import WIDTH\n{text}")
    page = tmp_path / "page.html"
    words = ["--world-size", "2", "--fake", "--gpu", "h100", "--steps", "0", "--json"]
    assert main(["diff", *scripts, *words, "--html", str(page), "--", "3"]) == 1
    captured = capsys.readouterr()
    (change,) = [c for c in json.loads(captured.out) if c["module"].endswith("module")]
    assert change["before"]["payload_bytes"] == 3 * 4 * (4 * 4 + 4)
    assert change["after"]["payload_bytes"] == 3 * 4 * (8 * 4 + 8)
    assert "Communication by module" in captured.err
    assert "new/train.py" in page.read_text()


@pytest.mark.forks
@pytest.mark.usefixtures("forked_commands")
def test_diff_of_a_script_that_fails(tmp_path, capsys):
    path = tmp_path / "fails.py"
    path.write_text("raise ValueError('the user did this')")
    assert main(["diff", str(path), str(path), "--world-size", "2"]) == 2
    error = capsys.readouterr().err
    assert "ValueError: the user did this" in error
    assert error.endswith(f"{path} was not traced: the reason stands above.\n")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["SCRIPT", "SCRIPT"], "a script is traced: give --world-size N to simulate"),
        (["a.json", "b.json", "--fake"], "both are files, and options of a trace are"),
        (["a.json", "b.json", "--", "--layers", "2"], "are for scripts (.py): leave"),
        (
            ["a.json", "SCRIPT", "--world-size", "2", "--gpu", "h100"],
            "--gpu and --gpus-per-node are for --fake: add it.",
        ),
        (["no.py", "SCRIPT", "--world-size", "2"], "there is no script no.py"),
    ],
)
def test_wrong_use_of_diff_is_one_sentence(script, capsys, words, sentence):
    assert main(["diff", *(script if w == "SCRIPT" else w for w in words)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("torchspmd diff: ") and sentence in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "No such file or directory"),
        ("{", "is not JSON"),
        ('{"a": 1}', "is JSON, but not a torchspmd ledger"),
        (
            '{"format": "torchspmd.ledger", "version": 99}',
            "has ledger format version 99",
        ),
        ('{"format": "torchspmd.ledger", "version": 1}', "with a broken entry"),
    ],
)
def test_diff_of_bad_files_is_one_sentence(tmp_path, capsys, content, sentence):
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    assert main(["diff", str(path), str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("torchspmd diff: ") and sentence in error
    assert "Traceback" not in error and error.count("\n") == 1


def test_version_and_help(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.strip() == torchspmd.__version__
    with pytest.raises(SystemExit):
        main(["trace", "--help"])
    assert "examples:" in capsys.readouterr().out


@pytest.mark.forks
def test_what_is_piped_has_no_colours(script, tmp_path):
    done = run_forked(main, ["trace", script, "--world-size", "2"], folder=tmp_path)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "all_reduce" in done.stdout


AUTOCAST = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchspmd import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("tp",))
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to("cuda")
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
with torch.autocast("cuda", dtype=torch.bfloat16):
    model(torch.randn(2, 8, device="cuda"))
"""


def test_a_gpu_scripts_autocast_is_kept(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(AUTOCAST)
    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    assert main(["trace", str(script), "--world-size", "2"]) == 0
    line = next(
        line for line in capsys.readouterr().out.splitlines() if "all_reduce" in line
    )
    assert "bfloat16" in line
    assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == before


GPU_LINES = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
assert torch.cuda.is_available() and local < torch.cuda.device_count()
layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.LayerNorm(288)
model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(*layers)).to(local)
model = DistributedDataParallel(model, device_ids=[local])
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scaler = torch.amp.GradScaler("cuda")
stream, start = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
for _ in range(2):
    start.record()
    with torch.cuda.stream(stream):
        batch = torch.ones(4, 3, 8, 8).pin_memory().to(local, non_blocking=True)
    torch.cuda.current_stream().wait_stream(stream)
    batch.record_stream(torch.cuda.current_stream())
    with torch.autocast("cuda", dtype=torch.float16):
        result = model(batch)
        dist.all_reduce(result.detach())  # in the precision that CUDA normalises in
    scaler.scale(result.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


def test_a_gpu_script_communicates_the_same_on_a_cpu_and_rehearsed(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(GPU_LINES)
    ledgers = []
    for words in ([], ["--fake"]):
        out = tmp_path / f"{len(ledgers)}.json"
        command = ["trace", str(script), "--world-size", "4", "--skip", "1", *words]
        assert main([*command, "--out", str(out)]) == 0
        ledgers.append(load_ledger(out))
    assert ledgers[0].total(phase="forward", dtype="float32").count == 3
    assert not torchspmd.diff_ledgers(*ledgers)


@pytest.mark.parametrize("command", ["trace", "lock"])
def test_a_gpu_script_that_fails_on_a_cpu_is_told_of_fake(tmp_path, capsys, command):
    script = tmp_path / "train.py"
    script.write_text("import torch\nassert torch.ones(2, device='cuda').is_cuda")
    ranks = {"trace": ["--world-size", "2"], "lock": ["--mesh", "tp=2"]}[command]
    words = [*ranks, "--out", str(tmp_path / "out")]
    assert main([command, str(script), *words]) == 1
    error = capsys.readouterr().err
    assert error.endswith("With --fake the script sees a GPU.\n")
    assert f"torchspmd {command}: The script's cuda was the CPU" in error
    assert main([command, str(script), *words, "--fake"]) == 0


@pytest.mark.parametrize("words", [[], ["--fake"]])
def test_a_device_that_is_a_number_alone(tmp_path, words):
    script = tmp_path / "train.py"
    script.write_text("import torch\nassert torch.device(0).type == 'cuda'")
    assert main(["trace", str(script), "--world-size", "2", *words]) == 0


def test_notes_of_a_rehearsal_are_told(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("import torch\nprint(torch.randn(2, device='cuda').sum().item())")
    assert main(["trace", str(script), "--world-size", "2", "--fake"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "reads a value: 1.0 was given." in words


def test_a_rehearsed_script_is_shown_the_gpu_and_nodes(tmp_path, capfd):
    path = tmp_path / "show.py"
    path.write_text(
        "import os, torch\n"
        "print(torch.cuda.get_device_name(), os.environ['LOCAL_RANK'])\n"
    )
    command = ["trace", str(path), "--world-size", "8", "--rank", "5", "--fake"]
    assert main([*command, "--gpu", "h200", "--gpus-per-node", "4"]) == 0
    assert "NVIDIA H200" in (out := capfd.readouterr().out)
    assert out.split("\n")[0].endswith(" 1")


def test_what_a_rehearsal_is_told_needs_one(tmp_path, capfd):
    path = tmp_path / "show.py"
    path.write_text("")
    command = ["trace", str(path), "--world-size", "8", "--gpus-per-node", "4"]
    assert main(command) == 2
    assert "are for --fake: add it" in capfd.readouterr().err
