"""Updates wait for the next forward, so that reductions overlap with it as well.

A gradient's reduction is needed where its parameter is next read: in the next forward. The
parameters that are read first have their gradients last, so those reductions go first as
soon as they can; what is needed later fills the rest of the iteration.
"""

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from torch import fx

from torchspmd.comm import Kind, Phase
from torchspmd.errors import DeferralError, UsageError
from torchspmd.step.graph.comm_blocks import CommBlock, get_all_comm_blocks
from torchspmd.step.graph.cost import CostModel, check_cost, device_of
from torchspmd.step.graph.live_bytes import LiveBytes
from torchspmd.step.graph.options import check_flags
from torchspmd.step.graph.owners import owner_of
from torchspmd.step.graph.queries import find_all_descendants
from torchspmd.step.graph.reports import Outcome
from torchspmd.step.graph.roles import output_node
from torchspmd.step.iterate.deferral import check_region, first_reader
from torchspmd.step.iterate.iter_graph import IterGraph
from torchspmd.step.iterate.iteration import IterGraphModule
from torchspmd.step.passes.iter_move import isolate_updates, moved, update_region
from torchspmd.step.passes.memory_budget import check_budget
from torchspmd.step.passes.optimizer_copies import remove_copy_from_optimizer
from torchspmd.step.passes.ordering import graph_optimization_pass
from torchspmd.step.passes.pacing import Pace, Reduction, estimate, paces
from torchspmd.step.passes.schedule import schedule_comm_wait

_REDUCTIONS = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)
_WORTH = 1.01  # below that, a gain is within what an estimate can tell


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
) -> Outcome:
    """Move every update to the place in the next iteration that first needs it.

    Args:
        gm: The step.
        start: ``"now"`` starts the reductions in this iteration, those first that the next
            one needs first, and waits for them there. ``"next"`` moves the reductions too.
        cost: How long nodes and reductions take, to choose the order of the reductions;
            the same on all ranks. A guess for the device by default.
        delay_gradients: With ``"now"``, gradients of weights that are needed late may be
            computed behind those that are needed first, where that is quicker on paper.
        memory_budget_mb: MiB by which that may raise the peak of the memory that the
            graph's values take.
    """
    if not isinstance(gm, IterGraphModule):
        raise UsageError(
            f"defer_updates: pass an IterGraphModule, not {type(gm).__name__}: only that "
            "can leave work for the next iteration."
        )
    if start not in ("now", "next"):
        raise UsageError(f"defer_updates(start={start!r}): choose 'now' or 'next'.")
    check_budget(memory_budget_mb, "defer_updates", "such as 0 for no rise")
    check_cost(cost, "defer_updates")
    check_flags("defer_updates", delay_gradients=delay_gradients)
    graph = gm.graph
    cost = cost or CostModel.for_device(device_of(graph))
    blocks = _blocks(gm)
    at_once = estimate(graph, cost)  # as it came: every update in its own iteration
    able, refused = _sort_out(gm, blocks, start)
    isolate_updates(graph, list(able.values()))
    jobs = []
    for block, moving in able.items():
        try:
            jobs.append(_plan(gm, {block: moving}, cost))
        except (DeferralError, UsageError) as error:
            refused.append(f"{block.start.name}: {_first_problem(error)}")
    jobs, joined = _apart(jobs, lambda them: _plan(gm, them, cost), able)
    refused += joined
    position = {node: index for index, node in enumerate(graph.nodes)}
    jobs.sort(key=lambda job: position[job.place])
    told: tuple[str, ...] = ()
    places: Mapping[Reduction, fx.Node] = {
        each: job.place for job in jobs for each in job.reductions
    }
    if start == "now" and jobs:
        _sink(graph, jobs)
        pace, line = _order(gm, jobs, cost, delay_gradients, memory_budget_mb)
        told, places = (line, _worth(at_once / pace.seconds)), pace.places
    done = []
    for job, target in _targets(jobs, places, position):
        place = graph.move_to_next_iter_before(job.region, target, strict=True)
        done.append((job.name, job.region, place))
    outcome = moved(len(blocks), done)
    return Outcome(
        outcome.matched,
        sum(len(job.blocks) for job in jobs),
        tuple(refused),
        (*told, *outcome.detail),
        outcome.keeps_bits,
    )


def _blocks(gm: IterGraphModule) -> list[CommBlock]:
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


def _targets(
    jobs: Sequence[_Job],
    places: Mapping[Reduction, fx.Node],
    position: Mapping[fx.Node, int],
) -> list[tuple[_Job, fx.Node]]:
    """Where each job's update is made, in the order of the updates.

    One that needs several reductions waits for the last of them.
    """
    owner = {each: job for job in jobs for each in job.reductions}
    found: dict[int, tuple[_Job, fx.Node]] = {}
    for reduction, place in places.items():
        job = owner[reduction]
        earlier = found.pop(id(job), (job, place))[1]
        found[id(job)] = job, max(place, earlier, key=position.__getitem__)
    return list(found.values())


