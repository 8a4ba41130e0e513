"""Collectives that start as early and are waited for as late as possible."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from torchspmd.comm import format_bytes
from torchspmd.errors import UsageError
from torchspmd.step.graph.argument_checks import check_budget, is_size, is_whole
from torchspmd.step.graph.collectives import (
    CommBlock,
    after_start,
    earliest_place,
    events_of,
    get_all_comm_blocks,
    hoist,
    latest_place,
    remember,
    sink,
    writes_in_place,
)
from torchspmd.step.graph.cost import CostModel, check_cost
from torchspmd.step.graph.memory import LiveBytes, held_until_wait, value_bytes
from torchspmd.step.graph.nodes import HasGraph
from torchspmd.step.graph.reports import ORDERS, Outcome
from torchspmd.step.graph.simulate import Do, Work, begin_seconds, run_schedule
from torchspmd.step.passes.bucket import comm_fusion_with_concat, find_followers
from torchspmd.step.passes.embedding_rows import gather_embedding_gradients
from torchspmd.step.passes.runner import graph_optimization_pass


class MemoryBudget:
    """How much memory a graph's values may take at once, while collectives move.

    Args:
        gm: The graph.
        rise_mb: MiB above the graph's peak as it is now, or None for no limit.
        what: The pass, for the message on a wrong value.
        with_updates: As for ``LiveBytes``.
    """

    def __init__(
        self,
        gm: HasGraph,
        rise_mb: float | None,
        what: str,
        *,
        with_updates: bool = True,
    ) -> None:
        self._most: int | None = None
        if rise_mb is None:
            return
        check_budget(rise_mb, what, "or None for no limit")
        self._memory = LiveBytes(gm.graph, with_updates=with_updates)
        self._live = self._memory.now()
        self._most = max(self._live.values(), default=0) + int(rise_mb * 2**20)

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit."""
        return self._most is not None

    def hoist(self, block: CommBlock, place: fx.Node) -> bool:
        """Start a block behind a node; False, and nothing moves, if it costs too much."""
        restore = remember((*block.head, block.start))
        hoist(block, place)
        return self._keep(restore)

    def sink(self, block: CommBlock, place: fx.Node) -> bool:
        """Await a block before a node; False, and nothing moves, if it costs too much."""
        restore = remember(sorted(after_start(block)))
        sink(block, place)
        return self._keep(restore)

    def _keep(self, restore: Callable[[], None]) -> bool:
        if self._most is None:
            return True
        live = self._memory.now()
        if max(live.values()) <= self._most:
            self._live = live
            return True
        restore()
        return False

    def earliest(self, block: CommBlock, place: fx.Node) -> fx.Node:
        """The first node from ``place`` on behind which a start seems to be affordable."""
        if self._most is None:
            return place
        size = _bytes_of_start(block)
        node = block.start.prev
        while place < node and self._live[node] + size <= self._most:
            node = node.prev
        return node

    def latest(self, block: CommBlock, place: fx.Node) -> fx.Node:
        """The last node up to ``place`` before which a wait seems to be affordable."""
        size = sum(
            value_bytes(node.meta.get("val")) for node in held_until_wait(block.start)
        )
        if self._most is None or not size:
            return place
        own = set(block.tail)
        node = max(block.waits).next
        while node in own or (node < place and self._live[node] + size <= self._most):
            node = node.next
        return node


def _bytes_of_start(block: CommBlock) -> int:
    """What is alive from a start on: its result, and a packed or cast input."""
    packed = [node for node in block.head if node in block.inputs]
    made = (*packed, block.start)
    return sum(value_bytes(node.meta.get("val")) for node in made)


@graph_optimization_pass(
    prerequisites=[],
    apply_after=[comm_fusion_with_concat, gather_embedding_gradients],
    undoes_others=False,
)
def schedule_comm_wait(
    gm: HasGraph, *, memory_budget_mb: float | None = None
) -> Outcome:
    """Start each collective behind its last input, wait for it before its first reader.

    Only collectives move, with the views, casts and scalings that belong to them; all
    other nodes keep their order, and so do the starts on one group.

    Args:
        gm: The graph module to edit.
        memory_budget_mb: MiB by which moving may raise the peak of the memory that the
            graph's values take. None for no limit; then all-gathers of the step's inputs
            stay where they start, since all of them could start at once:
            ``prefetch_gathers`` is for those.

    Example:
        >>> import torch
        >>> from torchspmd.step import compile
        >>> from torchspmd.testing import fake_mesh
        >>> def transformation(gm):
        ...     report = schedule_comm_wait(gm)
        ...     print(report.outcome.changed, "of", report.outcome.matched)
        ...     return gm
        >>> def step(model, batch):
        ...     model(batch).square().sum().backward()
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        >>> with fake_mesh(4, ("dp",)):
        ...     train = compile(gm_transformation=transformation)(step)
        ...     train(model, torch.ones(2, 8))
        2 of 4
    """
    blocks = get_all_comm_blocks(gm)
    if (writer := writes_in_place(gm.graph)) is not None:
        reason = f"{writer.name} writes in place: schedule before new values do"
        return Outcome(len(blocks), 0, (reason,))
    budget = MemoryBudget(gm, memory_budget_mb, "schedule_comm_wait")
    schedule = _Schedule(budget)
    schedule.refused += [block.problem for block in blocks if block.problem]
    before = _places(gm.graph, blocks)
    for block in blocks:
        schedule.start_early(block)
    _let_leaders_end(blocks)
    for block in blocks:
        if not block.problem:
            schedule.wait_late(block)
    moved = _moves(blocks, before, _places(gm.graph, blocks))
    return Outcome(len(blocks), len(moved), schedule.reasons(), tuple(moved), ORDERS)


