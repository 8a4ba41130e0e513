"""The page: every sum of it is that of the document, and names stay text."""

import base64
import gzip
import json
import re

import pytest
from ledger_strategies import make_event, make_ledger
from prediction_documents import HOSTILE, prediction, search

from torchspmd.comm import CommEvent, Group, Kind, Ledger, Phase, ledger_to_dict
from torchspmd.errors import UsageError
from torchspmd.report import compare_results, page_html, read_result, write_page
from torchspmd.report.views import build_page
from torchspmd.step import ExposureReport

VIEWS = ["verdict", "timeline", "memory", "modules", "mesh", "compare", "assumptions"]


def ledger(*, payload=128, module="Net.layers.{}.up", implicit=False):
    fields = {"phase": Phase.BACKWARD, "implicit": implicit}
    wire = payload * 3 // 2
    return make_ledger(
        *(
            make_event(payload=payload, wire=wire, module=module.format(n), **fields)
            for n in range(3)
        )
    )


def data_of(html):
    """What the page's script will read."""
    found = re.search(
        r'<script type="application/json" id="data" data-encoding="([^"]*)">(.*?)</script>',
        html,
        re.DOTALL,
    )
    assert found is not None
    encoding, text = found.groups()
    if encoding == "gzip+base64":
        text = gzip.decompress(base64.b64decode(text)).decode()
    return json.loads(text)


# ----------------------------------------------------------------------------
# The file


def test_a_page_is_one_file_without_addresses():
    html = page_html(prediction(layers=2))
    assert not re.findall(r'(?:src|href)="', html)
    addresses = re.findall(r"https?://[^\s\"')]*", html)
    assert set(addresses) == {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert html.count("<script") == 2


@pytest.mark.parametrize(("layers", "micro_batches", "glue"), [(32, 1, 8), (32, 4, 14)])
def test_a_model_of_32_layers_is_below_two_megabytes(layers, micro_batches, glue):
    document = prediction(layers=layers, micro_batches=micro_batches, glue=glue)
    slices = len(document["timeline"]["start"])
    assert slices > 50_000 or micro_batches == 1
    assert len(page_html(document).encode()) < 2_000_000


def test_large_data_is_packed_and_comes_back_whole():
    document = prediction(layers=8)
    html = page_html(document)
    assert 'data-encoding="gzip+base64"' in html
    assert data_of(html) == json.loads(json.dumps(build_page(document)))


def test_small_data_is_readable_in_the_file():
    html = page_html(ledger_to_dict(ledger()))
    assert 'data-encoding="json"' in html
    assert data_of(html)["kind"] == "ledger"


def test_hostile_names_end_no_element():
    found = ledger(module=f"Net.</script>{HOSTILE}")
    html = page_html(ledger_to_dict(found, about={"script": f"{HOSTILE}.py"}))
    assert HOSTILE not in html
    assert html.count("</script>") == 2
    assert data_of(html)["title"] == f"{HOSTILE}.py"


def test_the_script_of_the_page_makes_no_html_of_texts():
    html = page_html(ledger_to_dict(Ledger()))
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
    ):
        assert word not in html


def test_the_page_allows_no_script_but_its_own():
    html = page_html(ledger_to_dict(Ledger()))
    assert "default-src 'none'" in html
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/=]{44}'", html)


def test_numbers_that_are_not_finite_are_refused_by_name():
    document = {**prediction(layers=1), "mfu": float("nan")}
    with pytest.raises(UsageError, match=r"not finite.*verdict\.figures\[1\]\.value"):
        page_html(document)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"cannot write the page .*No such file"):
        write_page(ledger_to_dict(Ledger()), tmp_path / "nowhere" / "page.html")


# ----------------------------------------------------------------------------
# What is a result


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a result of torchspmd.*torchspmd trace --out"),
        ('{"format": "other"}', "its \"format\" is 'other'"),
        ('{"format": "torchspmd/search", "version": 9}', "version 9.*reads version 1"),
        (
            '{"format": "torchspmd/prediction", "version": 1, "fits": "yes"}',
            "without memory, modules.*torchspmd predict --json",
        ),
    ],
)
def test_files_that_are_no_results(tmp_path, text, words):
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        read_result(path)


def test_a_timeline_with_columns_of_two_lengths():
    document = prediction(layers=1)
    document["timeline"]["flops"].pop()
    with pytest.raises(UsageError, match=r"flops has \d+ entries, start \d+"):
        build_page(document)


def test_a_broken_entry_is_named():
    document = prediction(layers=1)
    del document["modules"][0]["path"]
    with pytest.raises(UsageError, match=r"with a broken entry .KeyError: 'path'"):
        build_page(document)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read .*nothing\.json: No such file"):
        read_result(tmp_path / "nothing.json")


def test_results_with_nothing_in_common():
    one, other = ledger_to_dict(Ledger()), search(2, layers=1)
    with pytest.raises(UsageError, match=r"a\.json is a torchspmd\.ledger and b\.json"):
        compare_results(one, other, ("a.json", "b.json"))


# ----------------------------------------------------------------------------
# Views


