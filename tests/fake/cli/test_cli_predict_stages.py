"""A rehearsed rank that needs others: shapes from the stage before, times of all stages."""

import json
import os
import pickle
import sys
import time

import pytest

from torchspmd._cli import main
from torchspmd.errors import UsageError
from torchspmd.predict.forks import Forks
from torchspmd.predict.other_ranks import OtherRanks, Question
from torchspmd.rehearse.recording import Comm, Phase, Recording, Site
from torchspmd.rehearse.world import EndOfWindow

SCRIPT = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(2))).to(device)
schedule = Schedule1F1B(
    PipelineStage(model, rank, size, device), 4, loss_fn=nn.functional.mse_loss
)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    batch = torch.randn(262144, 4096, device=device)
    if rank == 0:
        schedule.step(batch)
    else:
        schedule.step(target=batch)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_stage_of_a_pipeline_waits_for_the_other(tmp_path):
    script, out = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(SCRIPT)
    words = ["--world-size", "2", "--rank", "1", "--gpu", "h100", "--json", str(out)]
    assert main(["predict", str(script), *words]) == 0
    prediction = json.loads(out.read_text())
    # The last stage has nothing to do until the first micro-batch arrives.
    assert prediction["bubble_seconds"] > 0
    lanes = {lane["name"] for lane in prediction["timeline"]["lanes"]}
    assert {"recv from rank 0", "send to rank 0"} <= lanes


def test_the_stage_that_needs_the_most_memory_decides(tmp_path, capsys):
    script, out = tmp_path / "train.py", tmp_path / "out.json"
    wide = "nn.Linear(4096, 4096) for _ in range(2 + 100 * rank)"
    text = SCRIPT.replace("nn.Linear(4096, 4096) for _ in range(2)", wide)
    script.write_text(text)
    words = ["--world-size", "2", "--gpu", "h100", "--json", str(out)]
    assert main(["predict", str(script), *words]) == 1
    assert "Rank 1, another stage of the pipeline, needs the most" in (
        capsys.readouterr().out
    )
    prediction = json.loads(out.read_text())
    assert prediction["fits"] == "no"
    assert prediction["notes"][0].startswith("Rank 1, another stage")
    first, last = (prediction["stages"][rank] for rank in "01")
    assert (first["fits"], last["fits"]) == ("yes", "no")
    assert last["model_flops"] > 20 * first["model_flops"]
    assert prediction["model_flops"] == pytest.approx(
        (first["model_flops"] + last["model_flops"]) / 2
    )


def test_a_rank_that_was_asked_for_objects_leaves_no_recording(tmp_path):
    asked(tmp_path, [2], 1).answer(Recording(4, 1))
    assert not list(tmp_path.iterdir())
    asked(tmp_path, [2], 0).answer(Recording(4, 1))
    assert [each.name for each in tmp_path.iterdir()] == ["recording-1.pickle"]


def asked(folder, asking, objects, rank=1):
    return OtherRanks(rank, Forks(folder), Question(rank, tuple(asking), objects))


def test_an_asked_rank_ends_when_it_has_sent_what_was_asked_for(tmp_path):
    others = asked(tmp_path, [2], 2)
    assert others.is_asked
    others.send(["elsewhere"], 0)
    others.send(["first"], 2)
    with pytest.raises(EndOfWindow):
        others.send(["second"], 2)
    messages = pickle.loads((tmp_path / "objects-1-2.pickle").read_bytes())
    assert messages == [["first"], ["second"]]
    receiver = asked(tmp_path, [5], 0, rank=2)
    assert [receiver.receive(1), receiver.receive(1)] == [["first"], ["second"]]


def test_ranks_that_wait_for_each_other(tmp_path):
    with pytest.raises(
        UsageError, match="wait for each other's objects: rank 1 of rank 0"
    ):
        asked(tmp_path, [0], 1).receive(0)


