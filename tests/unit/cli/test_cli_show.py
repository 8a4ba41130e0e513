"""``torchspmd show``, and ``--html`` of the commands that read files."""

import json
import webbrowser

import pytest
from prediction_documents import prediction

from torchspmd._cli import main
from torchspmd.comm import CommEvent, Group, Kind, Ledger, save_ledger


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    group = Group("0", (0, 1), "tp")
    for name, times in (("before", 1), ("after", 2)):
        ledger = Ledger()
        for _ in range(times):
            event = CommEvent(Kind.ALL_REDUCE, "x", "float32", (8,), 32, 32, group)
            ledger.append(event)
        save_ledger(ledger, tmp_path / f"{name}.json", about={"command": "the command"})
    (tmp_path / "prediction.json").write_text(json.dumps(prediction(layers=1)))
    return tmp_path


def test_the_page_lies_beside_the_result(folder, capsys):
    assert main(["show", "before.json"]) == 0
    assert "Page written to before.html." in capsys.readouterr().out
    assert "the command" in (folder / "before.html").read_text()


def test_two_results(folder):
    assert main(["show", "before.json", "after.json", "--out", "page.html"]) == 0
    assert "before.json → after.json" in (folder / "page.html").read_text()


def test_a_trace_for_perfetto(folder, capsys):
    assert main(["show", "prediction.json", "--perfetto", "trace.json"]) == 0
    assert "Trace written to trace.json." in capsys.readouterr().out
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]


def test_it_is_opened_where_asked(folder, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda url: not opened.append(url))
    assert main(["show", "before.json", "--open"]) == 0
    assert opened == [(folder / "before.html").as_uri()]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["nothing.json"], "cannot read nothing.json: No such file"),
        (["before.json", "--out", "before.json"], "is the result itself"),
        (["before.json", "--out", "."], "--out . is a folder"),
        (["before.json", "after.json", "--perfetto", "t.json"], "give one result"),
        (
            ["before.json", "--perfetto", "t.json"],
            "--perfetto needs the times of a step",
        ),
        (["before.json", "--open"], "no browser was found to open before.html"),
    ],
)
def test_wrong_uses(folder, capsys, monkeypatch, words, problem):
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    assert main(["show", *words]) == 2
    assert problem in capsys.readouterr().err


def test_diff_writes_a_page_and_keeps_its_json_clean(folder, capsys):
    words = ["diff", "before.json", "after.json", "--json", "--html", "page.html"]
    assert main(words) == 1
    output = capsys.readouterr()
    assert len(json.loads(output.out)) == 1
    assert "Page written to page.html." in output.err
    assert "before.json → after.json" in (folder / "page.html").read_text()


def test_a_folder_for_the_page_is_looked_for_first(folder, capsys):
    assert main(["diff", "before.json", "after.json", "--html", "no/page.html"]) == 2
    assert "there is no folder no for --html" in capsys.readouterr().err


def test_diff_of_two_predictions(folder, capsys):
    (folder / "other.json").write_text(json.dumps(prediction(layers=2, fits="no")))
    assert main(["diff", "prediction.json", "prediction.json"]) == 0
    assert "Fit, times and memory are equal." in capsys.readouterr().out
    assert main(["diff", "prediction.json", "other.json", "--html", "page.html"]) == 1
    output = capsys.readouterr().out
    for words in ("fits", "yes", "no", "exposed communication", "What changed"):
        assert words in output
    assert main(["diff", "prediction.json", "other.json", "--json"]) == 1
    changes = json.loads(capsys.readouterr().out)
    assert changes["figures"][0] == {
        "label": "fits", "unit": "", "before": "yes", "after": "no"
    }  # fmt: skip
    assert changes["communication"]


def test_predictions_without_a_ledger_are_compared_by_figures(folder, capsys):
    (folder / "bare.json").write_text(
        json.dumps({**prediction(layers=1), "ledger": None})
    )
    assert main(["diff", "prediction.json", "bare.json"]) == 0
    assert "communication was not compared" in capsys.readouterr().out


def test_a_prediction_is_not_compared_with_a_ledger(folder, capsys):
    for words in (
        ["prediction.json", "after.json"],
        ["before.json", "prediction.json"],
    ):
        assert main(["diff", *words]) == 2
        assert capsys.readouterr().err == (
            "torchspmd diff: only prediction.json is a prediction: compare two "
            "predictions, or two ledgers. torchspmd show puts any two results side by "
            "side.\n"
        )
