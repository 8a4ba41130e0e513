"""``torchspmd predict`` from the command line, and ``--fake`` of trace, lock and check."""

import json
import textwrap

import pytest

from torchspmd import load_ledger
from torchspmd._cli import main
from torchspmd.comm import ledger_from_dict

SCRIPT = """
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp",))
width = int(sys.argv[1])
model = nn.Sequential(nn.Linear(width, width), nn.ReLU()).to(device)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(5):
    loss = model(torch.randn(4, width, device=device)).sum()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item(), torch.cuda.max_memory_allocated())
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def predict(script, *options, arguments=("1024",)):
    words = ["predict", str(script), "--gpu", "h100", *options, "--", *arguments]
    return main(words)


def test_predict_writes_what_the_format_promises(script, tmp_path, capsys):
    out = tmp_path / "prediction.json"
    assert predict(script, "--world-size", "64", "--rank", "9", "--json", str(out)) == 0
    data = json.loads(out.read_text())
    assert (data["format"], data["version"]) == ("torchspmd/prediction", 1)
    assert (data["world_size"], data["rank"], data["gpu"]) == (64, 9, "h100")
    assert (data["fits"], data["steps"]) == ("yes", 2)
    share = 4 * (1024 * 1024 + 1024) // 64
    categories = data["memory"]["by_category"]
    assert categories["parameter"] >= share
    assert data["memory"]["allocated_peak_bytes"] == sum(categories.values())
    curve = data["memory"]["curve"]
    for point, allocated in enumerate(curve["allocated"]):
        assert (
            sum(bytes_[point] for bytes_ in curve["categories"].values()) == allocated
        )
    assert data["mesh"]["axes"] == [{"name": "dp", "size": 64}]
    assert data["modules"][0]["parameters"] == 1024 * 1024 + 1024
    assert any("reads a value" in note for note in data["notes"])
    text = capsys.readouterr().out
    assert "Fits on NVIDIA H100" in text
    lines = [line for line in text.splitlines() if str(tmp_path) not in line]
    assert max(map(len, lines)) <= 80


def test_predictions_are_equal_on_every_run_and_every_rank(script, tmp_path, capsys):
    """Ranks with equal shards, on either node; whatever ran before in this process."""
    out, told = tmp_path / "prediction.json", []
    for rank in ("0", "0", "5", "15"):
        assert (
            predict(script, "--world-size", "16", "--rank", rank, "--json", str(out))
            == 0
        )
        data = json.loads(out.read_text())
        told.append({key: data[key] for key in data if key not in ("rank", "command")})
    first, again, *others = told
    assert again == first
    for other in others:
        for key in ("step_seconds", "host_seconds", "exposed_seconds", "memory", "mfu"):
            assert other[key] == first[key], key


TENSOR_PARALLEL = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torchspmd import ColwiseParallel, RowwiseParallel, parallelize_module

print("local rank", os.environ["LOCAL_RANK"], "on node", os.environ["GROUP_RANK"])
mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("dp", "tp"))
with torch.device("cuda"):
    model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096))
plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
parallelize_module(model, mesh["tp"], plan)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(2):
    model(torch.randn(8192, 4096, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_order_of_ranks_on_nodes_decides_which_links_are_used(tmp_path, capsys):
    script, hosts = tmp_path / "train.py", tmp_path / "hosts"
    script.write_text(TENSOR_PARALLEL, encoding="utf-8")
    hosts.write_text("\n".join("ab"[rank % 2] for rank in range(16)))
    told = {}
    for order in ("block", "cyclic", str(hosts)):
        out, page = tmp_path / "prediction.json", tmp_path / "page.html"
        files = ("--json", str(out), "--html", str(page))
        words = ("--world-size", "16", "--rank", "3", "--rank-order", order, *files)
        assert predict(script, *words) == 0
        said = capsys.readouterr().out
        assert ("local rank 3 on node 0" in said) == (order == "block")
        assert ("local rank 1 on node 1" in said) == (order != "block")
        told[order] = json.loads(out.read_text())
        assert '"nodes":' in page.read_text()
    spread = told["cyclic"]
    assert spread["nodes"] == [0, 1] * 8
    assert spread["exposed_seconds"] > 2 * told["block"]["exposed_seconds"]
    assert told[str(hosts)]["step_seconds"] == spread["step_seconds"]
    assert told["block"]["nodes"] == []


def test_figures_of_a_shared_buffer_are_those_of_its_modules(tmp_path):
    """FSDP2 has one buffer for the gradients of a group; each module has its part."""
    script, out = tmp_path / "train.py", tmp_path / "prediction.json"
    two = SCRIPT.replace("nn.ReLU()", "nn.Linear(width, 2 * width)")
    script.write_text(two, encoding="utf-8")
    assert predict(script, "--world-size", "64", "--json", str(out)) == 0
    data = json.loads(out.read_text())
    whole, first, second = data["modules"]
    share = 4 * (1024 * 1024 + 1024) // 64
    for key in ("parameter_bytes", "gradient_bytes"):
        assert first[key] == pytest.approx(share, rel=0.01), key  # or rounded up
        assert second[key] == pytest.approx(2 * share, rel=0.01), key
        assert whole[key] == first[key] + second[key], key
    ledger = ledger_from_dict(data["ledger"], "the prediction")
    sent = {
        group["axis"]: (group["count"], group["wire_bytes"])
        for group in data["mesh"]["groups"]
    }
    total = ledger.total(axis="dp")
    assert (total.count, total.wire_bytes) == sent["dp"]
    assert ledger.total(kind="reduce_scatter", phase="backward").count == 1


def test_predict_tells_what_does_not_fit(script, capsys):
    # 1 TB of weights over two ranks.
    assert predict(script, "--world-size", "2", arguments=("500000",)) == 1
    assert "OUT OF MEMORY on NVIDIA H100" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--gpu", "h1000"], "There is no GPU 'h1000': choose one of a100"),
        (["--rank", "8", "--world-size", "8"], "--rank must be 0 to 7"),
        (["--world-size", "0"], "--world-size and --gpus-per-node must be at least 1"),
        (["--steps", "-1"], "--steps and --skip cannot be negative"),
        (["--rank-order", "random"], "--rank-order random: give block, cyclic, or a"),
    ],
)
def test_wrong_use_is_one_sentence(script, options, sentence, capsys):
    assert predict(script, *options) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error


def test_no_script_is_one_sentence(tmp_path, capsys):
    assert predict(tmp_path / "none.py") == 2
    assert "there is no script" in capsys.readouterr().err


PACKAGE = {
    "__init__.py": "import torch\nFOUND = torch.cuda.device_count()\n",
    "size.py": "WIDTH = 8\n",
    "train.py": """
        import sys
        import torch
        from torch import nn
        from . import FOUND
        from .size import WIDTH

        assert FOUND == 1 and sys.argv[1:] == ["--width"], (FOUND, sys.argv)
        layer = nn.Linear(WIDTH, WIDTH).cuda()
        optimizer = torch.optim.SGD(layer.parameters())
        for _ in range(3):
            layer(torch.ones(2, WIDTH, device="cuda")).sum().backward()
            optimizer.step()
    """,
}


@pytest.mark.parametrize("entry", ["train", "__main__"])
def test_a_module_is_run_as_torchrun_does(tmp_path, monkeypatch, capsys, entry):
    """Its package is imported in the rehearsal, where there are GPUs."""
    package = f"package_with_{entry.strip('_')}"
    (tmp_path / package).mkdir()
    for name, text in PACKAGE.items():
        path = tmp_path / package / name.replace("train", entry)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    name = package if entry == "__main__" else f"{package}.{entry}"
    out = tmp_path / "prediction.json"
    words = ["predict", "-m", name, "--gpu", "h100", "--json", str(out)]
    assert main([*words, "--", "--width"]) == 0, capsys.readouterr().err
    assert json.loads(out.read_text())["steps"] == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["-m", "no.such"], "-m: there is no module no.such here or among those"),
        (
            ["-m", "train.py"],
            "module train.py here or among those installed: name it as",
        ),
        (
            ["torch.distributed.run"],
            "no script torch.distributed.run: for a module, add",
        ),
    ],
)
def test_a_module_that_is_not_there(words, sentence, capsys):
    assert main(["predict", *words, "--gpu", "h100"]) == 2
    assert sentence in capsys.readouterr().err


def test_what_torchrun_sets_is_told(script, capsys):
    assert predict(script, "--world-size", "1") == 2
    assert "torchrun sets LOCAL_RANK: rehearse with --world-size 2" in (
        capsys.readouterr().err
    )


def test_a_branch_on_a_value_is_told_with_its_line(tmp_path, capsys):
    path = tmp_path / "branch.py"
    path.write_text(
        "import torch\nx = torch.randn(2, device='cuda')\nif x.sum() > 1:\n    pass\n"
    )
    assert predict(path) == 2
    assert f"{path}:3 <module> branches on a value" in capsys.readouterr().err


def test_values_that_a_script_was_given_are_told_when_it_fails(tmp_path, capsys):
    path = tmp_path / "crop.py"
    path.write_text(
        "import torch\nx = torch.randn(2, device='cuda')\n"
        "if x.sum().item() == 1:\n    raise ValueError('no image')\n"
    )
    assert predict(path) == 2
    *_, title, note, more, last = capsys.readouterr().err.splitlines()
    assert title == "Values that it was given, which a rehearsal does not have:"
    assert f"{note}{more}".endswith("reads a value: 1.0 was given.")
    assert last.endswith("nothing was predicted. ValueError: no image")


def test_data_that_is_not_there_is_told(tmp_path, capsys):
    path = tmp_path / "reads.py"
    path.write_text("open('/no/such/tokens.bin')\n")
    assert predict(path) == 2
    assert "It needs /no/such/tokens.bin, which is not here" in capsys.readouterr().err


def test_a_mesh_that_does_not_fit_is_told(tmp_path, capsys):
    path = tmp_path / "mesh.py"
    path.write_text(
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "init_device_mesh('cuda', (8, 2), mesh_dim_names=('dp', 'tp'))\n"
    )
    assert predict(path, "--world-size", "6") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "nothing was predicted. " in last
    assert "world size" in last


def test_a_script_without_a_gpu_is_told(tmp_path, capsys):
    path = tmp_path / "host.py"
    path.write_text("import torch\ntorch.ones(2).sum()\n")
    assert predict(path, "--json", str(tmp_path / "prediction.json")) == 2
    told = capsys.readouterr()
    assert told.err.splitlines()[-1] == (
        "torchspmd predict: the script put no tensor on the GPU, so there is nothing to "
        'predict. Does it call its training, with model and data on "cuda"? What a script '
        "for CPUs sends, torchspmd trace shows."
    )
    assert not told.out
    assert not (tmp_path / "prediction.json").exists()


def test_trace_without_memory(script, tmp_path, capsys):
    out = tmp_path / "ledger.json"
    words = ["trace", str(script), "--fake", "--world-size", "64", "--out", str(out)]
    assert main([*words, "--", "100000"]) == 0  # 40 GB of weights
    kinds = {key.kind for key in load_ledger(out).rows}
    assert {"all_gather", "reduce_scatter"} <= kinds


def test_trace_without_memory_needs_a_world(script, capsys):
    assert main(["trace", str(script), "--fake"]) == 2
    assert "--fake simulates a world: give --world-size N with it" in (
        capsys.readouterr().err
    )


def test_lock_and_check_without_memory(script, tmp_path, capsys):
    lock = tmp_path / "comm.lock"
    words = ["lock", str(script), "--fake", "--mesh", "dp=64", "-o", str(lock)]
    assert main([*words, "--", "100000"]) == 0
    assert "fake yes" in lock.read_text()
    assert main(["check", str(lock)]) == 0
    assert "as locked" in capsys.readouterr().out


def test_a_script_without_a_step_is_told_first(tmp_path, capsys):
    path = tmp_path / "ones.py"
    path.write_text("import torch\nx = torch.ones(2, device='cuda')\n")
    assert predict(path) == 0
    out = capsys.readouterr().out
    assert out.strip().startswith("The script made no optimizer step")
    trace = tmp_path / "trace.json"
    assert predict(path, "--perfetto", str(trace)) == 0
    assert f"No step was made: {trace} was not written." in capsys.readouterr().out
    assert not trace.exists()


def test_fewer_steps_than_asked_for_are_told(script, capsys):
    assert predict(script, "--world-size", "2", "--skip", "8") == 0
    assert (
        "The script made 5 optimizer steps, and --skip 8 with --steps 1 asks for 9: its "
        "last one is taken to be steady."
    ) in " ".join(capsys.readouterr().out.split())
    assert predict(script, "--world-size", "2", "--skip", "4") == 0
    assert "asks for" not in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--json", "--html", "--perfetto"])
def test_a_result_that_cannot_be_written_is_told_in_a_sentence(
    script, capsys, monkeypatch, option
):
    def fail(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("torchspmd.comm.storage.tempfile.mkstemp", fail)
    assert predict(script, "--world-size", "2", option, "result") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("torchspmd predict: cannot write ")
    assert last.endswith(
        "result: Permission denied. Name a file in a folder that you may write to."
    )


def test_folders_that_are_not_yours_are_told_before_the_script_runs(
    script, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(
        "torchspmd._cli.usage.common.os.access", lambda path, mode: False
    )
    out = tmp_path / "prediction.json"
    assert predict(script, "--world-size", "2", "--json", str(out)) == 2
    assert capsys.readouterr().err == (
        f"torchspmd predict: --json {out}: you may not write there; name another folder.\n"
    )


def test_a_dash_is_no_file(script, capsys):
    assert predict(script, "--world-size", "2", "--json", "-") == 2
    assert "--json -: name a file, or /dev/stdout." in capsys.readouterr().err


def test_a_script_that_ends_with_an_exit_code(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("import sys\nsys.exit(3)\n")
    assert predict(path) == 2
    assert capsys.readouterr().err.endswith(
        "failed after 0 optimizer steps; nothing was predicted. It ended with exit code "
        "3.\n"
    )


def test_an_interrupted_script_is_no_traceback(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("raise KeyboardInterrupt\n")
    assert predict(path) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "torchspmd predict: interrupted."


TRAINER = """
import sys

