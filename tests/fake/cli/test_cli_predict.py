"""``torchspmd predict`` from the command line, and ``--fake`` of trace, lock and check."""

import json

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
    assert predict(path) == 0
    out = capsys.readouterr().out
    assert out.strip().startswith("The script put no tensor on the GPU")
    assert "Fits" not in out


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