def _let_leaders_end(blocks: Sequence[CommBlock]) -> None:
    """Start what reduces a scattered bucket once more when the next one is scattered.

    Right behind its own scatter, computation would wait for that.
    """
    followers = find_followers(blocks)
    for place, block in enumerate(blocks):
        follower = followers.get(block.start)
        later = [each for each in blocks[place + 1 :] if each.start in followers]
        if follower is None or not later:
            continue
        target = (*later[0].head, later[0].start)[0]
        if target < latest_place(follower):
            for node in (*after_start(block), *follower.head, follower.start):
                if node < target:
                    target.prepend(node)


@dataclass(slots=True)
class _Schedule:
    """Moves blocks one after the other, and says what held them back."""

    budget: MemoryBudget
    refused: list[str] = field(default_factory=list)
    gathers: list[str] = field(default_factory=list)
    before: dict[str, fx.Node] = field(default_factory=dict)  # by group, the last start

    def start_early(self, block: CommBlock) -> None:
        """Move a start up to its last input."""
        previous = self.before.get(block.group.name)
        self.before[block.group.name] = block.start
        if block.problem or self._is_gather_of_inputs(block):
            return
        wanted = earliest_place(block, previous)
        place = self.budget.earliest(block, wanted)
        moved = self.budget.hoist(block, place)
        if not moved or place is not wanted:
            self.refused.append(
                f"{block.start.name}: does not start behind {wanted.name}: the memory "
                "budget is used up"
            )

    def _is_gather_of_inputs(self, block: CommBlock) -> bool:
        if self.budget.is_limited or not block.gathers_inputs():
            return False
        self.gathers.append(block.start.name)
        return True

    def reasons(self) -> tuple[str, ...]:
        """What held blocks back, a line each."""
        if not self.gathers:
            return tuple(self.refused)
        rest = f" and {len(self.gathers) - 1} more" if len(self.gathers) > 1 else ""
        told = (
            f"{self.gathers[0]}{rest}: they gather inputs and could all start at once"
        )
        return (*self.refused, f"{told}; use prefetch_gathers, or a memory_budget_mb")

    def wait_late(self, block: CommBlock) -> None:
        """Move a wait down to its first reader."""
        wanted = latest_place(block)
        place = self.budget.latest(block, wanted)
        moved = self.budget.sink(block, place)
        if not moved or place is not wanted:
            self.refused.append(
                f"{block.start.name}: is not waited for before {wanted.name}, but earlier: "
                "the memory budget is used up"
            )


def _places(graph: fx.Graph, blocks: list[CommBlock]) -> dict[fx.Node, int]:
    """How many nodes of the computation come before each start and wait."""
    moving = {node for block in blocks for node in block.nodes}
    places: dict[fx.Node, int] = {}
    count = 0
    for node in graph.nodes:
        count += node not in moving
        places[node] = count
    return places


def _moves(
    blocks: list[CommBlock], before: dict[fx.Node, int], after: dict[fx.Node, int]
) -> list[str]:
    """A line for each block that moved over some of the computation."""
    lines = []
    for block in blocks:
        earlier = before[block.start] - after[block.start]
        later = max((after[wait] - before[wait] for wait in block.waits), default=0)
        parts = [f"starts {earlier} nodes earlier"] if earlier else []
        parts += [f"waits {later} nodes later"] if later else []
        if parts:
            lines.append(f"{block.start.name}: {', '.join(parts)}")
    return lines


# ----------------------------------------------------------------------------
# Gathers of sharded parameters that start before the layer in front of them computes.


