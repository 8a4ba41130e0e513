"""Updates wait for the next forward, so that reductions overlap with it as well.

A gradient's reduction is needed where its parameter is next read: in the next forward. The
parameters that are read first have their gradients last, so those reductions go first as
soon as they can; what is needed later fills the rest of the iteration.
"""

import difflib
import itertools
from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import fx

from torchspmd.comm import Kind, Phase, format_count
from torchspmd.errors import DeferralError, UsageError
from torchspmd.step.deferral.iter_graph import IterGraph
from torchspmd.step.deferral.module import IterGraphModule
from torchspmd.step.deferral.regions import (
    DeferredRegion,
    Iteration,
    check_moves,
    complete_region,
    first_reader,
    written_by,
)
from torchspmd.step.graph.argument_checks import check_budget, check_flags, check_names
from torchspmd.step.graph.collectives import CommBlock, get_all_comm_blocks
from torchspmd.step.graph.cost import CostModel, check_cost, device_of
from torchspmd.step.graph.memory import LiveBytes
from torchspmd.step.graph.metadata import output_node, owner_of
from torchspmd.step.graph.nodes import HasGraph, descendants
from torchspmd.step.graph.optimizer_lists import Chains, first_items, split_by_group
from torchspmd.step.graph.reports import ORDERS, Outcome
from torchspmd.step.graph.simulate import begin_seconds
from torchspmd.step.passes.baseline import Baseline, in_groups, machines, neighbours
from torchspmd.step.passes.optimizer import remove_copy_from_optimizer
from torchspmd.step.passes.overlap import schedule_comm_wait
from torchspmd.step.passes.pacing import (
    Ordering,
    Reduction,
    estimate_ordering,
    orderings,
    updates_at,
)
from torchspmd.step.passes.runner import LeaveUnchanged, graph_optimization_pass

_REDUCTIONS = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)
_SLOWDOWN = 1.3  # of a network beside computation
# Pending updates take memory and must be flushed, and a simulated gain may not be there:
# steps of some milliseconds were up to 4 % slower than simulated.
_WORTH = 1.05


@graph_optimization_pass(
    prerequisites=[remove_copy_from_optimizer],
    apply_after=[schedule_comm_wait],
    undoes_others=False,
)
def iter_move_grads_and_optimizers(
    gm: IterGraphModule, target_comm_node: str, target_dest_node: str
) -> Outcome:
    """Move a collective and the updates that need it before a node of the next iteration.

    Args:
        gm: The step.
        target_comm_node: The name of the collective. Give the name of its wait to start
            it in this iteration and wait for it in the next.
        target_dest_node: The name of the node before which the work runs.

    Raises:
        DeferralError: When the destination reads a state that the work changes, or
            something needs the result in this iteration.
    """
    what = "iter_move_grads_and_optimizers"
    _check_module(what, gm)
    check_names(
        what, target_comm_node=target_comm_node, target_dest_node=target_dest_node
    )
    moving = _find_by_name(gm.graph, target_comm_node)
    destination = _find_by_name(gm.graph, target_dest_node)
    region = isolate_update(gm.graph, moving)
    lines = _move(gm.graph, [(moving.name, region, destination)])
    return Outcome(1, 1, detail=tuple(lines), keeps_bits=ORDERS)