def test_objects_from_anybody(tmp_path):
    with pytest.raises(UsageError, match="name the rank that sends"):
        OtherRanks(1, Forks(tmp_path)).receive(None)


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda question: time.sleep(60), "was not rehearsed within 0.2 s. Does the"),
        (lambda question: 1 / 0, "be rehearsed: ZeroDivisionError: division by zero"),
        (lambda question: os._exit(9), "ended, perhaps for want of memory"),
        (lambda question: f"no rank {question.rank}", "be rehearsed: no rank 0"),
    ],
)
def test_a_rank_that_could_not_be_rehearsed(tmp_path, monkeypatch, work, said):
    monkeypatch.setattr("torchspmd.predict.other_ranks._SECONDS", 0.2)
    with Forks.of_this_process(tmp_path, work) as forks:
        with pytest.raises(
            UsageError, match="Rank 0, which rank 1 waits for,"
        ) as error:
            OtherRanks(1, forks).receive(0)
    assert said in str(error.value)


def test_a_folder_may_have_a_long_name(tmp_path):
    folder = tmp_path / ("of_a_job_" * 12)
    folder.mkdir()
    with Forks.of_this_process(folder, lambda question: f"rank {question}") as forks:
        assert forks.ask(3, 60) == "rank 3"


def test_a_process_that_cannot_start(tmp_path):
    command = [sys.executable, "-c", "raise SystemExit('no torch here')"]
    with Forks(tmp_path, command, dict(os.environ)) as forks:
        with pytest.raises(
            UsageError, match="other ranks did not start: no torch here"
        ):
            OtherRanks(1, forks).receive(0)


def sends(rank, ranks, *peers):
    """A recording of a rank of a group that sends to these."""
    recording = Recording(32, rank)
    recording.events += [
        Comm(
            number=number,
            kind="send",
            op="c10d.send",
            group="pp",
            ranks=ranks,
            axis="pp",
            payload_bytes=8,
            dtype="float32",
            inputs=(),
            outputs=(),
            stream=0,
            comm_stream=1,
            is_async=True,
            peer=peer,
            site=Site("", Phase.FORWARD, 0, ""),
        )
        for number, peer in enumerate(peers)
    ]
    return recording


def pipeline(folder, monkeypatch, rank, ranks):
    """A rank of a pipeline, and whom it asks."""
    asked = []

    def ask(others, other, objects=0):
        asked.append(other)
        place = ranks.index(other)
        beside = [ranks[p] for p in (place - 1, place + 1) if 0 <= p < len(ranks)]
        path = folder / f"recording-{other}.pickle"
        path.write_bytes(pickle.dumps(sends(other, ranks, *beside)))

    monkeypatch.setattr(OtherRanks, "_ask", ask)
    return OtherRanks(rank, Forks(folder)), asked


def test_few_stages_of_a_long_pipeline_are_rehearsed(tmp_path, monkeypatch):
    ranks = tuple(range(1, 32, 4))
    others, asked = pipeline(tmp_path, monkeypatch, 13, ranks)
    some, told = others.few_stages(sends(13, ranks, 9, 17))
    assert [recording.rank for recording in some] == [13, 1, 5, 9, 25, 29]
    assert (sorted(asked), told) == ([1, 5, 9, 25, 29], list(ranks))
    # Where that is not enough, the others are.
    everyone = others.stages(some[0])
    assert sorted(recording.rank for recording in everyone) == list(ranks)
    assert sorted(asked) == [1, 5, 9, 17, 21, 25, 29]


@pytest.mark.parametrize(
    ("ranks", "peers"),
    [
        ((0, 4, 8, 12), (8,)),  # short
        (tuple(range(8)), (2, 6)),  # not beside it: the group is no pipeline
        (tuple(range(0, 32, 4)), (0, 4, 28)),  # a ring: parts go round
    ],
)
def test_where_stages_do_not_follow_nobody_is_asked(
    tmp_path, monkeypatch, ranks, peers
):
    others, asked = pipeline(tmp_path, monkeypatch, 4, ranks)
    recording = sends(4, ranks, *peers)
    assert others.few_stages(recording) == ([recording], [])
    assert asked == []
