"""Simulate an iteration: when each collective runs, what of it is exposed, and why.

A schedule is a plain list of work, in order: computation, starts of collectives, and waits.
Computation runs in order; each process group is one wire, which carries one collective
after the other.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Any, NamedTuple

from torch import fx

from torchspmd.comm import CommEvent
from torchspmd.errors import UsageError
from torchspmd.step.graph.aliases import is_wait, started_by, without_item
from torchspmd.step.graph.argument_checks import check_graph, check_integers
from torchspmd.step.graph.collectives import events_of
from torchspmd.step.graph.cost import CostModel, check_cost
from torchspmd.step.graph.metadata import output_values


@dataclass(frozen=True, slots=True)
class Exposure:
    """One collective on the timeline.

    Attributes:
        start: The node that starts it.
        event: What it communicates.
        seconds: How long it is on the wire.
        exposed_seconds: How long computation waits for it.
        reason: Why that is so; empty when it is hidden.
    """

    start: str
    event: CommEvent
    seconds: float
    exposed_seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """An estimated run of one iteration.

    Attributes:
        step_seconds: How long it takes.
        compute_seconds: How long it would take without communication.
        comm_seconds: How long the busiest group is on the wire.
        exposures: Every collective, in the order in which they are waited for.
    """

    step_seconds: float
    compute_seconds: float
    comm_seconds: float
    exposures: tuple[Exposure, ...]

    @property
    def exposed_seconds(self) -> float:
        """How long computation waits for communication."""
        return sum(each.exposed_seconds for each in self.exposures)


_MOST_ROUNDS = 50  # most schedules settle after two or three


class Do(Enum):
    """What an item of a schedule does."""

    COMPUTE = "compute"
    START = "start a collective"
    WAIT = "wait for a collective of this iteration"
    WAIT_CARRIED = "wait for one that the iteration before started"


class Work(NamedTuple):
    """One item of a schedule.

    Attributes:
        do: What is done.
        seconds: Of computation, or of a collective on the wire.
        start: Which collective is started or waited for: the node that starts it, where
            the schedule is that of a graph.
        group: The process group of a start.
    """

    do: Do
    seconds: float = 0.0
    start: Hashable = None
    group: str = ""


class Flight(NamedTuple):
    """A collective: when it was started, on the wire, needed, and done; in seconds."""

    ready: float
    begin: float
    end: float
    needed: float = 0.0


class Simulated(NamedTuple):
    """A simulated iteration.

    Attributes:
        seconds: How long it takes.
        busy: How long each group is on the wire.
        flights: The collectives that were waited for, in order.
    """

    seconds: float
    busy: dict[str, float]
    flights: list[tuple[Hashable, Flight]]


def run_schedule(work: Sequence[Work], *, slowdown: float = 1.0) -> Simulated:
    """Simulate an iteration that comes after others like it.

    Args:
        work: What an iteration does.
        slowdown: How much longer than given every collective is on the wire.
    """
    free: dict[str, float] = {}  # when the wire of a group is free
    carried: dict[Hashable, Flight] = {}
    for _ in range(_MOST_ROUNDS):  # until an iteration leaves what it found
        found, now = _left(carried, free), 0.0
        started: dict[Hashable, Flight] = {}
        busy: dict[str, float] = {}
        flights = []
        for do, seconds, start, group in work:
            if do is Do.COMPUTE:
                now += seconds
            elif do is Do.START:
                begin = max(now, free.get(group, 0.0))
                free[group] = end = begin + seconds * slowdown
                busy[group] = busy.get(group, 0.0) + seconds * slowdown
                started[start] = Flight(now, begin, end)
            else:
                flight = (carried if do is Do.WAIT_CARRIED else started).pop(
                    start, None
                )
                if flight is not None:  # else another tensor of one that has ended
                    flights.append((start, flight._replace(needed=now)))
                    now = max(now, flight.end)
        free = {group: end - now for group, end in free.items() if end > now}
        carried = {
            start: Flight(*(moment - now for moment in flight))
            for start, flight in started.items()
        }
        if _left(carried, free) == found:
            break
    return Simulated(now, busy, flights)


def _left(carried: Mapping[Any, Flight], free: Mapping[str, float]) -> object:
    """What an iteration leaves for the next, to a billionth of a second."""
    ends = {start: round(flight.end, 9) for start, flight in carried.items()}
    return ends, {group: round(end, 9) for group, end in free.items()}


def schedule_of(graph: fx.Graph, cost: CostModel, num_carried: int = 0) -> list[Work]:
    """What a graph does, in order.

    Args:
        graph: The graph.
        cost: What nodes take.
        num_carried: How many of its last inputs are its own last outputs of before.
    """
    events, waits = dict(events_of(graph)), find_awaited(graph, num_carried)
    work = []
    for node in graph.nodes:
        if node in events:
            event = events[node]
            seconds = cost.comm_seconds(event)
            work.append(Work(Do.START, seconds, node, event.group.name))
        elif node in waits:
            start, is_carried = waits[node]
            work.append(Work(Do.WAIT_CARRIED if is_carried else Do.WAIT, start=start))
        elif seconds := cost.compute_seconds(node):
            work.append(Work(Do.COMPUTE, seconds))
    return work


def begin_seconds(graph: fx.Graph, cost: CostModel) -> dict[fx.Node, float]:
    """When each node begins, if computation waits for nothing."""
    seconds = map(cost.compute_seconds, graph.nodes)
    return dict(zip(graph.nodes, accumulate(seconds, initial=0.0), strict=False))


def simulate(graph: fx.Graph, cost: CostModel) -> Timeline:
    """Simulate a graph: computation in order, one wire for each group."""
    check_graph("simulate", graph=graph)
    check_cost(cost, "simulate", also="")
    return _timeline(graph, cost, 0)


def simulate_steady(graph: fx.Graph, cost: CostModel, num_carried: int) -> Timeline:
    """The same for a graph that waits for collectives which the run before started.

    Args:
        graph: The steady form of a step with deferred work.
        cost: What nodes take.
        num_carried: How many of its last inputs are its own last outputs of before.
    """
    _check_steady(graph, cost, num_carried)
    return _timeline(graph, cost, num_carried)


def _timeline(graph: fx.Graph, cost: CostModel, num_carried: int) -> Timeline:
    work = schedule_of(graph, cost, num_carried)
    simulated, events = run_schedule(work), dict(events_of(graph))
    compute = sum(each.seconds for each in work if each.do is Do.COMPUTE)
    comm = max(simulated.busy.values(), default=0.0)
    exposures = tuple(
        _exposure(start.name, events[start], flight)
        for start, flight in simulated.flights
        if isinstance(start, fx.Node)
    )
    return Timeline(simulated.seconds, compute, comm, exposures)


def _exposure(start: str, event: CommEvent, flight: Flight) -> Exposure:
    exposed = max(0.0, flight.end - flight.needed)
    reason = ""
    if exposed:
        reason = explain(flight.ready, flight.begin, flight.needed, flight.end)
    return Exposure(start, event, flight.end - flight.begin, exposed, reason)


def _check_steady(graph: fx.Graph, cost: CostModel, num_carried: int) -> None:
    what = "simulate_steady"
    check_graph(what, graph=graph)
    check_cost(cost, what, also="")
    check_integers(what, num_carried=(num_carried, 0))
    inputs, outputs = len(graph.find_nodes(op="placeholder")), len(output_values(graph))
    if num_carried > min(inputs, outputs):
        raise UsageError(
            f"{what}(num_carried={num_carried}): the graph has {inputs} inputs and "
            f"{outputs} outputs. Give how many of the last are its own of the run before."
        )


def _carried_values(graph: fx.Graph, count: int) -> dict[fx.Node, fx.Node]:
    """The value that the run before left for each of the last inputs."""
    if count == 0:
        return {}
    places = graph.find_nodes(op="placeholder")[-count:]
    return {
        place: value
        for place, value in zip(places, output_values(graph)[-count:], strict=True)
        if isinstance(value, fx.Node)
    }


def find_awaited(
    graph: fx.Graph, num_carried: int
) -> dict[fx.Node, tuple[fx.Node, bool]]:
    """The start that each wait is for, and whether the run before started it."""
    carried = _carried_values(graph, num_carried)
    found = {}
    for wait in filter(is_wait, graph.nodes):
        source = started_by(wait)
        is_carried = source in carried
        found[wait] = (
            without_item(carried[source]) if is_carried else source,
            is_carried,
        )
    return found


def left_under_way(graph: fx.Graph, num_carried: int) -> list[int]:
    """Which of the last outputs are results that only the next run waits for."""
    starts = {start for start, _ in events_of(graph)}
    carried = _carried_values(graph, num_carried)
    inputs = graph.find_nodes(op="placeholder")
    return [
        place
        for place, node in enumerate(inputs[len(inputs) - num_carried :])
        if node in carried and without_item(carried[node]) in starts
    ]


def explain(ready: float, begin: float, now: float, end: float) -> str:
    """Why computation waits for a collective; all in seconds.

    Args:
        ready: When it was started.
        begin: When it was alone on the wire.
        now: When its result is needed.
        end: When it is there, after ``now``.

    Example:
        >>> explain(ready=0.0, begin=0.0, now=0.002, end=0.010)
        'only 2.00 ms of computation stand between start and use'
        >>> explain(ready=0.0, begin=0.004, now=0.002, end=0.010)
        'waits 4.00 ms for earlier collectives of its group'
    """
    if begin > ready:
        queued = begin - ready
        return f"waits {queued * 1e3:.2f} ms for earlier collectives of its group"
    hidden = now - begin
    if hidden <= 0.05 * (end - begin):
        return "its result is needed right after it starts"
    return f"only {hidden * 1e3:.2f} ms of computation stand between start and use"
