"""The trace for Perfetto: slices of a track never overlap, flows end at waits."""

import json
from collections import defaultdict

import pytest
from prediction_documents import prediction, search
from trace_events import trace_problems

from torchspmd.errors import UsageError
from torchspmd.report import perfetto_trace, write_perfetto
from torchspmd.report.results import COLUMNS


@pytest.fixture(scope="module")
def document():
    return prediction(layers=3)


@pytest.fixture(scope="module")
def events(document):
    return perfetto_trace(document)["traceEvents"]


def slices(events):
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["tid"]].append(event)
    return tracks


def assert_no_overlap(events):
    for track in slices(events).values():
        end = 0.0
        for event in sorted(track, key=lambda each: each["ts"]):
            assert event["ts"] >= end - 1e-9
            end = event["ts"] + event["dur"]


def test_every_slice_is_there_and_none_overlap(document, events):
    count = sum(len(track) for track in slices(events).values())
    timeline = document["timeline"]
    assert count == len(timeline["start"]) + len(timeline["phases"])
    assert_no_overlap(events)
    total = sum(e["dur"] for track in slices(events).values() for e in track)
    wanted = sum(timeline["duration"]) + sum(p["duration"] for p in timeline["phases"])
    assert total == pytest.approx(wanted, rel=1e-4)


def test_lanes_are_named_tracks(document, events):
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names == [
        "phases",
        *(lane["name"] for lane in document["timeline"]["lanes"]),
    ]


def test_slices_of_a_lane_that_overlap_get_tracks_of_their_own():
    document = prediction(layers=1)
    timeline = document["timeline"]
    place = timeline["lane"].index(2)
    for name in COLUMNS:
        timeline[name].append(timeline[name][place])
    timeline["start"] = [*timeline["start"][:-1], timeline["start"][place] + 1.0]
    events = perfetto_trace(document)["traceEvents"]
    assert_no_overlap(events)
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert "tp 2" in names


def test_a_host_that_runs_ahead_starts_at_zero():
    document = prediction(layers=1)
    timeline = document["timeline"]
    host = timeline["lane"].index(0)
    timeline["start"][host] = -500.0
    found = perfetto_trace(document)["traceEvents"]
    assert min(event["ts"] for event in found if event["ph"] == "X") == 0
    (forward,) = (e for e in found if e["name"] == "forward" and e["ph"] == "X")
    assert forward["ts"] == pytest.approx(timeline["phases"][0]["start"] + 500)


def test_flows_lead_from_collectives_to_waits(document, events):
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    waits = [w for w in document["timeline"]["waits_for"] if w >= 0]
    assert len(begins) == len(ends) == len(waits) > 0
    tracks = slices(events)
    for number, begin in begins.items():
        for event in (begin, ends[number]):
            assert any(
                each["ts"] - 1e-6 <= event["ts"] <= each["ts"] + each["dur"] + 1e-6
                for each in tracks[event["tid"]]
            )
        assert begin["ts"] <= ends[number]["ts"]


def test_memory_is_a_counter(document, events):
    held = [e for e in events if e["ph"] == "C" and e["name"] != "reserved"]
    curve = document["memory"]["curve"]
    assert [sum(e["args"].values()) for e in held] == curve["allocated"]
    assert any(
        "not to scale" in e["args"].get("name", "") for e in events if e["ph"] == "M"
    )


def test_memory_over_time_where_it_is_known():
    document = prediction(layers=1)
    curve = document["memory"]["curve"]
    curve["seconds"] = [0.5 * place for place in range(len(curve["event"]))]
    events = perfetto_trace(document)["traceEvents"]
    assert [e["ts"] for e in events if e["name"] == "reserved"][:3] == [0, 5e5, 1e6]


def test_the_file_is_json(document, tmp_path):
    path = tmp_path / "trace.json"
    write_perfetto(document, path)
    assert json.loads(path.read_text()) == json.loads(
        json.dumps(perfetto_trace(document))
    )


def test_what_has_no_timeline_is_refused(document):
    with pytest.raises(
        UsageError, match=r"a prediction without a timeline.*no-timeline"
    ):
        perfetto_trace({**document, "timeline": None})
    with pytest.raises(UsageError, match="this is a torchspmd/search"):
        perfetto_trace(search(1, layers=1))


# ----------------------------------------------------------------------------
# The Trace Event format


@pytest.mark.parametrize("layers", [1, 3])
def test_it_keeps_the_rules_of_the_format(layers):
    assert trace_problems(perfetto_trace(prediction(layers=layers))) == []


def _first(events, phase):
    return next(event for event in events if event["ph"] == phase)


@pytest.mark.parametrize(
    ("phase", "change", "problem"),
    [
        ("X", {"dur": -1.0}, "dur is -1.0"),
        ("X", {"ts": float("nan")}, "ts is nan"),
        ("X", {"name": ""}, "its name is ''"),
        ("X", {"tid": "host"}, "tid is 'host'"),
        ("X", {"ph": "Z"}, "ph is 'Z'"),
        ("X", {"tid": 99}, "thread 99 of 'forward' has no name"),
        ("X", {"ts": 50.0}, "which it begins inside of"),
        ("M", {"args": {}}, "metadata 'process_name' without its argument"),
        ("C", {"args": {"allocated": "1 GiB"}}, "a counter's args are not numbers"),
        ("C", {"args": {"other": 1}}, "changes its series"),
        ("C", {"ts": 1e12}, "goes back in time"),
        ("s", {"id": -5}, "has 0 begins, 1 ends"),
        ("s", {"ts": 1e12}, "no slice at its s"),
        ("f", {"bp": "x"}, "not at the one around it"),
    ],
)
def test_a_trace_that_breaks_a_rule_is_found(document, phase, change, problem):
    trace = json.loads(json.dumps(perfetto_trace(document)))
    _first(trace["traceEvents"], phase).update(change)
    assert any(problem in each for each in trace_problems(trace))
