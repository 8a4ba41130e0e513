"""Run a recorded step on a clock: the host issues, streams run, and waits wait.

Every stream is a queue. A task starts when the host has issued it, what stands before it
in its stream is done, and what it waits for is done. While a collective runs, computation
is slower; collectives that share a link share its rate; kernels of two streams share the
chip. Ranks that are simulated together meet in their sends, receives and collectives.
"""

import contextlib
import gc
import heapq
import itertools
from collections import deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from torchspmd.errors import UsageError
from torchspmd.predict.collectives import Link
from torchspmd.rehearse.recording import (
    Comm,
    Event,
    EventRecord,
    EventWait,
    Mark,
    MarkKind,
    Op,
    StreamWait,
    Synchronize,
    Wait,
)

__all__ = ["Item", "Kind", "Run", "Task", "simulate"]

_TINY = 1e-12


class Kind(Enum):
    """What a task needs."""

    COMPUTE = auto()
    COMM = auto()
    COPY = auto()  # between host and device
    WAIT = auto()  # nothing: it ends with what it waits for


class Item(NamedTuple):
    """What the host does next, with its price.

    Attributes:
        host: Seconds of the host before.
        event: Of the recording; None for the host alone.
        work: Seconds of the device when nothing else runs.
        kind: Of the task; None where none is issued.
        link: Of a communication.
        place: In the recording.
    """

    host: float
    event: Event | None
    work: float = 0.0
    kind: Kind | None = None
    link: Link = Link.NONE
    place: int = -1


@dataclass(slots=True, eq=False)
class Task:
    """One slice of a stream.

    Attributes:
        rank: Of those that are simulated.
        stream: Where it runs.
        kind: What it needs.
        work: Seconds when it is alone.
        item: Where it comes from.
        round: Which repetition of the step.
        needs: Tasks that must be done before.
        issued: When the host issued it.
        ready: When it was the first of its stream, and issued.
        start: When it started.
        end: When it was done.
        starter: The task that it waited for last; None: the host.
    """

    rank: int
    stream: int
    kind: Kind
    work: float
    item: Item
    round: int
    issued: float
    needs: list["Task"] = field(default_factory=list)
    ready: float = -1.0
    start: float = -1.0
    end: float = -1.0
    starter: "Task | None" = None
    meeting: "_Meeting | None" = None
    left: float = 0.0
    rate: float = 0.0
    since: float = 0.0
    version: int = 0
    watchers: list["tuple[int, int] | _Host"] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Meeting:
    """Ranks that must all be there before any of their tasks starts."""

    size: int
    there: list[Task] = field(default_factory=list)


class _Stream:
    __slots__ = ("free", "last", "queue", "tail")

    def __init__(self) -> None:
        self.queue: deque[Task] = deque()
        self.tail: Task | None = None  # the last that was issued
        self.last: Task | None = None  # the last that was done
        self.free = True


@dataclass(slots=True)
class Run:
    """What came of a simulation.

    Attributes:
        tasks: Of each rank that was asked about, in the order in which they were issued.
        marks: Of each rank: seconds at which the host ended each repetition.
        ends: Of each rank: seconds at which host and device had ended each repetition.
        host: Of each rank: seconds of the host's own work in one repetition.
        events: Of each rank: seconds at which each recorded event was reached, last.
    """

    tasks: list[list[Task]]
    marks: list[list[float]]
    ends: list[list[float]]
    host: list[float]
    events: list[dict[int, float]] = field(default_factory=list)


class _Host:
    """The program of one rank's process."""

    def __init__(self, rank: int, items: Sequence[Item], rounds: int) -> None:
        self.rank = rank
        self.items, self.rounds = items, rounds
        self.round = self.next = 0
        self.time = 0.0
        self.pending: Item | None = None  # its seconds are running
        self.waits_for: list[Task] = []
        self.marks: list[float] = []
        self.comms: dict[int, Task] = {}
        self.events: dict[int, Task | None] = {}
        self.recorded: dict[int, float] = {}


