"""What a simulated step is made of: every second of the computing stream, and why."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torchspmd.predict.timeline import Kind, Run, Task
from torchspmd.rehearse.recording import Comm, Op, Phase, Site, Wait

__all__ = ["Exposed", "Part", "StepAccount", "account_for"]

_DEEP = 200  # tasks that a wait is followed back through


class Part(Enum):
    """What the computing stream does."""

    COMPUTE = "compute"
    EXPOSED = "exposed"  # waits for communication
    HOST = "host"  # waits to be given work
    BUBBLE = "bubble"  # waits for another stage of a pipeline


@dataclass(slots=True)
class Exposed:
    """Waits for communications of one axis, kind and module.

    Attributes:
        axis: Of the mesh; the ranks of the group where no mesh owns it.
        kind: As in ``all_gather``.
        module: That communicates.
        seconds: That computation waits.
        nbytes: Payload of those that were waited for.
        count: How many they are.
        cause: Why the longest one was waited for.
    """

    axis: str
    kind: str
    module: str
    seconds: float = 0.0
    nbytes: int = 0
    count: int = 0
    cause: str = ""
    longest: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """An entry of ``exposed`` in a prediction's file."""
        return {
            "axis": self.axis,
            "kind": self.kind,
            "module": self.module,
            "seconds": self.seconds,
            "bytes": self.nbytes,
            "count": self.count,
            "cause": self.cause,
        }


@dataclass(slots=True)
class StepAccount:
    """One steady step of one rank.

    Attributes:
        start: Of the step on the simulated clock.
        end: Of it.
        stream: The computing one.
        parts: Seconds by what it does; they add up to the step.
        communication: Seconds in which any communicator is busy.
        optimizer: Seconds of the step in the optimizer, whatever it does.
        exposed: By axis, kind and module, the longest first.
        waits: Slices of waiting: task, start, seconds, part, task that is waited for.
        modules: Seconds of the device by module.
        module_waits: Exposed seconds by module.
    """

    start: float
    end: float
    stream: int
    parts: dict[Part, float]
    communication: float = 0.0
    optimizer: float = 0.0
    exposed: list[Exposed] = field(default_factory=list)
    waits: list[tuple[Task | None, float, float, Part, Task | None]] = field(
        default_factory=list
    )
    modules: dict[str, float] = field(default_factory=dict)
    module_waits: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.end - self.start


def account_for(run: Run, rank: int = 0) -> StepAccount:
    """The last repetition of a rank's step."""
    ends = run.ends[rank]
    start, end = (ends[-2] if len(ends) > 1 else 0.0), ends[-1]
    tasks = [task for task in run.tasks[rank] if task.end > start]
    stream = _computing_stream(tasks)
    result = StepAccount(start, end, stream, dict.fromkeys(Part, 0.0))
    found: dict[tuple[str, str, str], Exposed] = {}
    cursor = start
    for task in tasks:
        if task.stream != stream:
            continue
        begin = max(cursor, min(task.start, end))
        if begin > cursor:
            for part, a, b, cause in _why(task, cursor, begin):
                _add(result, found, task, part, a, b, cause)
        cursor = max(begin, task.end)
        _count(result, task, Part.COMPUTE, cursor - begin)
    if end > cursor:
        last = max(tasks, key=lambda task: task.end, default=None)
        pieces = _why_waiting(last, cursor, end) if last and last.end > cursor else []
        for part, a, b, cause in pieces or [(Part.HOST, cursor, end, None)]:
            _add(result, found, None, part, a, b, cause)
    comms = [task for task in tasks if task.kind is Kind.COMM]
    result.communication = _union(comms, start)
    result.exposed = sorted(found.values(), key=lambda each: -each.seconds)
    return result


def _computing_stream(tasks: list[Task]) -> int:
    busy: dict[int, float] = {}
    for task in tasks:
        if task.kind is Kind.COMPUTE:
            busy[task.stream] = busy.get(task.stream, 0.0) + task.end - task.start
    return max(busy, key=lambda stream: (busy[stream], -stream), default=0)


