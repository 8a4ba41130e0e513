"""A prediction's timeline as a JSON trace that Perfetto and chrome://tracing open.

Slices of one track must nest: a lane whose slices overlap is spread over as many tracks as
that needs. Memory is a counter, and a flow leads from a collective to the wait for it.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchspmd.comm.storage import write_whole
from torchspmd.errors import UsageError
from torchspmd.report.results import PREDICTION, check_result

__all__ = ["perfetto_trace", "write_perfetto"]

_STEP, _MEMORY = 1, 2  # processes of the trace
_ROUNDED = 0.01  # microseconds: slices that overlap by less were rounded
_EXPOSED = ("", "communication", "host", "another stage")

Event = dict[str, Any]


def write_perfetto(document: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a prediction's timeline and memory for Perfetto.

    Raises:
        UsageError: The document has no timeline, or the file cannot be written.
    """
    text = json.dumps(perfetto_trace(document), separators=(",", ":"))
    try:
        write_whole(Path(path), text + "\n")
    except OSError as error:
        raise UsageError(
            f"cannot write the trace {path}: {error.strerror or error}. Name a file in a "
            "folder that you may write to."
        ) from None


def perfetto_trace(document: Mapping[str, Any]) -> dict[str, Any]:
    """The trace as plain data.

    Raises:
        UsageError: The document is not a prediction, or one without a timeline.

    >>> from torchspmd.report.results import COLUMNS
    >>> columns = {name: [0] for name in COLUMNS} | {"duration": [5.0], "waits_for": [-1]}
    >>> lanes = [{"name": "default stream", "kind": "compute"}]
    >>> texts = {"lanes": lanes, "strings": ["aten.mm"], "phases": []}
    >>> trace = perfetto_trace({
    ...     "format": PREDICTION, "version": 1, "fits": "yes", "memory": {}, "modules": [],
    ...     "timeline": columns | texts,
    ... })
    >>> [(e["name"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    [('aten.mm', 5.0)]
    """
    name = check_result(document, "the document")
    timeline = document.get("timeline") if name == PREDICTION else None
    if not timeline:
        what = "a prediction without a timeline" if name == PREDICTION else f"a {name}"
        raise UsageError(
            f"--perfetto needs the times of a step, and this is {what}. Predict without "
            "--no-timeline: torchspmd predict train.py --world-size 8 --perfetto "
            "trace.json."
        )
    timeline = _from_zero(timeline)
    script = document.get("script") or "prediction"
    title = f"{script}, rank {document.get('rank', 0)} of {document.get('world_size')}"
    events = [
        _name("process_name", _STEP, 0, title),
        *_phases(timeline),
        *_slices(timeline),
        *_memory(document.get("memory") or {}),
    ]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _from_zero(timeline: Mapping[str, Any]) -> Mapping[str, Any]:
    """Times from the first slice on: a host that runs ahead starts before its step."""
    first = min(timeline["start"], default=0.0)
    if first >= 0:
        return timeline
    phases = [{**p, "start": p["start"] - first} for p in timeline["phases"]]
    starts = [start - first for start in timeline["start"]]
    return {**timeline, "start": starts, "phases": phases}


def _name(what: str, process: int, thread: int, name: str) -> Event:
    return {
        "ph": "M",
        "name": what,
        "pid": process,
        "tid": thread,
        "args": {"name": name},
    }


def _phases(timeline: Mapping[str, Any]) -> Iterator[Event]:
    yield _name("thread_name", _STEP, 0, "phases")
    for phase in timeline["phases"]:
        yield {
            "ph": "X",
            "pid": _STEP,
            "tid": 0,
            "name": phase["name"],
            "ts": phase["start"],
            "dur": phase["duration"],
        }


