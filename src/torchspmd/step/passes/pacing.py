"""When gradients are computed and reductions start, if updates wait for the next step.

The gradient that the next forward needs first is ready last: nothing hides its reduction.
Gradients of weights that are needed late can be computed behind it, because nothing else in
backward reads them: the reduction then overlaps with computation again. And a part of a
gradient whose other parts are known much later, as where an embedding and a head share a
weight, can wait for those: other reductions start earlier. What is done, and when each
reduction starts, is chosen by simulating the iteration, with all that shares the network.
"""

import bisect
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from torchspmd import _torch
from torchspmd.comm import Phase
from torchspmd.step.graph.aliases import find_waits, is_wait
from torchspmd.step.graph.collectives import events_of, is_communication
from torchspmd.step.graph.cost import CostModel
from torchspmd.step.graph.metadata import owner_of
from torchspmd.step.graph.simulate import Do, Work, run_schedule, schedule_of

# The part of a reduction's estimated time after which the next one starts. Where estimates
# are too long, less than all of it keeps the network busy; where they are right, all of it
# leaves room for what becomes ready meanwhile and is more urgent.
_HASTE = (0.8, 1.0)
# How much longer than measured a reduction may take: not at all, or as beside work that
# wants the same cores and memory. The order that is chosen must do well in both cases.
_SLOWDOWNS = (1.0, 1.3)
_APART = (1, 2, 3)
_MOST_TRIES = 24
_WORTH = 0.99  # of the time before: a simulation cannot tell a smaller gain


@dataclass(frozen=True, slots=True)
class Reduction:
    """One reduction whose update waits for the next iteration.

    Attributes:
        start: The node that starts it.
        place: Where the next iteration first needs the update.
        group: The process group that it runs on.
        seconds: How long it takes.
        update_seconds: How long the update takes, or this reduction's share of it.
        update: The name of the update: one that several share waits for all of them.
    """

    start: fx.Node
    place: fx.Node
    group: str
    seconds: float
    update_seconds: float
    update: str


@dataclass(frozen=True, slots=True)
class Ordering:
    """One order of an iteration's nodes.

    Attributes:
        order: The nodes, starts of reductions included.
        seconds: How long an iteration takes in the steady state, simulated: the mean of a
            network as fast as the cost model says and a slower one.
        places: Where the next iteration makes each update, in the order of the updates.
        delayed: The reductions whose gradients are computed last.
        num_sunk: Parts of other gradients that are computed when the rest is known.
    """

    order: tuple[fx.Node, ...]
    seconds: float
    places: Mapping[Reduction, fx.Node]
    delayed: tuple[Reduction, ...] = ()
    num_sunk: int = 0

    @property
    def is_default(self) -> bool:
        """Whether everything is computed where backward has it."""
        return not self.delayed and not self.num_sunk


def orderings(
    nodes: Sequence[fx.Node],
    reductions: Sequence[Reduction],
    cost: CostModel,
    *,
    may_delay: bool,
    seconds: Mapping[fx.Node, float] | None = None,
) -> list[Ordering]:
    """Orderings worth taking, the fastest first; the last one delays no gradient.

    Args:
        nodes: The iteration, without what is left for the next.
        reductions: What is left for it, the most urgent first.
        cost: How long nodes take.
        may_delay: Whether gradients may be computed later than they could be.
        seconds: What nodes compute by that cost, where it is known already.
    """
    plan = _Plan(nodes, reductions, cost, seconds)
    default = plan.ordering()
    if not may_delay:
        return [default]
    chains = gradient_chains(nodes, reductions)
    able = [reduction for reduction in reversed(reductions) if chains[reduction]]
    found = [
        plan.ordering(delayed, chains, sink=sink, haste=haste)
        for delayed in _choices(able)
        for sink in (False, True)
        for haste in _HASTE
    ]
    better = [
        ordering for ordering in found if ordering.seconds < default.seconds * _WORTH
    ]
    return [*sorted(better, key=_least_change), default]


