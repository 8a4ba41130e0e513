"""The rules of the Trace Event format, for the events that torchspmd writes.

Written from the public description of the format, not from the writer. Perfetto drops
events that break a rule, silently or with a count in its "Info and stats", so that a file
with such events opens and lacks something.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

Event = dict[str, Any]

_PHASES = {"X", "M", "C", "s", "f"}
_METADATA = {
    "process_name": "name",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}
_ROUNDED = 1e-6  # microseconds


def trace_problems(trace: Any) -> list[str]:
    """Every rule that a trace breaks."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["it is not an object with a list of traceEvents"]
    problems = []
    if trace.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        problems.append(f"displayTimeUnit is {trace['displayTimeUnit']!r}")
    events = trace["traceEvents"]
    for place, event in enumerate(events):
        problems += [f"event {place}: {what}" for what in _keys(event)]
    if problems:
        return problems  # what follows reads the keys
    return [*_named(events), *_nested(events), *_flows(events), *_counters(events)]


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _keys(event: Event) -> Iterator[str]:
    phase = event.get("ph")
    if phase not in _PHASES:
        yield f"ph is {phase!r}"
        return
    if not isinstance(event.get("name"), str) or not event["name"]:
        yield f"its name is {event.get('name')!r}"
    wanted = ["pid"] if phase == "C" else ["pid", "tid"]
    yield from (
        f"{key} is {event.get(key)!r}"
        for key in wanted
        if not isinstance(event.get(key), int)
    )
    if phase != "M" and not (_is_number(event.get("ts")) and event["ts"] >= 0):
        yield f"ts is {event.get('ts')!r}"
    if phase == "X" and not (_is_number(event.get("dur")) and event["dur"] >= 0):
        yield f"dur is {event.get('dur')!r}"
    if not isinstance(event.get("args", {}), dict):
        yield "args is not an object"
    elif phase == "M" and _METADATA.get(event["name"]) not in event.get("args", {}):
        yield f"metadata {event['name']!r} without its argument"
    elif phase == "C" and not (
        event.get("args") and all(map(_is_number, event["args"].values()))
    ):
        yield "a counter's args are not numbers"
    if phase in "sf" and not ("id" in event and event.get("cat")):
        yield "a flow without id or cat"


def _named(events: list[Event]) -> Iterator[str]:
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    for event in events:
        if event["ph"] != "M" and event["pid"] not in processes:
            yield f"process {event['pid']} of {event['name']!r} has no name"
        if event["ph"] == "X" and (event["pid"], event["tid"]) not in threads:
            yield f"thread {event['tid']} of {event['name']!r} has no name"


def _tracks(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    for track in tracks.values():
        track.sort(key=lambda event: (event["ts"], -event["dur"]))
    return tracks


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def _nested(events: list[Event]) -> Iterator[str]:
    """A slice lies inside of the one that is open when it begins, or after it."""
    for (_, thread), track in _tracks(events).items():
        open_: list[Event] = []
        for event in track:
            while open_ and _end(open_[-1]) <= event["ts"] + _ROUNDED:
                open_.pop()
            if open_ and _end(event) > _end(open_[-1]) + _ROUNDED:
                yield (
                    f"{event['name']!r} at {event['ts']} ends after {open_[-1]['name']!r}, "
                    f"which it begins inside of, on thread {thread}"
                )
            open_.append(event)


def _flows(events: list[Event]) -> Iterator[str]:
    """One begin and one end, in this order, each on a slice."""
    tracks = _tracks(events)
    ends: defaultdict[Any, dict[str, list[Event]]]
    ends = defaultdict(lambda: {"s": [], "f": []})
    for event in events:
        if event["ph"] in "sf":
            ends[event["cat"], event["name"], event["id"]][event["ph"]].append(event)
            on = tracks.get((event["pid"], event["tid"]), [])
            if not any(
                each["ts"] - _ROUNDED <= event["ts"] <= _end(each) + _ROUNDED
                for each in on
            ):
                yield f"flow {event['id']}: no slice at its {event['ph']}"
        if event["ph"] == "f" and event.get("bp") != "e":
            yield f"flow {event['id']} ends at the next slice, not at the one around it"
    for (_, _, number), both in ends.items():
        if [len(both["s"]), len(both["f"])] != [1, 1]:
            yield f"flow {number} has {len(both['s'])} begins, {len(both['f'])} ends"
        elif both["s"][0]["ts"] > both["f"][0]["ts"]:
            yield f"flow {number} ends before it begins"


def _counters(events: list[Event]) -> Iterator[str]:
    """One set of series for a counter, and times that do not go back."""
    last: dict[tuple[int, str], Event] = {}
    for event in events:
        if event["ph"] != "C":
            continue
        before = last.get((event["pid"], event["name"]), event)
        if event["args"].keys() != before["args"].keys():
            yield f"counter {event['name']!r} changes its series at {event['ts']}"
        if event["ts"] < before["ts"]:
            yield f"counter {event['name']!r} goes back in time at {event['ts']}"
        last[event["pid"], event["name"]] = event
