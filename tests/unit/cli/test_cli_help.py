"""The help of every command: it fits a terminal, and its defaults are the real ones."""

import pytest

from torchspmd._cli import _COMMANDS, main

NAMES = [command.__name__.rpartition(".")[2] for command in _COMMANDS]


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
    assert "Run a training script, unchanged, as one rank of any\nnumber, " in narrow
    example = (
        "  torchspmd predict train.py --world-size 1024 --gpu h100 --html page.html\n"
    )
    assert example in narrow


def test_defaults_are_those_of_the_command(help_of):
    assert "optimizer steps to let pass before (1)" in help_of("predict")
    assert "optimizer steps to let pass before (0)" in help_of("trace")
