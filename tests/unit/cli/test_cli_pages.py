"""``--html`` and ``--perfetto`` of the commands that run a script."""

import argparse
import json
from pathlib import Path

import pytest
from processes import run_forked

from torchspmd._cli import main, search
from torchspmd.predict.ranking import Outcome, rank
from torchspmd.predict.space import Candidate
from torchspmd.rehearse.nodes import Nodes
from torchspmd.report import page_html

pytestmark = pytest.mark.forks

TRAIN = """\
import torch
model = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.SGD(model.parameters())
for _ in range(2):
    model(torch.ones(4, 64, device="cuda")).sum().backward()
    optimizer.step()
"""


def predict():
    words = ["predict", "train.py", "--gpu", "h100", "--json", "a.json"]
    raise SystemExit(main([*words, "--html", "a.html", "--perfetto", "trace.json"]))


def test_a_prediction_writes_its_page_and_its_trace(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    done = run_forked(predict, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["command"].startswith("torchspmd predict train.py --gpu h100")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    timeline = document["timeline"]
    assert len(slices) == len(timeline["start"]) + len(timeline["phases"])
    assert (tmp_path / "a.html").read_text() == page_html(document)


def test_a_trace_needs_the_timeline(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)
    words = ["predict", "train.py", "--gpu", "h100", "--perfetto", "trace.json"]
    assert main([*words, "--no-timeline"]) == 2
    assert "--perfetto needs the timeline" in capsys.readouterr().err


def test_a_search_keeps_how_it_was_asked_and_what_was_predicted():
    memory = {"device_peak_bytes": 2**30, "device_bytes": 80 * 2**30}
    found = {"fits": "yes", "step_seconds": 0.5, "mfu": 0.4, "memory": memory}
    outcomes = [
        Outcome(Candidate({"tp": 2}, ("--tp", "2")), found, work=100.0),
        Outcome(Candidate({"tp": 64}, ("--tp", "64")), problem="heads do not divide"),
    ]
    options = argparse.Namespace(
        script=Path("train.py"), world_size=64, rank=0, gpu="h100", network="ib-ndr400",
        gpus_per_node=8, nodes=Nodes(), words=["search", "train.py"], module=False,
    )  # fmt: skip
    result = rank(outcomes, "item")
    result.asked = search._asked(options)
    document = result.as_json()
    assert document["command"] == "torchspmd search train.py"
    good, failed = document["candidates"]
    assert good["command"].endswith("--gpus-per-node 8 -- --tp 2")
    assert good["prediction"]["fits"] == "yes"
    assert "prediction" not in failed
    assert "tp=2" in page_html(document)