# Parameters of the next layer overtake gradients of this one on their way to it.
@graph_optimization_pass(
    prerequisites=[],
    apply_after=[comm_fusion_with_concat],
    undoes_others=False,
    reorders_collectives=True,
)
def prefetch_gathers(
    gm: HasGraph,
    distance: int | None = None,
    *,
    cost: CostModel | None = None,
    in_flight_mb: float | None = None,
    memory_budget_mb: float | None = None,
) -> Outcome:
    """Start the gathers of a layer's parameters before earlier layers compute.

    A gather of something that the step takes in, as ``DataParallel("fully_shard")`` makes
    them in forward and again in backward, needs nothing that the step computes. Where a
    limit is reached, a gather starts later, or stays.

    Args:
        gm: The graph module to edit.
        distance: How many layers ahead a gather starts; 1 by default. Gathers with the
            same first reader count as one layer.
        cost: Instead of a distance: each gather starts as late as the simulation says that
            nothing waits for it, with a network that is slower beside computation.
        in_flight_mb: MiB of gathered values that may be on their way at once; None for no
            limit.
        memory_budget_mb: MiB by which the peak of the memory that the graph's values take
            may rise; None for no limit.
    """
    if distance is not None and cost is not None:
        raise UsageError(
            "prefetch_gathers(distance=..., cost=...): both say when gathers start. Give "
            "one of them."
        )
    if cost is not None:
        check_cost(cost, "prefetch_gathers")
    if memory_budget_mb is not None:
        check_budget(memory_budget_mb, "prefetch_gathers", "or None for no limit")
    limit = _limit(1 if distance is None else distance, in_flight_mb)
    gathers = [each for each in get_all_comm_blocks(gm) if each.gathers_inputs()]
    if (writer := writes_in_place(gm.graph)) is not None:
        reason = f"{writer.name} writes in place: prefetch before new values do"
        return Outcome(len(gathers), 0, (reason,))
    # Without gathers, what the graph's values take need not be known.
    rise_mb = memory_budget_mb if gathers else None
    budget = MemoryBudget(gm, rise_mb, "prefetch_gathers", with_updates=False)
    ahead = _Prefetch(gathers, budget, limit)
    if cost is None:
        for block in gathers:
            ahead.move(block, distance or 1)
    elif gathers:
        for block, place in _plan_starts(gm.graph, gathers, cost):
            ahead.move_to(block, place)
    return Outcome(
        len(gathers), len(ahead.moved), tuple(ahead.refused), tuple(ahead.moved), ORDERS
    )


def _limit(distance: int, in_flight_mb: float | None) -> int | None:
    problems = []
    if not is_whole(distance) or distance < 1:
        problems.append(
            f"distance={distance!r}: a gather starts 1 or more layers ahead, a whole number"
        )
    if in_flight_mb is not None and (not is_size(in_flight_mb) or in_flight_mb == 0):
        problems.append(
            f"in_flight_mb={in_flight_mb!r}: use more than 0, a finite number of MiB, or "
            "None"
        )
    if problems:
        raise UsageError("prefetch_gathers: " + "; ".join(problems) + ".")
    return None if in_flight_mb is None else int(in_flight_mb * 2**20)


@dataclass(slots=True)
class _Prefetch:
    """Moves gathers one after the other, and says what held them back."""

    gathers: list[CommBlock]
    budget: MemoryBudget
    limit: int | None
    readers: dict[fx.Node, fx.Node] = field(init=False)  # of each gather, by its start
    stages: list[fx.Node] = field(init=False)  # first readers, in order
    moved: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    last: fx.Node | None = None

    def __post_init__(self) -> None:
        self.readers = {block.start: latest_place(block) for block in self.gathers}
        self.stages = sorted(set(self.readers.values()))

    def move(self, block: CommBlock, distance: int) -> None:
        """Start a gather before the layer at this distance, or a nearer one."""
        stage = self.stages.index(self.readers[block.start])
        obstacle = ""
        for reader in self.stages[max(0, stage - distance) : stage]:
            place = self._place(reader)
            if not place < block.start.prev:
                break  # it starts there already
            found = self._hoist(block, place)
            if not found:
                self.moved.append(f"{block.start.name}: starts before {reader.name}")
                break
            obstacle = obstacle or f"does not start before {reader.name}: {found}"
        self.last = block.start
        if obstacle:
            self.refused.append(f"{block.start.name}: {obstacle}")

    def move_to(self, block: CommBlock, wanted: fx.Node) -> None:
        """Start a gather behind a node, or behind the first one that can be afforded."""
        wanted = wanted if self.last is None else max(wanted, self.last)
        place = self.budget.earliest(block, wanted)
        if place < block.start.prev:
            obstacle = self._hoist(block, place)
            if not obstacle:
                self.moved.append(f"{block.start.name}: starts behind {place.name}")
            if place is not wanted:
                obstacle = obstacle or "the memory budget is used up"
            if obstacle:
                self.refused.append(
                    f"{block.start.name}: does not start behind {wanted.name}: {obstacle}"
                )
        self.last = block.start

    def _place(self, reader: fx.Node) -> fx.Node:
        """Directly before a reader, but behind the gather that came before."""
        place = reader.prev
        return place if self.last is None or self.last < place else self.last

    def _hoist(self, block: CommBlock, place: fx.Node) -> str:
        """Start a block behind a node, or say why not."""
        size = block.event.payload_bytes
        on_their_way = sum(
            other.event.payload_bytes
            for other in self.gathers
            if other is not block and not place < other.start and place < other.wait
        )
        if self.limit is not None and on_their_way + size > self.limit:
            total = format_bytes(on_their_way + size)
            return f"{total} would be on their way, more than in_flight_mb"
        is_moved = self.budget.hoist(block, place)
        return "" if is_moved else "the memory budget is used up"


