"""The help of every command: it fits a terminal, and its defaults are the real ones."""

import importlib
import subprocess
import sys

import pytest

from torchspmd._cli import main
from torchspmd._cli.usage import COMMANDS

NAMES = [command.__name__.rpartition(".")[2] for command in COMMANDS]


@pytest.fixture
def help_of(capsys, monkeypatch):
    def text(*words, columns="80"):
        monkeypatch.setenv("COLUMNS", columns)
        with pytest.raises(SystemExit) as end:
            main([*words, "--help"])
        assert end.value.code == 0
        return capsys.readouterr().out

    return text


@pytest.mark.parametrize("words", [(), *((name,) for name in NAMES)])
def test_help_is_eighty_columns_wide(help_of, words):
    text = help_of(*words)
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert "\nexamples:\n  torch" in text


def test_paragraphs_follow_the_width_and_examples_stay_whole(help_of):
    narrow = help_of("predict", columns="60")
    assert "unchanged, as one rank of a world\nof any size, with " in narrow
    example = (
        "  torchspmd predict train.py --world-size 1024 --gpu h100 --html page.html\n"
    )
    assert example in narrow


def test_defaults_are_those_of_the_command(help_of):
    assert "optimizer steps to skip first (default: 1)" in help_of("predict")
    assert "optimizer steps to skip first (default: 0)" in help_of("trace")


WITHOUT_TORCH = """\
import sys
from torchspmd._cli import build_parser, main
build_parser()
for words in {words}:
    try:
        assert main(words) == 2
    except SystemExit as end:
        assert end.code == (2 if "--wrong" in words else 0)
    assert "torch" not in sys.modules, words
"""


def test_help_and_wrong_use_are_answered_without_torch(tmp_path):
    """It takes seconds to import."""
    words = [["--help"], ["--version"], *([name, "--help"] for name in NAMES)]
    words += [["doctor", "--wrong"], ["trace", "a.py", "--wrong"]]
    words += [
        ["trace", "missing.py", "--world-size", "8"],
        ["predict", "missing.py", "--gpu", "h100"],
        ["predict", __file__, "--gpu", "h1000"],
        ["lock", __file__, "--mesh", "tp"],
        ["lock", __file__, "--mesh", "tp=2", "--fake", "--gpu", "h1000"],
        ["search", __file__, "--gpu", "h1000"],
        ["plan", "model.py:build", "--mesh", "dp=2,x=2"],
        ["diff", "a.json", "b.json", "--steps", "3"],
        ["check", "comm.lock", "--", "--layers", "2"],
        ["show", "a.json", "--out", "missing/page.html"],
        ["parity", "a", "b", "--bitwise", "--tolerance", "1"],
        ["calibrate", "--out", "my.txt"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH.format(words=words)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_every_command_does_something(name):
    """The file beside its usage, which is loaded by name."""
    assert callable(importlib.import_module(f"torchspmd._cli.{name}").run)
