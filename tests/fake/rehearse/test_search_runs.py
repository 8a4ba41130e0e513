"""Searches from end to end: candidates in processes of their own."""

import json
import re
import sys

import pytest
from search_builds import train, train_layout, train_pipeline

from torchspmd import ColwiseParallel, RowwiseParallel
from torchspmd._cli import main
from torchspmd.errors import UsageError
from torchspmd.predict.search import search
from torchspmd.report.results import check_result
from torchspmd.step.passes import default_passes

PIPELINE = """
import argparse
from search_builds import train_pipeline

parser = argparse.ArgumentParser()
parser.add_argument("--stages", type=int)
parser.add_argument("--micro-batches", type=int)
train_pipeline(**vars(parser.parse_args()))
"""


def test_a_function_is_searched_with_few_of_its_blocks():
    space = {"layers": [24], "width": [4096, 65536]}
    result = search(train, space, gpu="h100", repeat="layers", jobs=2)
    assert result.best.candidate.values == {"layers": 24, "width": 4096}
    assert [each.candidate.values["width"] for each in result.too_large] == [65536]
    (note,) = result.notes
    assert re.search(r"with all blocks: extended, the step is [+-]0\.\d% and", note)


def test_a_function_and_a_script_are_searched_alike(tmp_path, capsys):
    """With all stages of pipelines; and the function ends when its steps are recorded."""
    space = {"stages": [2, 4], "micro_batches": [4]}
    result = search(train_pipeline, space, gpu="h100", world_size=4, jobs=2)
    document = json.loads(json.dumps(result.as_json()))
    check_result(document, "here")
    script, out = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(PIPELINE)
    words = ["--world-size", "4", "--gpu", "h100", "--no-cache", "--json", str(out)]
    swept = ["--stages", "{2,4}", "--micro-batches", "4"]
    assert main(["search", str(script), *words, "--", *swept]) == 0
    assert str(result) in capsys.readouterr().out
    of_script = json.loads(out.read_text())
    assert document["best"].items() >= of_script["best"].items()
    pairs = zip(document["candidates"], of_script["candidates"], strict=True)
    for mine, other in ([each["prediction"] for each in pair] for pair in pairs):
        assert mine["step_seconds"] == pytest.approx(other["step_seconds"], rel=1e-6)
        assert mine["bubble_seconds"] > 0
        assert mine.keys() == other.keys()
        for name in ("memory", "stages", "ledger", "mesh", "mfu"):
            assert mine[name] == other[name], name
    best = document["candidates"][0]
    assert best["command"] == "train_pipeline(stages=2, micro_batches=4)"
    assert document["script"] == "search_builds.train_pipeline"


def test_layouts_and_passes_have_names():
    space = {
        "plan": {
            "column, row": {"0": ColwiseParallel(), "1": RowwiseParallel()},
            "none": None,
        },
        "order": {
            "eager": None,
            "small": default_passes(bucket_size_mb=1),
            "large": default_passes(bucket_size_mb=100),
        },
    }
    result = search(
        train_layout,
        space,
        gpu="h100",
        world_size=8,
        rank=3,
        where=lambda plan, order: plan is None or order is None,
        work=lambda plan, order: 64,
    )
    assert result.failed == []
    told = {str(each.candidate): each for each in result.fitting}
    assert len(told) == 4
    sent = {name: each.prediction["ledger"]["totals"] for name, each in told.items()}
    assert [t["kind"] for t in sent["plan=column, row order=eager"]] == ["all_reduce"]
    counts = [
        sum(t["count"] for t in sent[f"plan=none order={size}"])
        for size in ("small", "large")
    ]
    assert counts[0] > counts[1] > 0
    assert result.as_json()["candidates"][0]["prediction"]["rank"] == 3


def test_a_function_of_a_session_is_refused(monkeypatch):
    monkeypatch.setattr(train, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "train", train, raising=False)
    monkeypatch.setattr(
        sys.modules["__main__"], "__file__", "/none/<stdin>", raising=False
    )
    with pytest.raises(UsageError, match="write it into a file, and import it from"):
        search(train, {"width": [1], "layers": [1]}, gpu="h100")


@pytest.mark.parametrize(
    ("space", "options", "said"),
    [
        (
            {"width": [1]},
            {"repeat": "depth"},
            "repeat='depth' is no argument: there are wid",
        ),
        (
            {"width": [{}]},
            {},
            "has a dict: give such values names, as in {'width': {'na",
        ),
        ({"width": {"a": lambda: 0}}, {}, "space['width'] cannot be sent to another"),
        ({"width": [1]}, {}, "build cannot be called with width: missing a required"),
        (
            {"width": [1], "layers": ["all"]},
            {"repeat": "layers"},
            "layers=all: an argu",
        ),
        ({"width": [1], "layers": [1]}, {"rank": 1}, "rank=1: it must be 0 to 0"),
        ({"width": [1], "layers": [1]}, {"where": lambda **_: False}, "no combination"),
    ],
)
def test_what_cannot_be_searched_is_refused(space, options, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        search(train, space, gpu="h100", **options)
    with pytest.raises(UsageError, match="build cannot be sent to another process"):
        search(lambda: None, {}, gpu="h100")