def _count(result: StepAccount, task: Task, part: Part, seconds: float) -> None:
    if seconds <= 0:
        return
    result.parts[part] += seconds
    site = _site(task)
    if site is None:
        return
    if site.phase is Phase.OPTIMIZER:
        result.optimizer += seconds
    result.modules[site.module] = result.modules.get(site.module, 0.0) + seconds


def _site(task: Task | None) -> Site | None:
    event = task.item.event if task is not None else None
    return event.site if isinstance(event, Op | Comm | Wait) else None


def _add(
    result: StepAccount,
    found: dict[tuple[str, str, str], Exposed],
    task: Task | None,
    part: Part,
    start: float,
    end: float,
    cause: Task | None,
) -> None:
    seconds = end - start
    result.parts[part] += seconds
    result.waits.append((task, start, seconds, part, cause))
    site = _site(task)
    if site is not None and site.phase is Phase.OPTIMIZER:
        result.optimizer += seconds
    event = cause.item.event if cause is not None else None
    if part is not Part.EXPOSED or not isinstance(event, Comm):
        return
    module = event.site.module
    key = (event.label, event.kind, module)
    entry = found.setdefault(key, Exposed(*key))
    entry.seconds += seconds
    entry.nbytes += event.payload_bytes
    entry.count += 1
    if seconds > entry.longest:
        assert cause is not None
        entry.longest, entry.cause = seconds, _cause(cause, start)
    waits = result.module_waits
    waits[module] = waits.get(module, 0.0) + seconds


# ----------------------------------------------------------------------------
# Why

Piece = tuple[Part, float, float, Task | None]


def _why(task: Task, start: float, end: float) -> Iterator[Piece]:
    """What the stream did before this task of it could start."""
    ready = min(max(task.ready, start), end)
    if ready > start:  # not issued yet
        yield Part.HOST, start, ready, None
    if end > ready:
        late = max(task.needs, key=lambda need: need.end, default=None)
        yield from _why_waiting(late, ready, end)


def _why_waiting(task: Task | None, start: float, end: float) -> Iterator[Piece]:
    """Follow back, from the end, what was being waited for."""
    pieces: list[Piece] = []
    for _ in range(_DEEP):
        if end <= start:
            break
        if task is None:
            pieces.append((Part.HOST, start, end, None))
            end = start
            break
        begin = min(max(task.start, start), end)
        if task.kind is not Kind.WAIT and end > begin:
            part = Part.EXPOSED if task.kind is Kind.COMM else Part.COMPUTE
            pieces.append((part, begin, end, task))
            end = begin
        starter = task.starter
        if starter is not None and starter.rank != task.rank:
            pieces.append((Part.BUBBLE, start, end, task))
            end = start
            break
        if starter is None and task.needs:
            starter = max(task.needs, key=lambda need: need.end)
        task = starter
    if end > start:
        pieces.append((Part.COMPUTE, start, end, None))
    yield from ((p, a, b, t) for p, a, b, t in reversed(pieces) if b > a)


def _cause(comm: Task, waited_from: float) -> str:
    before = comm.starter
    took = comm.end - comm.start
    if before is not None and before.kind is Kind.COMM and before.stream == comm.stream:
        event = before.item.event
        what = (
            f"{event.kind} of {event.site.module or 'no module'}"
            if isinstance(event, Comm)
            else "another"
        )
        return f"queued behind {what} on the same communicator"
    hidden = max(0.0, waited_from - comm.start)
    if hidden < 0.1 * took:
        return "waited for as soon as it was issued: nothing is computed meanwhile"
    if took > 1.2 * comm.work:
        return "slowed down by other communication on the same link"
    return (
        f"longer ({took * 1e3:.2f} ms) than the computation that it overlaps with "
        f"({hidden * 1e3:.2f} ms)"
    )


def _union(tasks: list[Task], start: float) -> float:
    total, until = 0.0, start
    for task in sorted(tasks, key=lambda task: task.start):
        begin = max(task.start, until)
        if task.end > begin:
            total += task.end - begin
            until = task.end
    return total
