"""``torchspmd plan``: what it prints, writes and returns."""

import argparse
import json
import textwrap

import pytest

from torchspmd._cli import plan as command
from torchspmd._cli.usage import plan as usage
from torchspmd.errors import UsageError
from torchspmd.parallel.plan.plan import Plan

MODEL = """
import torch
from torch import nn

def build():
    assert torch.get_default_device().type == "meta"
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        return self.down(self.gate(x).relu() * self.up(x))

def gated():
    return nn.Sequential(nn.Embedding(4, 8), Gated())

def unplaceable():
    return nn.Sequential(nn.Conv1d(4, 4, 1), nn.Linear(8, 16))

def number():
    return 3

def broken():
    raise RuntimeError("no weights here")
"""


@pytest.fixture
def model_file(tmp_path):
    path = tmp_path / "model_of_the_test.py"
    path.write_text(textwrap.dedent(MODEL))
    return path


def run(*arguments):
    parser = argparse.ArgumentParser()
    usage.add_options(parser)
    words = [*map(str, arguments)]
    options = parser.parse_args(words)
    options.words = ["plan", *words]  # as the command line keeps them
    usage.check(options)
    return command.run(options)


def test_it_prints_the_preview_of_an_inferred_plan(model_file, capsys):
    assert run(f"{model_file}:build", "--mesh", "tp=4", "--batch", 2, "--seq", 3) == 0
    text = capsys.readouterr().out
    assert text.startswith("Sequential on tp=4 of the mesh tp=4 (4 ranks)\n")
    assert "0.weight   Colwise  Shard(0)   4 x 8" in text
    assert "2       forward  all_reduce      1" in text


def test_it_reads_and_writes_plans_and_json(model_file, tmp_path, capsys):
    saved, table = tmp_path / "plan.toml", tmp_path / "plan.json"
    factory = f"{model_file}:build"
    assert run(factory, "--mesh", "tp=4", "--save", saved, "--auto") == 0
    assert set(Plan.load(saved)) == {"0", "2"}
    arguments = ("--mesh", "dp=2,tp=4", "--plan", saved, "--json", table)
    assert run(factory, *arguments, "--dtype", "bfloat16") == 0
    value = json.loads(table.read_text())
    assert value["mesh"] == {"dp": 2, "tp": 4}
    assert value["parameters"][0]["dtype"] == "bfloat16"
    capsys.readouterr()


def test_inputs_can_be_shared(model_file, capsys):
    arguments = (f"{model_file}:gated", "--mesh", "tp=2", "--batch", 1, "--seq", 2)
    assert run(*arguments) == 0
    assert capsys.readouterr().out.count("backward  all_reduce") == 2
    assert run(*arguments, "--share-inputs") == 0
    assert capsys.readouterr().out.count("backward  all_reduce") == 1
    assert run(f"{model_file}:build", "--mesh", "tp=2", "--share-inputs") == 0
    text = capsys.readouterr().err
    assert text.startswith("Plan.share_inputs: nothing in Sequential could be shared")
    assert max(map(len, text.splitlines())) <= 80


def test_a_module_can_be_imported(model_file, monkeypatch, capsys):
    monkeypatch.chdir(model_file.parent)
    assert run("model_of_the_test:build", "--mesh", "tp=2") == 0
    capsys.readouterr()


def test_a_plan_with_problems_is_exit_code_1(model_file, tmp_path, capsys):
    bad = tmp_path / "bad.toml"
    bad.write_text('[styles]\n"5" = "ColwiseParallel"\n')
    assert run(f"{model_file}:build", "--mesh", "tp=4", "--plan", bad) == 1
    text = capsys.readouterr().err
    assert "\n\n  * '5' matches no module; the model has no '5' inside" in text
    assert "\n\nThe module was not changed." in text
    bad.write_text('[styles]\n"a_name_that_is_long.and_another" = "ColwiseParallel"\n')
    assert run(f"{model_file}:build", "--mesh", "tp=4", "--plan", bad) == 1
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line[:4] for line in lines[2:4]] == ["  * ", "    "]
    bad.write_text('[styles]\n"0" = "Colwise"\n')
    assert run(f"{model_file}:build", "--mesh", "tp=4", "--plan", bad) == 1
    assert "did you mean 'ColwiseParallel'?" in capsys.readouterr().err
    assert run(f"{model_file}:unplaceable", "--mesh", "tp=4") == 1
    assert "auto_plan: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        ("build", (), r"write file.py:function or package.module:function"),
        ("none.py:build", (), "there is no file none.py"),
        ("none.module:build", (), "none.module cannot be imported: No module named"),
        ("FILE:nothing", (), "has no function nothing"),
        ("FILE:number", (), "number returned a int; it must return an nn.Module"),
        (
            "FILE:broken",
            (),
            "raised RuntimeError: no weights here. It is called without",
        ),
        (
            "FILE:build",
            ("--mesh", "tp"),
            "--mesh tp: write each axis once with its num",
        ),
        ("FILE:build", ("--mesh", "tp=0"), "as in tp=8 or dp=16,tp=8"),
        (
            "FILE:build",
            ("--mesh", "a=2,b=2"),
            "the mesh has the axes a, b: choose that of the plan with --axis",
        ),
        (
            "FILE:build",
            ("--mesh", "a=2,b=2", "--axis", "c"),
            "--axis c: the mesh has the axes a, b",
        ),
        (
            "FILE:build",
            ("--json", ".", "--save", "."),
            "--json . is a folder: .*; --save . is a folder: .* as in plan.toml",
        ),
        ("FILE:build", ("--batch", "0"), "--batch must be at least 1"),
        ("FILE:build", ("--plan", "none.toml"), "there is no plan none.toml"),
        ("FILE:build", ("--dtype", "int8"), "no floating-point dtype int8"),
        ("FILE:build", ("--json", "none/x"), "there is no folder none for --json"),
        ("FILE:build", ("--plan", "FILE", "--auto"), "give --plan or --auto, not both"),
    ],
)
def test_wrong_use_is_one_clear_sentence(model_file, factory, options, message):
    arguments = [a.replace("FILE", str(model_file)) for a in (factory, *options)]
    if "--mesh" not in options:
        arguments += ["--mesh", "tp=2"]
    with pytest.raises(UsageError, match=message):
        run(*arguments)


def test_a_file_that_cannot_be_loaded(tmp_path):
    path = tmp_path / "broken_model.py"
    path.write_text("import nothing_like_this\n")
    with pytest.raises(UsageError, match="cannot be loaded: ModuleNotFoundError"):
        run(f"{path}:build", "--mesh", "tp=2")