@graph_optimization_pass(
    prerequisites=[],
    apply_after=[schedule_comm_wait, remove_copy_from_optimizer],
    undoes_others=False,
    reorders_collectives=True,
)
def defer_updates(
    gm: IterGraphModule,
    *,
    start: Literal["now", "next"] = "now",
    cost: CostModel | None = None,
    delay_gradients: bool = True,
    memory_budget_mb: float = 0.0,
    only_if_faster: bool = False,
) -> Outcome:
    """Move every update to the place in the next iteration that first needs it.

    Args:
        gm: The step.
        start: ``"now"`` starts the reductions in this iteration, those first that the next
            one needs first, and waits for them there. ``"next"`` moves the reductions too.
        cost: How long nodes and reductions take, to choose the order of the reductions,
            and which neighbouring updates are made as one where many small ones cost more
            than they hide; the same on all ranks. A guess for the device by default, by
            which updates are joined with ``only_if_faster`` alone.
        delay_gradients: With ``"now"``, gradients of weights that are needed late may be
            computed behind those that are needed first, where that is simulated to be
            faster.
        memory_budget_mb: MiB by which that may raise the peak of the memory that the
            graph's values take.
        only_if_faster: With ``"now"``, leave the graph as it was unless the steady step
            is simulated to be at least 5 % faster (``Outcome.gain``); where the cost is
            a guess, also on a machine that is much faster than guessed.
    """
    what = "defer_updates"
    _check_module(what, gm)
    if start not in ("now", "next"):
        raise UsageError(f"{what}(start={start!r}): choose 'now' or 'next'.")
    check_budget(memory_budget_mb, what, "such as 0 for no rise")
    check_cost(cost, what)
    check_flags(what, delay_gradients=delay_gradients, only_if_faster=only_if_faster)
    if only_if_faster and start == "next":
        raise UsageError(
            f"{what}(start='next', only_if_faster=True): only start='now' is simulated. "
            "Leave out one of them."
        )
    graph = gm.graph
    # Without a check for a gain, and with a guessed cost, all of it is deferred.
    may_join = cost is not None or only_if_faster
    tried = machines(cost, device_of(graph), is_doubted=only_if_faster)
    cost = tried[0]
    blocks = _blocks(gm)
    # As it came: every update in its own iteration.
    baselines = [Baseline.of(graph, each) for each in tried]
    together: Sequence[Sequence[str]] = ()
    if start == "now":
        _gather_later(gm, cost)
        if may_join and any(each.counts(len(blocks)) for each in baselines):
            together = _choose_joined(graph, baselines)
    jobs, refused = _find_jobs(graph, blocks, start, cost, together)
    detail: list[str] = []
    gain: float | None = None
    places: Mapping[Reduction, fx.Node] = {
        each: job.place for job in jobs for each in job.reductions
    }
    order = list(graph.nodes)
    if start == "now" and jobs:
        _sink(graph, jobs)
        ordering, line = _order(graph, jobs, cost, delay_gradients, memory_budget_mb)
        places = ordering.places
        gain = min(_gain(each, graph, jobs, ordering) for each in baselines)
        detail = [line, _worth(gain), *_told_joined(together)]
        if only_if_faster and gain < _WORTH:
            refused.append(f"left as it was: {_simulated(gain)}")
            raise LeaveUnchanged(Outcome(len(blocks), 0, tuple(refused), gain=gain))
    owner = {each: job for job in jobs for each in job.reductions}
    moves = [
        (owner[members[0]], target) for target, members in updates_at(order, places)
    ]
    detail += _move(graph, [(job.name, job.region, target) for job, target in moves])
    num_moved = sum(len(job.blocks) for job in jobs)
    return Outcome(len(blocks), num_moved, tuple(refused), tuple(detail), ORDERS, gain)


def _check_module(what: str, gm: object) -> None:
    if not isinstance(gm, IterGraphModule):
        raise UsageError(
            f"{what}: pass an IterGraphModule, not {type(gm).__name__}: only that can "
            "leave work for the next iteration."
        )


def _move(
    graph: IterGraph, moves: Sequence[tuple[str, Sequence[fx.Node], fx.Node]]
) -> list[str]:
    """Move named nodes to the next iteration, before others; a line about each."""
    places = graph.move_all(
        [(nodes, target) for _, nodes, target in moves], strict=True
    )
    return [
        f"{name}: {len(nodes)} nodes run before {place.name} of the next iteration"
        for (name, nodes, _), place in zip(moves, places, strict=True)
    ]


def isolate_update(graph: fx.Graph, moving: fx.Node) -> list[fx.Node]:
    """All that needs a node's result; optimizers are split so that nothing else does."""
    _isolate_updates(graph, [[moving]])
    return _update_region(Iteration.of(graph), [moving])


def _isolate_updates(graph: fx.Graph, groups: Sequence[Sequence[fx.Node]]) -> None:
    """Split optimizers so that what needs nodes of one group needs none of another."""
    chains = Chains(graph)
    needed: dict[object, tuple[int, ...]] = {}
    for number, group in enumerate(groups):
        items = {item for moving in group for item in first_items(moving)}
        for chain in set(map(chains.chain_of, items)):
            needed[chain] = (*needed.get(chain, ()), number)
    split_by_group(graph, lambda chain: needed.get(chain, ()), chains)


def _update_region(iteration: Iteration, moving: Sequence[fx.Node]) -> list[fx.Node]:
    """All that needs the result of nodes; raises where that updates no state."""
    region = complete_region(iteration, descendants(moving))
    if not written_by(iteration, region):
        raise UsageError(
            f"{moving[0].name} is not used by any fused optimizer, nor by another update "
            "of a state: there is nothing to move to the next iteration with it."
        )
    return region


