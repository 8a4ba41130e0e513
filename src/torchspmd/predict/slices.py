"""The simulated step as columns of slices, for the page."""

from collections.abc import Iterator
from typing import Any

from torchspmd.predict.account import Part, StepAccount
from torchspmd.predict.program import Program
from torchspmd.predict.timeline import Kind, Run, Task
from torchspmd.rehearse.recording import Comm, Op, Phase, Site, TensorSpec

__all__ = ["timeline_json"]

_MOST = 50_000
_EXPOSED = {Part.EXPOSED: 1, Part.HOST: 2, Part.BUBBLE: 3}
_LANES = {Kind.COMPUTE: "compute", Kind.COMM: "communicator", Kind.COPY: "copy"}
_COLUMNS = (
    "lane",
    "start",
    "duration",
    "name",
    "module",
    "phase",
    "detail",
    "bytes",
    "flops",
    "waits_for",
    "exposed",
)


class _Strings:
    """A table of texts, each once."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def place(self, text: str) -> int:
        return self.places.setdefault(text, len(self.places))


def timeline_json(
    run: Run, rank: int, account: StepAccount, program: Program
) -> dict[str, Any]:
    """The last repetition, in the columns of docs/prediction_format.md."""
    strings = _Strings()
    tasks = [
        task
        for task in run.tasks[rank]
        if task.end > account.start and task.kind is not Kind.WAIT
    ]
    tasks = sorted(tasks, key=lambda task: task.start - task.end)[:_MOST]
    tasks.sort(key=lambda task: (task.start, task.stream))
    lanes, lane_of = _lanes(tasks, program, account)
    rows: list[tuple[Any, ...]] = []
    place_of: dict[int, int] = {}
    for task in tasks:
        place_of[id(task)] = len(rows)
        rows.append(_task_row(task, lane_of[task.stream], account, program, strings))
    for _, start, seconds, part, cause in account.waits:
        if part in _EXPOSED:
            rows.append(
                (
                    lane_of.get(account.stream, 1),
                    _us(start - account.start),
                    _us(seconds),
                    strings.place(_wait_name(part, cause)),
                    *_where(_site(cause), strings),
                    strings.place(""),
                    0,
                    0,
                    place_of.get(id(cause), -1),
                    _EXPOSED[part],
                )
            )
    rows += _host_rows(run, rank, account, program, strings)
    columns = {name: [row[at] for row in rows] for at, name in enumerate(_COLUMNS)}
    return {
        "lanes": lanes,
        "strings": list(strings.places),
        **columns,
        "phases": _phases(tasks, account),
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _lanes(
    tasks: list[Task], program: Program, account: StepAccount
) -> tuple[list[dict[str, str]], dict[int, int]]:
    kinds: dict[int, Kind] = {account.stream: Kind.COMPUTE}
    for task in tasks:
        kinds.setdefault(task.stream, task.kind)
    streams = program.recording.streams
    order = sorted(kinds, key=lambda stream: (kinds[stream].value, stream))
    lanes = [{"name": "host", "kind": "host"}]
    lanes += [
        {"name": streams.get(stream, f"stream {stream}"), "kind": _LANES[kinds[stream]]}
        for stream in order
    ]
    return lanes, {stream: place + 1 for place, stream in enumerate(order)}


def _site(task: Task | None) -> Site | None:
    event = task.item.event if task is not None else None
    return event.site if isinstance(event, Op | Comm) else None


def _where(site: Site | None, strings: _Strings) -> tuple[int, int]:
    if site is None:
        return strings.place(""), strings.place("")
    return strings.place(site.module), strings.place(site.phase.value)


def _task_row(
    task: Task, lane: int, account: StepAccount, program: Program, strings: _Strings
) -> tuple[Any, ...]:
    event = task.item.event
    name, detail, nbytes, flops = "", "", 0, 0.0
    if isinstance(event, Op):
        cost = program.costs.get(task.item.place)
        name, detail = event.name, _shapes(event.inputs)
        if event.region is not None and cost is not None and cost.kind == "memory":
            name = "fused kernel"
        nbytes, flops = (cost.nbytes, cost.flops) if cost is not None else (0, 0.0)
    elif isinstance(event, Comm):
        name = f"{event.kind} {event.label}"
        detail = f"{_shapes(event.inputs)}, {len(event.ranks)} ranks"
        nbytes = event.payload_bytes
    return (
        lane,
        _us(task.start - account.start),
        _us(task.end - task.start),
        strings.place(name),
        *_where(_site(task), strings),
        strings.place(detail),
        nbytes,
        int(flops),
        -1,
        0,
    )


def _shapes(specs: tuple[TensorSpec, ...]) -> str:
    shown = [f"{spec.dtype}[{','.join(map(str, spec.shape))}]" for spec in specs[:3]]
    more = f" and {len(specs) - 3} more" if len(specs) > 3 else ""
    return " ".join(shown) + more


def _wait_name(part: Part, cause: Task | None) -> str:
    event = cause.item.event if cause is not None else None
    if part is Part.HOST:
        return "waits for the host"
    if part is Part.BUBBLE:
        return "waits for another stage"
    if isinstance(event, Comm):
        return f"waits for {event.kind} {event.label}"
    return "waits"


def _host_rows(
    run: Run, rank: int, account: StepAccount, program: Program, strings: _Strings
) -> Iterator[tuple[Any, ...]]:
    """The host's work, those of one module and phase that follow each other as one."""
    last_round = len(run.marks[rank]) - 1
    before = run.marks[rank][-2] if last_round else 0.0
    open_site: Site | None = None
    begin = end = before
    for task in run.tasks[rank]:
        if task.round != last_round:
            continue
        start = task.issued - task.item.host
        site = _site(task)
        if site is None or task.kind is Kind.WAIT:
            continue
        if open_site is not None and (
            (site.module, site.phase) != (open_site.module, open_site.phase)
            or start > end + 20e-6
        ):
            yield _host_row(open_site, begin, end, account, strings)
            open_site, begin = site, max(start, end)
        elif open_site is None:
            open_site, begin = site, start
        end = task.issued
    if open_site is not None:
        yield _host_row(open_site, begin, end, account, strings)


def _host_row(
    site: Site, begin: float, end: float, account: StepAccount, strings: _Strings
) -> tuple[Any, ...]:
    return (
        0,
        _us(begin - account.start),
        _us(max(0.0, end - begin)),
        strings.place("issues"),
        *_where(site, strings),
        strings.place(""),
        0,
        0,
        -1,
        0,
    )


def _phases(tasks: list[Task], account: StepAccount) -> list[dict[str, Any]]:
    """Forward, backward and optimizer on the computing stream, in their order."""
    phases: list[dict[str, Any]] = []
    names = {Phase.RECOMPUTE: "backward", Phase.OTHER: ""}
    for task in tasks:
        site = _site(task)
        if site is None or task.stream != account.stream:
            continue
        name = names.get(site.phase, site.phase.value)
        if not name:
            continue
        start, end = _us(task.start - account.start), _us(task.end - account.start)
        if phases and phases[-1]["name"] == name:
            phases[-1]["duration"] = round(end - phases[-1]["start"], 3)
        else:
            phases.append({"name": name, "start": start, "duration": end - start})
    return phases