def figures(page):
    return {
        each["label"]: each["value"] for each in page["views"]["verdict"]["figures"]
    }


def test_a_prediction_has_every_view():
    document = prediction(layers=3)
    views = build_page(document)["views"]
    assert list(views) == VIEWS
    assert [name for name in VIEWS if "missing" in views[name]] == ["compare"]
    assert views["timeline"]["start"] == document["timeline"]["start"]
    assert views["memory"]["curve"] == document["memory"]["curve"]


def test_a_views_lack_is_one_sentence_and_a_command():
    document = prediction(layers=1)
    document |= {"timeline": None, "mesh": None}
    document["command"] += " --no-timeline"
    views = build_page(document)["views"]
    assert views["timeline"] == {
        "missing": "The prediction was made without a timeline.",
        "command": "torchspmd predict train.py --world-size 64 --gpu h100",
    }
    assert "no process group" in views["mesh"]["missing"]


def test_the_verdict_of_a_prediction_is_the_documents():
    document = prediction(layers=3)
    page = build_page(document)
    assert figures(page) == {
        "step": document["step_seconds"],
        "MFU": document["mfu"],
        "exposed communication": document["exposed_seconds"],
        "peak, allocated": document["memory"]["allocated_peak_bytes"],
        "peak, reserved": document["memory"]["reserved_peak_bytes"],
        "sent by the rank": sum(g["wire_bytes"] for g in document["mesh"]["groups"]),
    }
    verdict = page["views"]["verdict"]
    assert sum(part["seconds"] for part in verdict["step"]["parts"]) == pytest.approx(
        document["step_seconds"]
    )
    causes = verdict["causes"]["rows"]
    assert sum(row["seconds"] for row in causes) == pytest.approx(
        document["exposed_seconds"]
    )
    assert "Llama.model.layers.[0-2].mlp.down_proj" in {row["module"] for row in causes}


@pytest.mark.parametrize(
    ("fits", "text", "tone", "words"),
    [
        ("yes", "Fits", "good", "left"),
        ("at risk", "At risk", "warn", "left"),
        ("no", "Does not fit", "bad", "too much; the first allocation without memory"),
    ],
)
def test_the_answer(fits, text, tone, words):
    answer = build_page(prediction(layers=1, fits=fits))["views"]["verdict"]["answer"]
    assert (answer["text"], answer["tone"]) == (text, tone)
    assert words in answer["detail"]


def test_a_step_that_was_not_made():
    document = prediction(layers=1)
    document |= {"step_seconds": None, "mfu": None, "exposed_seconds": None}
    page = build_page(document)
    assert figures(page)["step"] is None
    verdict = page["views"]["verdict"]
    assert verdict["step"] is None
    assert verdict["figures"][0]["note"] == "no time was predicted"
    assert build_page({**document, "exposed": []})["views"]["verdict"]["causes"] is None


def test_modules_of_a_prediction_have_a_column_for_each_axis():
    document = prediction(layers=2)
    view = build_page(document)["views"]["modules"]
    labels = [column["label"] for column in view["columns"]]
    root = dict(zip(labels, view["rows"][0]["values"], strict=True))
    assert root["payload, tp"] == document["modules"][0]["bytes_by_axis"]["tp"]
    assert root["time"] == document["modules"][0]["seconds"]
    assert len(view["rows"]) == len(document["modules"])


def test_the_views_of_a_ledger_add_up():
    document = ledger_to_dict(ledger(), about={"world_size": 4, "rank": 1, "steps": 1})
    page = build_page(document)
    assert page["subtitle"].startswith("rank 1 of 4 · 1 optimizer step")
    assert figures(page)["payload"] == 3 * 128
    assert figures(page)["wire bytes, a rank"] == 3 * 192
    (cause,) = page["views"]["verdict"]["causes"]["rows"]
    assert cause["module"] == "Net.layers.[0-2].up"
    assert cause["payload"] == 3 * 128
    rows = {row["path"]: row["values"] for row in page["views"]["modules"]["rows"]}
    assert rows["Net"] == [3, 3, 384, 576]
    assert rows["Net.layers.1.up"] == [1, 1, 128, 192]
    (group,) = page["views"]["mesh"]["groups"]
    assert (group["axis"], group["wire_bytes"]) == ("tp", 576)


def test_a_sum_over_ranks_is_told_for_one_rank():
    about = {"world_size": 4, "rank": 0, "num_ranks": 4, "steps": 1}
    page = build_page(ledger_to_dict(ledger(), about=about))
    assert figures(page)["wire bytes, a rank"] == 3 * 192 / 4
    assert "the sum of 4 ranks" in page["subtitle"]


def test_implicit_communication_is_the_verdict():
    answer = build_page(ledger_to_dict(ledger(implicit=True)))["views"]["verdict"][
        "answer"
    ]
    assert answer["tone"] == "warn"
    assert "3 were implicit" in answer["detail"]


def test_an_empty_ledger_says_so():
    views = build_page(ledger_to_dict(Ledger()))["views"]
    assert views["verdict"]["answer"]["text"] == "Nothing is sent"
    assert "missing" in views["modules"]
    assert "missing" in views["mesh"]