def _find_by_name(graph: fx.Graph, name: str) -> fx.Node:
    """The node with this name; an error that names similar ones."""
    names: dict[str, fx.Node] = {node.name: node for node in graph.nodes}
    if name in names:
        return names[name]
    similar = difflib.get_close_matches(name, names, n=4, cutoff=0.3)
    raise DeferralError(
        f"Cannot find {name}: the graph has no node of this name. Did you mean "
        f"{', '.join(similar) or 'one of another graph'}?"
    )


# ----------------------------------------------------------------------------
# What can be deferred, and together with what.


@dataclass(frozen=True, slots=True)
class _Job:
    """One reduction, or some that make one gradient, and the update that needs them."""

    blocks: tuple[CommBlock, ...]
    region: list[fx.Node]
    reductions: tuple[Reduction, ...]

    @property
    def name(self) -> str:
        """What the report calls it."""
        return " and ".join(block.start.name for block in self.blocks)

    @property
    def place(self) -> fx.Node:
        """The first node of the next iteration that needs the update."""
        return self.reductions[0].place

    def on(self, cost: CostModel) -> tuple[Reduction, ...]:
        """Its reductions on another machine."""
        return _reductions(self.blocks, self.region, self.place, cost)


def _blocks(gm: HasGraph) -> list[CommBlock]:
    """The reductions, and the gathers in backward that updates alone wait for."""
    found = get_all_comm_blocks(gm, (*_REDUCTIONS, Kind.ALL_GATHER))
    return [
        block
        for block in found
        if block.kind in _REDUCTIONS
        or (
            owner_of(block.start).phase is Phase.BACKWARD
            and all(owner_of(n).phase is Phase.OPTIMIZER for n in block.readers())
        )
    ]


def _gather_later(gm: IterGraphModule, cost: CostModel) -> None:
    """Start gathers of forward when one of those before them has come, if that is enough.

    The network stays busy, and the updates of what is gathered have more time.
    """
    gathers = [
        block
        for block in get_all_comm_blocks(gm, (Kind.ALL_GATHER,))
        if block.gathers_inputs() and owner_of(block.start).phase is Phase.FORWARD
    ]
    clock = begin_seconds(gm.graph, cost) if gathers else {}
    for number, block in enumerate(gathers):
        wanted = min(map(clock.__getitem__, block.waits))
        wanted -= _SLOWDOWN * cost.comm_seconds(block.event)
        places = [max(each.waits) for each in gathers[: max(0, number - 1)]]
        place = max((each for each in places if clock[each] <= wanted), default=None)
        if place is not None and place < min(block.waits):
            for node in reversed((*block.head, block.start)):
                if node < place:
                    place.append(node)


def _find_jobs(
    graph: IterGraph,
    blocks: Sequence[CommBlock],
    start: str,
    cost: CostModel,
    together: Sequence[Sequence[str]] = (),
) -> tuple[list[_Job], list[str]]:
    """The work that can be deferred, first what is needed first, and why other cannot.

    Optimizers are split, so that each update needs its own reduction alone, or those whose
    starts are named together.
    """
    moving: dict[CommBlock, fx.Node] = {}  # the first node of each that is deferred
    refused = []
    taken = {name for region in graph.regions for name in region.nodes}
    for block in blocks:
        try:
            if block.problem:
                raise UsageError(block.problem)
            first = block.start if start == "next" else block.wait
            _check_only_updates(block, first, taken)
        except UsageError as error:
            refused.append(f"{block.start.name}: {_first_problem(error)}")
        else:
            moving[block] = first
    groups = _grouped(moving, together)
    _isolate_updates(graph, [list(group.values()) for group in groups])
    iteration = Iteration.of(graph)  # from here on the graph is only read
    found = []
    for group in groups:
        try:
            found.append(_plan(iteration, group, graph.regions, cost))
        except (DeferralError, UsageError) as error:
            refused += [f"{each.start.name}: {_first_problem(error)}" for each in group]
    jobs = []
    for connected in _connected(found):
        members = [block for job in connected for block in job.blocks]
        num_reductions = sum(block.kind in _REDUCTIONS for block in members)
        if len(connected) == 1:
            jobs += connected
        elif 2 * num_reductions <= len(members):
            # A gradient that is the sum of something reduced and something gathered.
            together_now = {each: moving[each] for each in members}
            jobs.append(_plan(iteration, together_now, graph.regions, cost))
        else:
            # What a norm over all gradients scales, every update needs: the next forward
            # would begin with all of them, so that nothing would overlap with it.
            refused += [_told_shared(job, connected) for job in connected]
    position = {node: index for index, node in enumerate(graph.nodes)}
    return sorted(jobs, key=lambda job: position[job.place]), refused