def _slices(timeline: Mapping[str, Any]) -> Iterator[Event]:
    tracks, names = _tracks(timeline)
    for thread, name in names.items():
        yield _name("thread_name", _STEP, thread, name)
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": _STEP,
            "tid": thread,
            "args": {"sort_index": thread},
        }
    for place in sorted(range(len(tracks)), key=lambda place: tracks[place][:2]):
        yield _slice(timeline, place, *tracks[place])
    for wait, sent in enumerate(timeline["waits_for"]):
        if sent >= 0:
            yield from _flow(tracks[sent], tracks[wait], wait)


Track = tuple[int, float, float]  # thread, start, duration


def _tracks(timeline: Mapping[str, Any]) -> tuple[list[Track], dict[int, str]]:
    """Where each slice goes, so that those of one thread never overlap."""
    starts, durations = timeline["start"], timeline["duration"]
    by_lane: dict[int, list[int]] = {n: [] for n in range(len(timeline["lanes"]))}
    for place, lane in enumerate(timeline["lane"]):
        by_lane[lane].append(place)
    tracks: list[Track] = [(0, 0.0, 0.0)] * len(starts)
    names: dict[int, str] = {}
    thread = 1
    for lane, places in by_lane.items():
        ends: list[float] = []
        for place in sorted(places, key=lambda p: (starts[p], -durations[p])):
            start = starts[place]
            row = next((r for r, e in enumerate(ends) if e <= start + _ROUNDED), None)
            if row is None:
                row = len(ends)
                ends.append(start)
            begin = max(start, ends[row])
            length = max(0.0, start + durations[place] - begin)
            tracks[place] = (thread + row, begin, length)
            ends[row] = begin + length
        for row in range(max(1, len(ends))):
            name = timeline["lanes"][lane]["name"]
            names[thread + row] = f"{name} {row + 1}" if row else name
        thread += max(1, len(ends))
    return tracks, names


def _slice(
    timeline: Mapping[str, Any], place: int, thread: int, start: float, length: float
) -> Event:
    strings = timeline["strings"]
    arguments: dict[str, Any] = {
        key: strings[timeline[key][place]] for key in ("module", "phase", "detail")
    }
    for key in ("bytes", "flops"):
        if timeline[key][place]:
            arguments[key] = timeline[key][place]
    exposed = timeline["exposed"][place]
    if exposed:
        arguments["waits for"] = _EXPOSED[exposed]
    return {
        "ph": "X",
        "pid": _STEP,
        "tid": thread,
        "name": strings[timeline["name"][place]],
        "cat": "exposed"
        if exposed
        else timeline["lanes"][timeline["lane"][place]]["kind"],
        "ts": start,
        "dur": length,
        "args": {key: value for key, value in arguments.items() if value != ""},
    }


def _flow(sent: Track, wait: Track, identity: int) -> Iterator[Event]:
    """An arrow binds to the slices that are open at its ends' times."""
    common = {"pid": _STEP, "name": "wait", "cat": "wait", "id": identity}
    thread, start, length = sent
    yield {**common, "ph": "s", "tid": thread, "ts": start + length / 2}
    thread, start, length = wait
    middle = max(start + length / 2, sent[1] + sent[2] / 2)
    at = min(middle, start + length)
    yield {**common, "ph": "f", "bp": "e", "tid": thread, "ts": at}


def _memory(memory: Mapping[str, Any]) -> Iterator[Event]:
    """Counters over predicted time; in the order of events where no time is known."""
    curve = memory.get("curve")
    if not curve or not curve.get("allocated"):
        return
    seconds = curve.get("seconds")
    timed = seconds is not None and all(each is not None for each in seconds)
    places = seconds if timed else curve["event"]
    title = "memory" if timed else "memory, by order of events (not to scale)"
    yield _name("process_name", _MEMORY, 0, title)
    scale = 1e6 if timed else 1.0
    for point, at in enumerate(places):
        held = {name: values[point] for name, values in curve["categories"].items()}
        common = {"ph": "C", "pid": _MEMORY, "ts": at * scale}
        yield {**common, "name": "allocated by category", "args": held}
        yield {
            **common,
            "name": "reserved",
            "args": {"bytes": curve["reserved"][point]},
        }