def _sort_out(
    gm: IterGraphModule, blocks: Sequence[CommBlock], start: str
) -> tuple[dict[CommBlock, fx.Node], list[str]]:
    """The reductions that feed updates alone, with what moves, and why others do not."""
    able: dict[CommBlock, fx.Node] = {}
    refused = []
    taken = {name for region in gm.graph.regions for name in region.nodes}
    for block in blocks:
        try:
            if block.problem:
                raise UsageError(block.problem)
            moving = block.start if start == "next" else block.wait
            _check_only_updates(gm, block, moving, taken)
        except UsageError as error:
            refused.append(f"{block.start.name}: {_first_problem(error)}")
        else:
            able[block] = moving
    return able, refused


def _plan(
    gm: IterGraphModule, moving: Mapping[CommBlock, fx.Node], cost: CostModel
) -> _Job:
    graph = gm.graph
    region = update_region(graph, list(moving.values()))
    place = first_reader(graph, region)
    check_region(graph, region, place, graph.regions)
    updating = sum(map(cost.compute_seconds, region))
    reductions = [
        Reduction(
            block.start,
            place,
            block.group.name,
            cost.comm_seconds(block.event),
            updating / len(moving),
        )
        for block in moving
    ]
    return _Job(tuple(moving), region, tuple(reductions))


def _apart(
    jobs: Sequence[_Job],
    plan: Callable[[Mapping[CommBlock, fx.Node]], _Job],
    moving: Mapping[CommBlock, fx.Node],
) -> tuple[list[_Job], list[str]]:
    """The jobs that share no update with others, and why the others stay.

    What a norm over all gradients scales, every update needs: the next forward would
    begin with all of them, so that nothing would overlap with it. But where a gradient
    is the sum of something reduced and something gathered, both make one job.
    """
    apart, refused = [], []
    for group in _connected(jobs):
        blocks = [block for job in group for block in job.blocks]
        num_reductions = sum(block.kind in _REDUCTIONS for block in blocks)
        if len(group) == 1:
            apart += group
        elif 2 * num_reductions <= len(blocks):
            apart.append(plan({block: moving[block] for block in blocks}))
        else:
            refused += [_told_shared(job, group) for job in group]
    return apart, refused


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
    gm: IterGraphModule, block: CommBlock, moving: fx.Node, taken: Container[str]
) -> None:
    """Raise unless a reduction feeds updates alone, none of which is moved already.

    Its compute stays where it is, and what another move took is not split again.
    """
    own = set(block.nodes)
    for node in find_all_descendants(gm, [moving]):
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


def _deferred(graph: IterGraph, jobs: Sequence[_Job]) -> set[fx.Node]:
    """What the jobs defer, and what was moved before."""
    taken = {name for region in graph.regions for name in region.nodes}
    earlier = {node for node in graph.nodes if node.name in taken}
    return earlier.union(*(job.region for job in jobs))


def _sink(graph: IterGraph, jobs: Sequence[_Job]) -> None:
    """Put the deferred nodes last: they do not stand between a start and its place."""
    deferred = _deferred(graph, jobs)
    for node in [node for node in graph.nodes if node in deferred]:
        output_node(graph).prepend(node)


def _order(
    gm: IterGraphModule,
    jobs: list[_Job],
    cost: CostModel,
    may_delay: bool,
    rise_mb: float,
) -> tuple[Pace, str]:
    """Choose when gradients are computed and reductions start; with a line about it."""
    graph = gm.graph
    deferred = _deferred(graph, jobs)
    end = next(n for n in graph.nodes if n in deferred or n is output_node(graph))
    nodes = list(takewhile(lambda node: node is not end, graph.nodes))
    body = [node for node in nodes if node.op not in ("placeholder", "get_attr")]
    reductions = [each for job in jobs for each in job.reductions]
    found = paces(body, reductions, cost, may_delay=may_delay)
    memory = LiveBytes(gm)
    most = max(memory.now().values(), default=0) + int(rise_mb * 2**20)
    for pace in found:
        for node in pace.order:
            end.prepend(node)
        if pace.is_usual or max(memory.now().values(), default=0) <= most:
            break
    return pace, _told(pace, found[-1])


def _worth(gain: float) -> str:
    """What overlapping gains, as far as can be told before the step has run."""
    line = f"estimated to be {gain:.2f} times as fast as without this pass"
    if gain >= _WORTH:
        return line
    why = "hardly anything of the reductions was exposed"
    return f"{line}: {why}, and overlap_iterations=False owes nothing"


def _told(pace: Pace, usual: Pace) -> str:
    if pace.is_usual:
        return "every gradient is computed as early as it can be"
    told = []
    if pace.delayed:
        count = len(pace.delayed)
        what = "1 reduction" if count == 1 else f"{count} reductions"
        told.append(
            f"the gradients of {what} are computed last, beside more urgent reductions"
        )
    if pace.num_sunk:
        told.append(f"{pace.num_sunk} operators wait for the rest of their gradient")
    gain = usual.seconds / pace.seconds
    return f"{', and '.join(told)}: {gain:.2f} times as fast as if they were not"