import torch
from torch import nn

model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train():
    for _ in range(5):
        model(torch.randn(4, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if sys.argv[1] == "evaluates":
            model.eval()
            with torch.no_grad():
                for _ in range(8):
                    model(torch.randn(4, 64, device="cuda"))
            model.train()


try:
    train()
except BaseException:
    if sys.argv[1] == "fails":
        raise RuntimeError("nothing to tear down")
    if sys.argv[1] == "exits":
        sys.exit(1)
    if sys.argv[1] == "goes on":
        train()
    raise
"""


@pytest.fixture
def trainer(tmp_path):
    path = tmp_path / "trainer.py"
    path.write_text(TRAINER, encoding="utf-8")
    return path


@pytest.mark.parametrize("how", ["raises", "fails", "exits", "goes on"])
def test_a_trainer_that_cleans_up_at_the_end(trainer, tmp_path, how):
    out = tmp_path / "prediction.json"
    assert predict(trainer, "--json", str(out), arguments=(how,)) == 0
    assert json.loads(out.read_text())["steps"] == 2


def test_a_script_that_wants_more_gpus_is_told_how(tmp_path, capsys):
    path = tmp_path / "script.py"
    path.write_text("raise ValueError('8 GPUs were requested, 1 found.\\nAbort.')\n")
    assert predict(path) == 2
    fix = "a run on N of them is rehearsed with --world-size N."
    assert fix in capsys.readouterr().err
    assert predict(path, "--world-size", "8") == 2
    assert fix not in capsys.readouterr().err


def test_an_error_before_the_end_is_one(tmp_path, capsys):
    path = tmp_path / "script.py"
    path.write_text(
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise ValueError\n"
    )
    assert predict(path) == 2
    assert "failed after 0 optimizer steps" in capsys.readouterr().err


def test_evaluation_between_steps_is_told(trainer, tmp_path, capsys):
    out = tmp_path / "prediction.json"
    assert predict(trainer, "--json", str(out), arguments=("evaluates",)) == 0
    data = json.loads(out.read_text())
    assert 0 < data["evaluation_seconds"] < data["step_seconds"]
    assert "in eval mode without gradients" in capsys.readouterr().out
    assert predict(trainer, "--json", str(out), arguments=("raises",)) == 0
    assert json.loads(out.read_text())["evaluation_seconds"] == 0


CRITIC = """
import sys

import torch
from torch import nn

critic, actor = nn.Linear(64, 64).cuda(), nn.Linear(64, 64).cuda()
of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
of_actor = torch.optim.AdamW(actor.parameters())
idle = torch.optim.RMSprop(actor.parameters()) if "idle" in sys.argv else None
x = torch.randn(8, 64, device="cuda")
for _ in range(100):
    for _ in range(5):
        critic(x).sum().backward()
        of_critic.step()
    actor(x).sum().backward()
    of_actor.step()
"""


@pytest.mark.parametrize("skip", [None, 0, 1, 2, 5, 6])
def test_a_whole_iteration_is_predicted_where_optimizers_take_turns(
    tmp_path, capsys, skip
):
    path, out = tmp_path / "critic.py", tmp_path / "prediction.json"
    path.write_text(CRITIC)
    words = [] if skip is None else ["--skip", str(skip)]
    assert predict(path, *words, "--json", str(out)) == 0
    data = json.loads(out.read_text())
    timeline = data["timeline"]
    names = [timeline["strings"][place] for place in timeline["name"]]
    assert names.count("aten.addmm.default") == 6
    assert not any("made no step" in note for note in data["notes"])


def test_an_optimizer_that_makes_no_step_is_waited_for_and_named(tmp_path, capsys):
    path = tmp_path / "critic.py"
    path.write_text(CRITIC)
    assert predict(path, "--brief", arguments=("idle",)) == 0
    text = capsys.readouterr().out
    assert "1 of 3 optimizers (RMSprop) made no step in those that were run" in text


@pytest.mark.parametrize(
    ("most_operators", "iterations"), [(100_000, 33), (500, 6), (100, 2)]
)
def test_how_long_it_is_waited_for_is_a_count(
    tmp_path, monkeypatch, capsys, most_operators, iterations
):
    """Of steps and operators: a slow machine makes as many steps as a quick one."""
    path = tmp_path / "critic.py"
    path.write_text(CRITIC + "    print('a whole iteration')\n")
    monkeypatch.setattr("torchspmd.rehearse.window._MOST_OPERATORS", most_operators)
    assert predict(path, "--brief", arguments=("idle",)) == 0
    assert capsys.readouterr().out.count("a whole iteration") == iterations


THREAD = """
import threading
import torch
from torch import nn

def train():
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    while True:
        model(torch.ones(8, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

thread = threading.Thread(target=train)
thread.start()
thread.join()
"""


def test_a_script_may_train_in_a_thread(tmp_path, capsys):
    path, out = tmp_path / "train.py", tmp_path / "out.json"
    path.write_text(THREAD)
    assert main(["predict", str(path), "--gpu", "h100", "--json", str(out)]) == 0
    prediction = json.loads(out.read_text())
    assert prediction["steps"] == 2
    assert prediction["step_seconds"] > 0
    assert [each["path"] for each in prediction["modules"]] == ["Linear"]