def _grouped(
    moving: Mapping[CommBlock, fx.Node], together: Sequence[Sequence[str]]
) -> list[dict[CommBlock, fx.Node]]:
    """What is deferred together; all else by itself."""
    number = {name: place for place, names in enumerate(together) for name in names}
    groups: dict[object, dict[CommBlock, fx.Node]] = {}
    for block, first in moving.items():
        groups.setdefault(number.get(block.start.name, block), {})[block] = first
    return list(groups.values())


def _plan(
    iteration: Iteration,
    moving: Mapping[CommBlock, fx.Node],
    others: Sequence[DeferredRegion],
    cost: CostModel,
) -> _Job:
    region = _update_region(iteration, list(moving.values()))
    place = first_reader(iteration, region)
    check_moves(iteration, [(region, place)], others)
    return _Job(tuple(moving), region, _reductions(moving, region, place, cost))


def _reductions(
    blocks: Collection[CommBlock],
    region: Sequence[fx.Node],
    place: fx.Node,
    cost: CostModel,
) -> tuple[Reduction, ...]:
    """The reductions of a job; each has its share of the update."""
    updating = sum(map(cost.compute_seconds, region)) / len(blocks)
    name = next(block.start.name for block in blocks)
    return tuple(
        Reduction(
            block.start,
            place,
            block.group.name,
            cost.comm_seconds(block.event),
            updating,
            name,
        )
        for block in blocks
    )


def _connected(jobs: Sequence[_Job]) -> list[list[_Job]]:
    """Jobs that have nodes in common, directly or through others, together."""
    groups: list[tuple[list[_Job], set[fx.Node]]] = []
    for job in jobs:
        members, nodes = [job], set(job.region)
        for group in [each for each in groups if each[1] & nodes]:
            groups.remove(group)
            members, nodes = group[0] + members, group[1] | nodes
        groups.append((members, nodes))
    return [members for members, _ in groups]


def _told_shared(job: _Job, group: Sequence[_Job]) -> str:
    counts = Counter(node for each in group for node in each.region)
    shared = next(node for node in job.region if counts[node] > 1)
    return (
        f"{job.name}: its update needs other reductions too, from {shared.name} on "
        f"({owner_of(shared).phase.value}; a norm for clipping, a check for infinities), "
        "so that nothing would overlap"
    )


def _check_only_updates(
    block: CommBlock, moving: fx.Node, taken: Container[str]
) -> None:
    """Raise unless a reduction feeds updates alone, none of which is moved already.

    Its compute stays where it is, and what another move took is not split again.
    """
    own = set(block.nodes)
    for node in descendants([moving]):
        if node.name in taken:
            raise UsageError(f"{node.name} is moved already")
        owner = owner_of(node)
        if node not in own and owner.phase is not Phase.OPTIMIZER:
            raise UsageError(
                f"{node.name} needs it in this iteration ({owner.phase.value} of "
                f"{owner.module})"
            )


def _first_problem(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.startswith("  ")]
    return lines[0] if lines else str(error)


# ----------------------------------------------------------------------------
# When it runs.


def _deferred(graph: IterGraph, jobs: Sequence[_Job]) -> set[fx.Node]:
    """What the jobs defer, and what was moved before."""
    taken = {name for region in graph.regions for name in region.nodes}
    earlier = {node for node in graph.nodes if node.name in taken}
    return earlier.union(*(job.region for job in jobs))


def _sink(graph: IterGraph, jobs: Sequence[_Job]) -> None:
    """Put the deferred nodes last, behind everything that runs in this iteration."""
    deferred = _deferred(graph, jobs)
    for node in [node for node in graph.nodes if node in deferred]:
        output_node(graph).prepend(node)


def _body(graph: IterGraph, jobs: Sequence[_Job]) -> tuple[list[fx.Node], fx.Node]:
    """What runs in this iteration, and what stands behind it."""
    deferred = _deferred(graph, jobs)
    end = next(n for n in graph.nodes if n in deferred or n is output_node(graph))
    nodes = itertools.takewhile(lambda node: node is not end, graph.nodes)
    return [node for node in nodes if node.op not in ("placeholder", "get_attr")], end