# ----------------------------------------------------------------------------
# When each gather should start, by simulating computation and one network.


class Transfer(NamedTuple):
    """One collective on the network; times are those of computation alone.

    Attributes:
        start: When it starts.
        seconds: How long it takes.
        needed: When its result is read.
    """

    start: float
    seconds: float
    needed: float


_SLOWDOWN = 1.3  # of a network beside computation that wants the same memory and cores
_MOST_MOVES = 200
_GAIN = 1e-4  # of a step: what a move must gain


def _plan_starts(
    graph: fx.Graph, gathers: Sequence[CommBlock], cost: CostModel
) -> list[tuple[CommBlock, fx.Node]]:
    """The node behind which each gather should start, in the order of their readers."""
    nodes = list(graph.nodes)
    clock = begin_seconds(graph, cost)
    gathers = sorted(gathers, key=latest_place)
    own = {block.start for block in gathers}
    others = [
        Transfer(clock[node], cost.comm_seconds(event) * _SLOWDOWN, clock[nodes[-1]])
        for node, event in events_of(graph)
        if node not in own
    ]
    wanted = [
        Transfer(
            clock[block.start],
            cost.comm_seconds(block.event) * _SLOWDOWN,
            clock[latest_place(block)],
        )
        for block in gathers
    ]
    begins = list(clock.values())
    places = []
    for block, transfer in zip(gathers, plan_transfers(wanted, others), strict=True):
        running = bisect_right(begins, transfer.start) - 1  # the node at that moment
        place = max(nodes[max(running - 1, 0)], earliest_place(block))
        places.append((block, place))
    return places


def plan_transfers(
    gathers: Sequence[Transfer], others: Sequence[Transfer]
) -> list[Transfer]:
    """Gathers that start as late as possible without making the step longer.

    Args:
        gathers: What needs the step's inputs alone, in the order in which it is read.
        others: What shares the network with it and starts when it is ready.
    """
    planned: list[Transfer] = []
    free = math.inf  # until when the network is free for this gather
    for each in reversed(gathers):
        free = max(0.0, min(free, each.needed) - each.seconds)
        planned.insert(0, each._replace(start=free))
    total, waits = simulate_transfers(planned, others)
    for _ in range(_MOST_MOVES):
        for late in sorted(range(len(planned)), key=waits.__getitem__, reverse=True):
            if waits[late] <= 0.0:
                return planned
            trial = _moved(planned, late, waits[late])
            found, its_waits = simulate_transfers(trial, others)
            if found < total * (1.0 - _GAIN):
                planned, total, waits = trial, found, its_waits
                break
        else:
            break
    return planned


def _moved(planned: Sequence[Transfer], late: int, by: float) -> list[Transfer]:
    """The same with one gather earlier, and those before it no later than it."""
    start = max(0.0, planned[late].start - by)
    return [
        each._replace(start=min(each.start, start)) if place <= late else each
        for place, each in enumerate(planned)
    ]


def simulate_transfers(
    gathers: Sequence[Transfer], others: Sequence[Transfer]
) -> tuple[float, list[float]]:
    """Seconds of a step, and how long computation waits for each gather."""
    transfers = [*gathers, *others]
    moments = [(each.start, False, place) for place, each in enumerate(transfers)]
    moments += [(each.needed, True, place) for place, each in enumerate(transfers)]
    work, now = [], 0.0
    # What is read at a moment must have started before: starts at one moment come first.
    for moment, is_read, place in sorted(moments):
        work.append(Work(Do.COMPUTE, moment - now))
        seconds = 0.0 if is_read else transfers[place].seconds
        work.append(Work(Do.WAIT if is_read else Do.START, seconds, place))
        now = moment
    found = run_schedule(work)
    waits = {place: max(0.0, each.end - each.needed) for place, each in found.flights}
    return found.seconds, [waits[place] for place in range(len(gathers))]