def test_two_groups_of_one_axis_are_told_apart():
    found = Ledger()
    for ranks, payload in (((0, 1), 32), ((0, 2), 64)):
        group = Group(str(ranks), ranks, "tp")
        found.append(
            CommEvent(Kind.ALL_REDUCE, "x", "float32", (8,), payload, payload, group)
        )
    document = ledger_to_dict(found)
    groups = build_page(document)["views"]["mesh"]["groups"]
    assert [group["payload_bytes"] for group in groups] == [32, 64]
    document |= {"dropped_events": 2, "events": []}
    groups = build_page(document)["views"]["mesh"]["groups"]
    assert [group["payload_bytes"] for group in groups] == [48, 48]


def test_groups_without_an_axis_are_known_by_their_ranks():
    found = Ledger()
    group = Group("default", (0, 1, 2, 3))
    found.append(
        CommEvent(Kind.ALL_REDUCE, "c10d.allreduce_", "float32", (8,), 32, 48, group)
    )
    (shown,) = build_page(ledger_to_dict(found))["views"]["mesh"]["groups"]
    assert (shown["axis"], shown["payload_bytes"]) == ("ranks 0-3", 32)


def test_a_measured_exposure():
    report = ExposureReport(
        "train, program 0", 0, "cpu", "whole", 5, 20.0, 0.0, 19.0, ()
    )
    page = build_page(report.as_dict())
    assert page["title"] == "train, program 0"
    assert figures(page)["step"] == pytest.approx(0.02)
    assert page["views"]["verdict"]["answer"]["tone"] == "good"


# ----------------------------------------------------------------------------
# Comparisons and searches


def test_two_ledgers_side_by_side():
    one, other = ledger_to_dict(ledger()), ledger_to_dict(ledger(payload=256))
    page = build_page(compare_results(one, other, ("a", "b")))
    view = page["views"]["compare"]
    payload = next(row for row in view["figures"] if row["label"] == "payload")
    assert (payload["before"], payload["after"]) == (384, 768)
    (kind,) = view["kinds"]
    assert (kind["label"], kind["before"], kind["after"]) == ("payload", 384, 768)
    modules = {(row["module"], row["label"]): row for row in view["modules"]}
    row = modules["Net.layers.[0-2].up", "payload"]
    assert (row["before"], row["after"]) == (384, 768)
    assert [each["name"] for each in page["pages"]] == ["a", "b"]


def test_equal_results_do_not_differ():
    document = prediction(layers=2)
    view = build_page(compare_results(document, document, ("a", "b")))["views"]
    assert view["compare"]["modules"] == view["compare"]["kinds"] == []
    assert view["verdict"]["answer"]["text"] == "No difference"


def test_a_ledger_beside_a_prediction_that_has_one():
    document = prediction(layers=1)
    page = build_page(
        compare_results(document["ledger"], document, ("measured", "predicted"))
    )
    assert page["views"]["compare"]["kinds"] == []


def test_a_candidate_that_was_left_out_did_not_fail():
    document = search(1, layers=1)
    failed = document["candidates"][-1]
    slow = {**failed, "problem": "left out: its kernels alone take 2 s"}
    document["candidates"].append(slow)
    rows = build_page(document)["views"]["compare"]["candidates"][-2:]
    assert [row["fits"] for row in rows] == ["failed", "left out"]
    assert rows[1]["why_not"] == "its kernels alone take 2 s"


def test_a_search_marks_its_front_and_its_best():
    document = search(12, layers=1)
    page = build_page(document)
    candidates = page["views"]["compare"]["candidates"]
    assert len(candidates) == len(document["candidates"])
    (best,) = (each for each in candidates if each["best"])
    fitting = [each for each in candidates if each["fits"] == "yes"]
    assert best == min(fitting, key=lambda each: each["seconds"])
    assert best["seconds"] == 1 / best["work_per_second"]
    front = [each["place"] for each in candidates if each["pareto"]]
    wanted = [
        place for place, each in enumerate(document["candidates"]) if each["pareto"]
    ]
    assert front == wanted
    assert candidates[-1]["page"] is None
    assert candidates[-1]["why_not"].startswith("8 key-value heads")
    assert len(page["pages"]) == len(candidates) - 1
    assert page["views"]["verdict"]["answer"]["text"] == best["name"]


def test_a_search_without_anything_that_fits():
    document = {**search(4, layers=1), "best": None}
    for each in document["candidates"]:
        each |= {"fits": "no", "pareto": False}
    answer = build_page(document)["views"]["verdict"]["answer"]
    assert answer["text"] == "No candidate fits"
    assert "the smallest is" in answer["detail"]


def test_a_search_that_kept_the_least():
    document = search(4, layers=1)
    for key in ("command", "script", "world_size", "gpu", "device_bytes", "notes"):
        del document[key]
    for each in document["candidates"]:
        each.pop("prediction", None)
        each["work_per_second"] = None
    page = build_page(document)
    assert page["pages"] == []
    assert page["views"]["compare"]["time"] == "step time"
    assert "torchspmd predict" in page["views"]["memory"]["command"]
