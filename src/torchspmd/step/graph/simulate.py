"""When each collective of a graph runs, what of it is not hidden, and why."""

import operator
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from torchspmd.comm import CommEvent
from torchspmd.errors import UsageError
from torchspmd.step.graph.aliases import is_wait
from torchspmd.step.graph.collectives import events_of
from torchspmd.step.graph.cost import CostModel, check_cost
from torchspmd.step.graph.metadata import output_values
from torchspmd.step.graph.options import check_graph, check_integers


@dataclass(frozen=True, slots=True)
class Exposure:
    """One collective on the timeline.

    Attributes:
        start: The node that starts it.
        event: What it communicates.
        seconds: How long it is on the wire.
        exposed_seconds: How long computation stands still for it.
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
        """How long computation stands still for communication."""
        return sum(each.exposed_seconds for each in self.exposures)

    @property
    def limit_seconds(self) -> float:
        """What no schedule can be faster than."""
        return max(self.compute_seconds, self.comm_seconds)


@dataclass(slots=True)
class _Flight:
    """A collective that was started and not waited for."""

    node: str
    event: CommEvent
    ready: float
    begin: float
    end: float


@dataclass(slots=True)
class _Clock:
    now: float = 0.0
    compute: float = 0.0
    free: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))


def simulate(graph: fx.Graph, cost: CostModel) -> Timeline:
    """Run a graph on paper: computation in order, one channel for each group."""
    check_graph("simulate", graph=graph)
    check_cost(cost, "simulate", also="")
    return _run(graph, cost, {})[0]


def simulate_steady(graph: fx.Graph, cost: CostModel, num_carried: int) -> Timeline:
    """The same for a graph that waits for collectives which the run before started.

    Args:
        graph: The steady form of a step with deferred work.
        cost: What nodes take.
        num_carried: How many of its last inputs are its own last outputs of before.
    """
    _check_steady(graph, cost, num_carried)
    carried = carried_values(graph, num_carried)
    flights: dict[fx.Node, _Flight] = {}
    timeline = None
    for _ in range(3):  # the state at the seam settles after one round
        timeline, left = _run(graph, cost, flights)
        flights = {place: left[node] for place, node in carried.items() if node in left}
    assert timeline is not None
    return timeline


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


def carried_values(graph: fx.Graph, count: int) -> dict[fx.Node, fx.Node]:
    """The input that brings each value which the graph leaves for the next run."""
    if count == 0:
        return {}
    (values,) = graph.output_node().args
    assert isinstance(values, (list, tuple))
    places = graph.find_nodes(op="placeholder")[-count:]
    return {
        place: value
        for place, value in zip(places, values[-count:], strict=True)
        if isinstance(value, fx.Node)
    }


def _run(
    graph: fx.Graph, cost: CostModel, brought: Mapping[fx.Node, _Flight]
) -> tuple[Timeline, dict[fx.Node, _Flight]]:
    clock = _Clock()
    events = dict(events_of(graph))
    flights = dict(brought)
    for flight in brought.values():
        group = flight.event.group.name
        clock.free[group] = max(clock.free[group], flight.end)
    exposures = []
    for node in graph.nodes:
        if node in events:
            flights[node] = _launch(node, events[node], cost, clock)
        elif is_wait(node):
            start = started_by(node)
            if start in flights:  # else another tensor of one that has ended
                exposures.append(_land(flights.pop(start), clock))
        else:
            seconds = cost.compute_seconds(node)
            clock.now += seconds
            clock.compute += seconds
    for flight in flights.values():  # as the next run will see them
        flight.ready, flight.begin, flight.end = (
            moment - clock.now for moment in (flight.ready, flight.begin, flight.end)
        )
    comm = max(clock.busy.values(), default=0.0)
    return Timeline(clock.now, clock.compute, comm, tuple(exposures)), flights


def started_by(wait: fx.Node) -> fx.Node:
    """The start that a wait is for, also of one tensor of a coalesced one."""
    source = wait.args[0]
    if isinstance(source, fx.Node) and source.target is operator.getitem:
        source = source.args[0]
    assert isinstance(source, fx.Node)
    return source


def _launch(node: fx.Node, event: CommEvent, cost: CostModel, clock: _Clock) -> _Flight:
    group = event.group.name
    seconds = cost.comm_seconds(event)
    begin = max(clock.now, clock.free[group])
    clock.free[group] = begin + seconds
    clock.busy[group] += seconds
    return _Flight(node.name, event, clock.now, begin, begin + seconds)


def _land(flight: _Flight, clock: _Clock) -> Exposure:
    exposed = max(0.0, flight.end - clock.now)
    reason = ""
    if exposed:
        reason = explain(flight.ready, flight.begin, clock.now, flight.end)
    clock.now += exposed
    seconds = flight.end - flight.begin
    return Exposure(flight.node, flight.event, seconds, exposed, reason)


def explain(ready: float, begin: float, now: float, end: float) -> str:
    """Why computation stands still for a collective; all in seconds.

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
