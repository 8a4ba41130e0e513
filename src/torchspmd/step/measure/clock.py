"""A graph that reads the clock around its collectives while it runs."""

import itertools
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import fx

from torchspmd.step.graph.collectives import events_of
from torchspmd.step.graph.simulate import find_awaited

# No more than this is what a wait itself takes, not what is waited for.
HIDDEN_SECONDS = 5e-5
_HIDDEN_PART = 0.01  # of the time since its start: the rest was computed in


@dataclass(frozen=True, slots=True)
class Clocked:
    """Where a graph reads the clock for one collective.

    Attributes:
        start: The node that starts it.
        group: Who takes part.
        begun: The mark after the start.
        waits: The marks before and after each wait for it; none where nothing waits.
        is_carried: Whether the run before started what this run waits for.
    """

    start: str
    group: str
    begun: int
    waits: tuple[tuple[int, int], ...]
    is_carried: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """What the clock said about one collective; in seconds, medians of all runs.

    Attributes:
        exposed: How long computation waited for it.
        distance: From its start to its first wait.
        queued: How long after its start an earlier one of its group was still waited for.
    """

    exposed: float
    distance: float
    queued: float

    @property
    def is_hidden(self) -> bool:
        """Whether computation went on as if it were not there.

        >>> Reading(exposed=0.002, distance=0.5, queued=0.0).is_hidden
        True
        >>> Reading(exposed=0.002, distance=0.02, queued=0.0).is_hidden
        False
        """
        return self.exposed <= max(HIDDEN_SECONDS, _HIDDEN_PART * self.distance)


@final
class Stopwatch:
    """Notes moments by number, run after run.

    On a CPU a moment is the host's time. On a GPU it is an event on the stream that
    computes: a stream that waits for a collective reaches the event behind the wait as
    soon as it may go on.

    Args:
        on_stream: Whether to note moments of the current CUDA stream.
    """

    def __init__(self, on_stream: bool) -> None:
        self._on_stream = on_stream
        self._runs: list[dict[int, Any]] = []

        def note(place: int) -> None:  # a plain function: generated code has its name
            self.mark(place)

        self._note = note

    def begin_run(self) -> None:
        """The marks that follow belong to a new run."""
        self._runs.append({})

    def mark(self, place: int) -> None:
        """Note the moment."""
        if self._on_stream:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._runs[-1][place] = event
        else:
            self._runs[-1][place] = time.perf_counter()

    def mark_before(self, node: fx.Node, place: int) -> None:
        """Have a graph note the moment before it runs a node."""
        with node.graph.inserting_before(node):
            node.graph.call_function(self._note, (place,))

    def mark_after(self, node: fx.Node, place: int) -> None:
        """Have a graph note the moment after it has run a node."""
        with node.graph.inserting_after(node):
            node.graph.call_function(self._note, (place,))

    def read(self) -> list[dict[int, float]]:
        """The moments of each run, in seconds; waits for the GPU once."""
        if not self._on_stream or not self._runs:
            return self._runs
        torch.cuda.synchronize()
        origin = next(iter(self._runs[0].values()))
        return [
            {place: origin.elapsed_time(event) / 1e3 for place, event in run.items()}
            for run in self._runs
        ]


def add_clock(
    graph: fx.Graph, watch: Stopwatch, first_mark: int, num_carried: int = 0
) -> list[Clocked]:
    """Read the clock behind each start and around each wait of a graph.

    Args:
        graph: The graph to edit.
        watch: Notes a number whenever the graph passes a place.
        first_mark: The first of these numbers.
        num_carried: How many of the last inputs are the last outputs of the run before.
    """
    found = list(events_of(graph))
    waits: dict[fx.Node, list[tuple[fx.Node, bool]]] = {start: [] for start, _ in found}
    for wait, (start, is_carried) in find_awaited(graph, num_carried).items():
        if start in waits:
            waits[start].append((wait, is_carried))
    numbers = itertools.count(first_mark)
    clocked = []
    for start, event in found:
        begun = next(numbers)
        watch.mark_after(start, begun)
        pairs = []
        for wait, _ in waits[start]:
            before, after = next(numbers), next(numbers)
            watch.mark_before(wait, before)
            watch.mark_after(wait, after)
            pairs.append((before, after))
        is_carried = any(brought for _, brought in waits[start])
        name = event.group.name
        clocked.append(Clocked(start.name, name, begun, tuple(pairs), is_carried))
    return clocked


def read_runs(
    collectives: Sequence[Clocked], runs: Sequence[Mapping[int, float]], warm: int
) -> dict[str, Reading]:
    """What each collective that is waited for took, by its start.

    Args:
        collectives: Where the clock was read.
        runs: What it said, run after run.
        warm: How many of the first runs do not count.
    """
    waited = [each for each in collectives if each.waits]
    flights: list[list[_Flight]] = [
        [_flight(each, runs, number) for each in waited] if number else []
        for number in range(len(runs))
    ]
    readings: dict[str, list[Reading]] = {each.start: [] for each in waited}
    for number in range(max(1, warm), len(runs)):
        near = [*flights[number - 1], *flights[number]]
        for flight in flights[number]:
            queued = _queued(flight, near)
            distance = flight.needed - flight.begun
            readings[flight.start].append(Reading(flight.exposed, distance, queued))
    return {name: _median(several) for name, several in readings.items()}


@dataclass(frozen=True, slots=True)
class _Flight:
    """One collective in one run."""

    start: str
    group: str
    begun: float
    needed: float
    end: float
    exposed: float


def _flight(each: Clocked, runs: Sequence[Mapping[int, float]], number: int) -> _Flight:
    moments = runs[number]
    begun = runs[number - 1 if each.is_carried else number][each.begun]
    spans = [(moments[before], moments[after]) for before, after in each.waits]
    exposed = sum(after - before for before, after in spans)
    return _Flight(
        each.start, each.group, begun, spans[0][0], spans[-1][1], max(0.0, exposed)
    )


def _queued(flight: _Flight, others: Iterable[_Flight]) -> float:
    """Until when an earlier one was surely under way: one that was itself waited for."""
    ends = [
        other.end
        for other in others
        if other.group == flight.group
        and other.begun < flight.begun < other.end <= flight.end
        and other.start != flight.start
        and other.exposed > HIDDEN_SECONDS
    ]
    return max(ends) - flight.begun if ends else 0.0


def _median(several: Sequence[Reading]) -> Reading:
    return Reading(
        statistics.median(each.exposed for each in several),
        statistics.median(each.distance for each in several),
        statistics.median(each.queued for each in several),
    )