class _Simulation:
    def __init__(
        self,
        programs: Sequence[Sequence[Item]],
        rounds: int,
        slowdown: float,
        ranks: Sequence[int],
        keep: Container[int],
    ) -> None:
        self.slowdown = slowdown
        self.hosts = [_Host(r, items, rounds) for r, items in enumerate(programs)]
        self.streams: dict[tuple[int, int], _Stream] = {}
        self.running: list[list[Task]] = [[] for _ in programs]
        self.tasks: list[list[Task]] = [[] for _ in programs]
        self.keep = keep
        self.latest = [[0.0] * rounds for _ in programs]  # ends of each repetition
        self.meetings: dict[object, _Meeting] = {}
        self.numbers: dict[object, itertools.count[int]] = {}
        # Global ranks to those that are simulated, and back.
        self.ranks = {rank: place for place, rank in enumerate(ranks)}
        self.global_ranks = dict(enumerate(ranks))
        self.heap: list[tuple[float, int, int, object]] = []
        self.order = itertools.count()

    def run(self) -> None:
        for host in self.hosts:
            self._push(0.0, 0, host)
        while self.heap:
            now, _, version, what = heapq.heappop(self.heap)
            if isinstance(what, _Host):
                self._host(what, now)
            elif isinstance(what, Task) and what.version == version:
                self._finish(what, now)

    def _push(self, time: float, version: int, what: object) -> None:
        heapq.heappush(self.heap, (time, next(self.order), version, what))

    # --- the host ---------------------------------------------------------------------

    def _host(self, host: _Host, now: float) -> None:
        """Go on until seconds pass, or the host waits."""
        host.time = now
        item, host.pending = host.pending, None
        if item is not None and not self._issue(host, item):
            return
        while host.round < host.rounds:
            if host.next == len(host.items):
                host.marks.append(now)
                host.round, host.next = host.round + 1, 0
                continue
            item = host.items[host.next]
            host.next += 1
            if item.host > 0:
                host.pending = item
                self._push(now + item.host, 0, host)
                return
            if not self._issue(host, item):
                return

    def _issue(self, host: _Host, item: Item) -> bool:
        """Hand an item to the device; False when the host waits now."""
        event = item.event
        match event:
            case Op():
                self._enqueue(host, event.stream, item)
            case Comm():
                self._communicate(host, event, item)
            case Wait():
                task = host.comms.get(event.comm)
                if task is not None:
                    self._enqueue_wait(host, event.stream, item, task)
            case EventRecord():
                host.events[event.event] = self._stream(host, event.stream).tail
                host.recorded[event.event] = host.time
            case EventWait():
                before = host.events.get(event.event)
                if before is not None:
                    self._enqueue_wait(host, event.stream, item, before)
            case StreamWait():
                tail = self._stream(host, event.other).tail
                if tail is not None:
                    self._enqueue_wait(host, event.stream, item, tail)
            case Synchronize():
                return self._synchronize(host, event)
        return True

    def _synchronize(self, host: _Host, event: Synchronize) -> bool:
        if event.event is not None:
            tails = [host.events.get(event.event)]
        elif event.stream is not None:
            tails = [self._stream(host, event.stream).tail]
        else:
            tails = [
                s.tail for (rank, _), s in self.streams.items() if rank == host.rank
            ]
        host.waits_for = [task for task in tails if task is not None and task.end < 0]
        for task in host.waits_for:
            task.watchers.append(host)
        return not host.waits_for

    def _communicate(self, host: _Host, comm: Comm, item: Item) -> None:
        tail = self._stream(host, comm.stream).tail
        needs = [] if tail is None or comm.stream == comm.comm_stream else [tail]
        task = self._enqueue(host, comm.comm_stream, item, needs)
        task.meeting = self._meet(host, comm)
        host.comms[comm.number] = task
        self._advance(host.rank, comm.comm_stream, host.time)
        if not comm.is_async and comm.stream != comm.comm_stream:
            self._enqueue_wait(host, comm.stream, item, task)

    def _meet(self, host: _Host, comm: Comm) -> _Meeting | None:
        """The same call on other ranks, where they are simulated too."""
        me = self.global_ranks.get(host.rank, host.rank)
        if comm.peer >= 0 and comm.kind in ("send", "recv"):
            pair = (me, comm.peer) if comm.kind == "send" else (comm.peer, me)
            others = [rank for rank in pair if rank in self.ranks]
            key: object = ("between", *pair)
        else:
            others = [rank for rank in comm.ranks if rank in self.ranks]
            key = (comm.group, comm.ranks)
        if len(others) < 2:
            return None
        count = next(self.numbers.setdefault((key, host.rank), itertools.count()))
        return self.meetings.setdefault((key, count), _Meeting(len(others)))

    # --- streams ----------------------------------------------------------------------

    def _stream(self, host: _Host, number: int) -> _Stream:
        key = (host.rank, number)
        stream = self.streams.get(key)
        if stream is None:
            stream = self.streams[key] = _Stream()
        return stream

    def _enqueue_wait(self, host: _Host, stream: int, item: Item, on: Task) -> None:
        if on.rank == host.rank and on.stream == stream:
            return  # a stream is always after itself
        wait = item._replace(work=0.0, kind=Kind.WAIT)
        self._enqueue(host, stream, wait, [on])

    def _enqueue(
        self, host: _Host, number: int, item: Item, needs: list[Task] | None = None
    ) -> Task:
        assert item.kind is not None
        stream = self._stream(host, number)
        task = Task(
            rank=host.rank,
            stream=number,
            kind=item.kind,
            work=item.work,
            item=item,
            round=host.round,
            issued=host.time,
            needs=needs or [],
        )
        if host.rank in self.keep:
            self.tasks[host.rank].append(task)
        stream.queue.append(task)
        stream.tail = task
        if item.kind is not Kind.COMM:  # one that may have to meet others comes later
            self._advance(host.rank, number, host.time)
        return task

    def _advance(self, rank: int, number: int, now: float) -> None:
        """Start what can be started at the head of a stream."""
        stream = self.streams[rank, number]
        while stream.queue and stream.free:
            task = stream.queue[0]
            if task.ready < 0:
                task.ready = now
                task.starter = stream.last
                if stream.last is None or stream.last.end < task.issued - _TINY:
                    task.starter = None
            open_needs = [need for need in task.needs if need.end < 0]
            if open_needs:
                for need in open_needs:
                    if (rank, number) not in need.watchers:
                        need.watchers.append((rank, number))
                return
            late = max(task.needs, key=lambda need: need.end, default=None)
            if late is not None and late.end > task.ready - _TINY:
                task.starter = late
            if task.meeting is not None and not self._all_there(task, now):
                return
            self._start(task, now)

    def _all_there(self, task: Task, now: float) -> bool:
        meeting = task.meeting
        assert meeting is not None
        if task in meeting.there:
            return False
        meeting.there.append(task)
        if len(meeting.there) < meeting.size:
            return False
        others, meeting.there = meeting.there[:-1], []
        for other in others:
            other.starter = task
            self._start(other, now)
            self._advance(other.rank, other.stream, now)
        return True

    def _start(self, task: Task, now: float) -> None:
        stream = self.streams[task.rank, task.stream]
        task.start = now
        if task.kind is Kind.WAIT or task.work <= 0:
            task.end = now
            stream.queue.popleft()
            stream.last = task
            self._done(task, now)
            return
        stream.free = False
        task.left, task.since = task.work, now
        self.running[task.rank].append(task)
        self._set_rates(task.rank, now)

    def _finish(self, task: Task, now: float) -> None:
        stream = self.streams[task.rank, task.stream]
        task.end = now
        self.running[task.rank].remove(task)
        stream.queue.popleft()
        stream.last, stream.free = task, True
        if self.running[task.rank]:
            self._set_rates(task.rank, now)
        self._done(task, now)
        self._advance(task.rank, task.stream, now)

    def _done(self, task: Task, now: float) -> None:
        """Let go on who waited for it."""
        self.latest[task.rank][task.round] = max(
            self.latest[task.rank][task.round], now
        )
        if task.rank not in self.keep:  # what came before it is not asked for
            task.needs, task.starter = [], None
        for watcher in task.watchers:
            if isinstance(watcher, _Host):
                watcher.waits_for.remove(task)
                if not watcher.waits_for:
                    self._push(now, 0, watcher)
                continue
            stream = self.streams[watcher]
            if stream.queue and stream.free and task in stream.queue[0].needs:
                self._advance(*watcher, now)

    def _set_rates(self, rank: int, now: float) -> None:
        running = self.running[rank]
        kernels = sum(task.kind is Kind.COMPUTE for task in running)
        comms = [task for task in running if task.kind is Kind.COMM]
        for task in running:
            rate = 1.0
            if task.kind is Kind.COMPUTE:
                rate = 1 / kernels / (self.slowdown if comms else 1.0)
            elif task.kind is Kind.COMM:
                link = task.item.link
                rate = 1 / sum(each.item.link is link for each in comms)
            if rate == task.rate:
                continue
            task.left -= (now - task.since) * task.rate
            task.rate, task.since = rate, now
            task.version += 1
            self._push(now + max(task.left, 0.0) / rate, task.version, task)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Tasks are many, and all of them are kept: looking for garbage finds none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def simulate(
    programs: Sequence[Sequence[Item]],
    *,
    rounds: int = 3,
    slowdown: float = 1.0,
    ranks: Sequence[int] = (),
    of: int | None = None,
) -> Run:
    """Run the programs of some ranks, repeated, on one clock.

    Args:
        programs: Items of each rank.
        rounds: How often each program is repeated, so that the last one is in full swing.
        slowdown: Of computation while a collective runs.
        ranks: Global ranks of the programs, for those who meet; () for a single one.
        of: The program whose tasks are asked for, as those of many are large; None: all.
    """
    keep = range(len(programs)) if of is None else (of,)
    simulation = _Simulation(programs, rounds, slowdown, ranks, keep)
    with _without_collections():
        simulation.run()
    heads = (stream.queue[0] for stream in simulation.streams.values() if stream.queue)
    stuck = min(heads, key=lambda task: task.meeting is None, default=None)
    if stuck is not None or any(len(host.marks) < rounds for host in simulation.hosts):
        raise UsageError(_stuck(stuck))
    ends = [
        list(itertools.accumulate(map(max, host.marks, latest), max))
        for host, latest in zip(simulation.hosts, simulation.latest, strict=True)
    ]
    return Run(
        tasks=simulation.tasks,
        marks=[host.marks for host in simulation.hosts],
        ends=ends,
        host=[sum(item.host for item in items) for items in programs],
        events=[_event_times(host) for host in simulation.hosts],
    )


def _event_times(host: _Host) -> dict[int, float]:
    times = dict(host.recorded)
    for number, task in host.events.items():
        if task is not None:
            times[number] = max(times[number], task.end)
    return times


def _stuck(task: Task | None) -> str:
    event = None if task is None else task.item.event
    what = "the host"
    if isinstance(event, Comm):
        what = (
            f"{event.kind} of group {event.group} ({event.site.module or 'no module'})"
        )
    elif task is not None:
        what = f"a task of stream {task.stream}"
    return (
        f"The simulated ranks wait for ever: {what} is never joined by the others. "
        "Rehearse every rank that takes part, each with the same number of steps."
    )


def mark_places(events: Sequence[Event], kind: MarkKind) -> list[int]:
    """Where marks of a kind are."""
    return [
        place
        for place, event in enumerate(events)
        if isinstance(event, Mark) and event.kind is kind
    ]