def _order(
    graph: IterGraph, jobs: list[_Job], cost: CostModel, may_delay: bool, rise_mb: float
) -> tuple[Ordering, str]:
    """Choose when gradients are computed and reductions start; with a line about it."""
    body, end = _body(graph, jobs)
    reductions = [each for job in jobs for each in job.reductions]
    found = orderings(body, reductions, cost, may_delay=may_delay)
    memory = LiveBytes(graph)
    most = max(memory.now().values(), default=0) + int(rise_mb * 2**20)
    for ordering in found:
        for node in ordering.order:
            end.prepend(node)
        if ordering.is_default or max(memory.now().values(), default=0) <= most:
            break
    return ordering, _told(ordering, found[-1])


def _gain(
    baseline: Baseline, graph: fx.Graph, jobs: Sequence[_Job], ordering: Ordering
) -> float:
    """How many times as fast as the baseline a step is whose updates wait."""
    reductions = [each for job in jobs for each in job.on(baseline.cost)]
    simulated = estimate_ordering(ordering, reductions, baseline.cost)
    steady = baseline.steady_seconds(simulated, len(graph.nodes), len(jobs))
    return baseline.seconds / steady


# ----------------------------------------------------------------------------
# Updates that wait together: fewer and larger ones cost less, and overlap less.


@dataclass(frozen=True, slots=True)
class _Copied:
    """A graph that is only looked at: without the tensors of its module."""

    graph: IterGraph


def _choose_joined(
    graph: IterGraph, baselines: Sequence[Baseline]
) -> list[Sequence[str]]:
    """The reductions whose updates are made together, by simulation; by their names.

    Optimizers are split to see what depends on what, which cannot be undone: in a copy.
    """
    copy = IterGraph.copy_of(graph, graph.regions)
    blocks = _blocks(_Copied(copy))
    jobs, _ = _find_jobs(copy, blocks, "now", baselines[0].cost)
    if len(jobs) < 2:
        return []
    _sink(copy, jobs)
    body, _ = _body(copy, jobs)
    nodes_each = (len(copy.nodes) - len(graph.nodes)) / len(jobs)
    tried = [
        (each, {node: each.cost.compute_seconds(node) for node in body})
        for each in baselines
    ]
    gains = {}
    for size in neighbours(len(jobs)):
        groups = in_groups(jobs, size)
        num_nodes = len(graph.nodes) + round(nodes_each * len(groups))
        gains[size] = min(
            each.seconds
            / each.steady_seconds(
                _joined_seconds(body, groups, each, seconds), num_nodes, len(groups)
            )
            for each, seconds in tried
        )
    best = max(gains, key=gains.__getitem__)  # the smallest of the best
    if best == 1:
        return []
    names = [[block.start.name for block in job.blocks] for job in jobs]
    return [list(itertools.chain(*group)) for group in in_groups(names, best)]


def _joined_seconds(
    body: Sequence[fx.Node],
    groups: Sequence[Sequence[_Job]],
    baseline: Baseline,
    seconds: Mapping[fx.Node, float],
) -> float:
    """How long the nodes take where the updates of each group are one."""
    reductions = []
    for group in groups:
        found = [each for job in group for each in job.on(baseline.cost)]
        less = baseline.joined_seconds(len(group)) / len(found)
        reductions += [
            replace(
                each,
                place=group[0].place,
                update=group[0].name,
                update_seconds=max(0.0, each.update_seconds - less),
            )
            for each in found
        ]
    [ordering] = orderings(
        body, reductions, baseline.cost, may_delay=False, seconds=seconds
    )
    return ordering.seconds


def _told_joined(together: Sequence[Sequence[str]]) -> list[str]:
    if not together:
        return []
    count = sum(map(len, together))
    made = format_count(len(together), "update")
    return [
        f"{count} reductions share {made}: splitting the optimizer further costs more"
    ]


def _simulated(gain: float) -> str:
    return f"simulated to be {gain:.2f} times as fast as without this pass"


def _worth(gain: float) -> str:
    """What overlapping gains, as far as it is known before the step has run."""
    line = _simulated(gain)
    if gain >= _WORTH:
        return line
    why = "hardly anything of the reductions was exposed"
    return f"{line}: {why}, and overlap_iterations=False leaves nothing pending"


def _told(ordering: Ordering, default: Ordering) -> str:
    if ordering.is_default:
        return "every gradient is computed as early as it can be"
    told = []
    if ordering.delayed:
        what = format_count(len(ordering.delayed), "reduction")
        told.append(
            f"the gradients of {what} are computed last, beside more urgent reductions"
        )
    if ordering.num_sunk:
        told.append(
            f"{ordering.num_sunk} operators wait for the rest of their gradient"
        )
    gain = default.seconds / ordering.seconds
    return f"{', and '.join(told)}: {gain:.2f} times as fast as if they were not"