def _choices(able: Sequence[Reduction]) -> list[Sequence[Reduction]]:
    """Which gradients to delay: none, or some of those that are needed last.

    Delaying every second or third one leaves something to reduce while backward computes
    the last layers.

    >>> [list(each) for each in _choices("abc")]
    [[], ['a'], ['a', 'b'], ['a', 'b', 'c'], ['a', 'c']]
    """
    choices: list[Sequence[Reduction]] = [()]
    for apart in _APART:
        spread = able[::apart]
        step = -(-len(spread) * apart // _MOST_TRIES) or 1
        least = 1 if apart == 1 else 2
        choices += [spread[:n] for n in range(least, len(spread) + 1, step)]
    return choices


def _least_change(ordering: Ordering) -> tuple[float, int, int]:
    return ordering.seconds, len(ordering.delayed), ordering.num_sunk


def estimate(graph: fx.Graph, cost: CostModel) -> float:
    """How long a graph takes that leaves nothing for later, as ``Ordering.seconds``."""
    return _mean_seconds(schedule_of(graph, cost))


def estimate_ordering(
    ordering: Ordering, reductions: Sequence[Reduction], cost: CostModel
) -> float:
    """How long an iteration takes in an order that was chosen by another cost.

    Args:
        ordering: The order, and where updates are made.
        reductions: The same as in it, as long as they take by this cost.
        cost: How long nodes take.
    """
    here = {each.start: each for each in reductions}
    places = {here[each.start]: place for each, place in ordering.places.items()}
    return _Plan(ordering.order, reductions, cost).estimate(ordering.order, places)


def _mean_seconds(work: Sequence[Work]) -> float:
    found = [run_schedule(work, slowdown=each).seconds for each in _SLOWDOWNS]
    return sum(found) / len(found)


def update_places(
    order: Sequence[fx.Node], reductions: Sequence[Reduction]
) -> dict[Reduction, fx.Node]:
    """Where updates can be made at the earliest without waiting longer, in order.

    That is where the result is first needed; or where a later reduction of the group is
    waited for: then this one has ended, and its update hides a part of the other.
    """
    position = {node: place for place, node in enumerate(order)}
    started = {each.start: each for each in reductions}
    earliest: dict[str, fx.Node] = {}
    places: dict[Reduction, fx.Node] = {}
    for node in reversed(order):
        if (reduction := started.get(node)) is not None:
            options = [reduction.place, earliest.get(reduction.group, reduction.place)]
            place = min(options, key=lambda each: position.get(each, len(order)))
            earliest[reduction.group] = places[reduction] = place
    return dict(reversed(places.items()))


def updates_at(
    order: Sequence[fx.Node], places: Mapping[Reduction, fx.Node]
) -> list[tuple[fx.Node, list[Reduction]]]:
    """Where each update is made, in the order of the updates, and what it waits for.

    One that needs several reductions is made where the last of them may be waited for.
    """
    members: dict[str, list[Reduction]] = {}
    for reduction in places:
        members[reduction.update] = [*members.pop(reduction.update, []), reduction]
    position: dict[fx.Node, int] = {}
    if len(members) < len(places):
        position = {node: place for place, node in enumerate(order)}
    return [
        (
            max((places[x] for x in each), key=lambda n: position.get(n, len(order))),
            each,
        )
        for each in members.values()
    ]


def gradient_chains(
    nodes: Sequence[fx.Node], reductions: Sequence[Reduction]
) -> dict[Reduction, list[fx.Node]]:
    """For each reduction the nodes of backward that nothing else needs, in order."""
    owner: dict[fx.Node, Reduction] = {each.start: each for each in reductions}
    chains: dict[Reduction, list[fx.Node]] = {each: [] for each in reductions}
    for node in reversed(nodes):
        if node in owner or not node.users or not _may_move(node):
            continue
        wanted = {owner.get(user) for user in node.users}
        if len(wanted) == 1 and (reduction := wanted.pop()) is not None:
            owner[node] = reduction
            chains[reduction].insert(0, node)
    return chains


def _may_move(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and owner_of(node).phase is Phase.BACKWARD
        and not is_wait(node)
        and not is_communication(node)
        and not _torch.draws_random_numbers(node.target, node.args, node.kwargs)
    )


class _Plan:
    """One iteration, to be ordered in several ways."""

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        reductions: Sequence[Reduction],
        cost: CostModel,
        seconds: Mapping[fx.Node, float] | None = None,
    ) -> None:
        self._nodes, self._reductions = nodes, reductions
        self._rank = {each.start: place for place, each in enumerate(reductions)}
        self._seconds = seconds or {node: cost.compute_seconds(node) for node in nodes}
        self._events: dict[fx.Node, Work] = {  # all but computation
            **_other_communication(nodes, cost),
            **{
                each.start: Work(Do.START, each.seconds, each.start, each.group)
                for each in reductions
            },
        }

    def ordering(
        self,
        delayed: Sequence[Reduction] = (),
        chains: Mapping[Reduction, Sequence[fx.Node]] | None = None,
        *,
        sink: bool = False,
        haste: float = _HASTE[0],
    ) -> Ordering:
        """The order in which the gradients of some reductions are computed last."""
        body, sunk = list(self._nodes), 0
        if chains is not None and delayed:
            behind = sorted(delayed, key=lambda each: self._rank[each.start])
            late = [node for each in behind for node in (*chains[each], each.start)]
            taken = set(late)
            body = [node for node in body if node not in taken] + late
        if chains is not None and sink:
            parts = [n for each in chains if each not in delayed for n in chains[each]]
            body, sunk = self._sunk(body, parts)
        order = self._start(body, haste)
        places = {each: each.place for each in self._reductions}
        early = update_places(order, self._reductions)
        brief = self._summarize(order, {*places.values(), *early.values()})
        seconds = self._estimate(*brief, places)
        sooner = self._estimate(*brief, early)
        if sooner < seconds * _WORTH:
            seconds, places = sooner, early
        return Ordering(tuple(order), seconds, places, tuple(delayed), sunk)

    def _sunk(
        self, body: list[fx.Node], parts: Iterable[fx.Node]
    ) -> tuple[list[fx.Node], int]:
        """Move nodes right before their first reader, if that lets others start."""
        position = {node: place for place, node in enumerate(body)}
        starts = [position[node] for node in body if node in self._rank]
        moved: dict[fx.Node, fx.Node] = {}  # before which node
        for node in sorted(parts, key=position.__getitem__, reverse=True):
            readers = [moved.get(user, user) for user in node.users]
            first = min(readers, key=position.__getitem__)
            after = bisect.bisect(starts, position[node])
            if after < len(starts) and starts[after] < position[first]:
                moved[node] = first
        order: list[fx.Node] = []
        waiting: dict[fx.Node, list[fx.Node]] = {}
        for node in body:
            if node in moved:
                waiting.setdefault(moved[node], []).append(node)
            else:
                order += (*waiting.get(node, ()), node)
        return order, len(moved)

    def _start(self, body: Iterable[fx.Node], haste: float) -> list[fx.Node]:
        """Whenever a group is free, start the most urgent of its ready reductions."""
        order: list[fx.Node] = []
        ready: list[int] = []  # places among the reductions
        free: dict[str, float] = {}
        ends: dict[Hashable, float] = {}
        now, next_free = 0.0, 0.0
        for node in body:
            if node in self._rank:
                bisect.insort(ready, self._rank[node])
                next_free = 0.0
                continue
            if ready and next_free <= now:
                for place in self._free_for(ready, free, now):
                    ready.remove(place)
                    reduction = self._reductions[place]
                    free[reduction.group] = now + reduction.seconds * haste
                    order.append(reduction.start)
                groups = {self._reductions[place].group for place in ready}
                next_free = min((free.get(each, 0.0) for each in groups), default=0.0)
            order.append(node)
            if node not in self._events:
                now += self._seconds[node]
                continue
            do, seconds, start, group = self._events[node]
            if do is Do.START:
                ends[start] = free[group] = max(now, free.get(group, 0.0)) + seconds
            elif do is Do.WAIT:
                now = max(now, ends.get(start, 0.0))
        return order + [self._reductions[place].start for place in ready]

    def _free_for(
        self, ready: Sequence[int], free: Mapping[str, float], now: float
    ) -> list[int]:
        """The most urgent reduction for each group that is free."""
        chosen: dict[str, int] = {}
        for place in ready:
            group = self._reductions[place].group
            if free.get(group, 0.0) <= now:
                chosen.setdefault(group, place)
        return list(chosen.values())

    def estimate(
        self, order: Iterable[fx.Node], places: Mapping[Reduction, fx.Node]
    ) -> float:
        """How long an iteration takes in this order, with updates in these places."""
        return self._estimate(*self._summarize(order, set(places.values())), places)

    def _summarize(
        self, order: Iterable[fx.Node], places: Container[fx.Node]
    ) -> tuple[list[tuple[float, fx.Node]], float]:
        """Communication and places of updates, with what is computed before each.

        And what is computed behind the last. All ways to make the updates share this.
        """
        brief: list[tuple[float, fx.Node]] = []
        computing = 0.0
        for node in order:
            is_event = node in self._events
            if is_event or node in places:
                brief.append((computing, node))
                computing = 0.0
            if not is_event:
                computing += self._seconds[node]
        return brief, computing

    def _estimate(
        self,
        brief: Sequence[tuple[float, fx.Node]],
        rest: float,
        places: Mapping[Reduction, fx.Node],
    ) -> float:
        """How long an iteration takes once the one before left it the same work."""
        due: dict[fx.Node, list[Work]] = {}
        order = [node for _, node in brief]
        for place, members in updates_at(order, places):
            waits = [Work(Do.WAIT_CARRIED, start=each.start) for each in members]
            seconds = sum(each.update_seconds for each in members)
            due.setdefault(place, []).extend([*waits, Work(Do.COMPUTE, seconds)])
        work: list[Work] = []
        computing = 0.0
        for before, node in brief:
            computing += before
            own = [self._events[node]] if node in self._events else []
            for each in (*due.get(node, ()), *own):
                if each.do is Do.COMPUTE:
                    computing += each.seconds
                    continue
                if computing:
                    work.append(Work(Do.COMPUTE, computing))
                    computing = 0.0
                work.append(each)
        return _mean_seconds([*work, Work(Do.COMPUTE, computing + rest)])


def _other_communication(
    nodes: Sequence[fx.Node], cost: CostModel
) -> dict[fx.Node, Work]:
    """What else is on the wire: gathers of sharded parameters, sums of activations."""
    if not nodes:
        return {}
    inside = set(nodes)
    found: dict[fx.Node, Work] = {}
    for start, event in events_of(nodes[0].graph):
        if start in inside:
            group = event.group.name
            found[start] = Work(Do.START, cost.comm_seconds(event), start, group)
            waits = inside.intersection(find_waits(start))
            found |= {wait: Work(Do.WAIT, start=start) for wait in waits}
    return found
