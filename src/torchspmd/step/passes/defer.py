"""Updates wait for the next forward, so that reductions overlap with it as well.

A gradient's reduction is needed where its parameter is next read: in the next forward. The
parameters that are read first have their gradients last, so those reductions go first as
soon as they can; what is needed later fills the rest of the iteration.
"""

from dataclasses import dataclass
from typing import Literal

from torch import fx

from torchspmd.comm import Kind, Phase
from torchspmd.errors import DeferralError, UsageError
from torchspmd.step.graph.comm_blocks import CommBlock, get_all_comm_blocks
from torchspmd.step.graph.cost import CostModel
from torchspmd.step.graph.owners import owner_of
from torchspmd.step.graph.queries import find_all_descendants
from torchspmd.step.graph.reports import Outcome
from torchspmd.step.graph.roles import output_node
from torchspmd.step.iterate.deferral import check_region, first_reader
from torchspmd.step.iterate.iteration import IterGraphModule
from torchspmd.step.passes.iter_move import isolate_update, moved
from torchspmd.step.passes.optimizer_copies import remove_copy_from_optimizer
from torchspmd.step.passes.ordering import graph_optimization_pass
from torchspmd.step.passes.schedule import schedule_comm_wait

_REDUCTIONS = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)

# Starting a little too early costs less than leaving the wire idle.
_OPTIMISM = 0.8


@dataclass(frozen=True, slots=True)
class _Job:
    """One reduction and the update that needs it."""

    block: CommBlock
    region: list[fx.Node]
    place: fx.Node
    seconds: float


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
) -> Outcome:
    """Move every update to the place in the next iteration that first needs it.

    Args:
        gm: The step.
        start: ``"now"`` starts the reductions in this iteration, those first that the next
            one needs first, and waits for them there. ``"next"`` moves the reductions too.
        cost: How long nodes and reductions take, to choose the order of the reductions;
            the same on all ranks. A guess for the device by default.
    """
    if not isinstance(gm, IterGraphModule):
        raise UsageError(
            f"defer_updates: pass an IterGraphModule, not {type(gm).__name__}: only that "
            "can leave work for the next iteration."
        )
    if start not in ("now", "next"):
        raise UsageError(f"defer_updates(start={start!r}): choose 'now' or 'next'.")
    graph = gm.graph
    cost = cost or CostModel.for_device(_device(graph))
    blocks = get_all_comm_blocks(gm, _REDUCTIONS)
    jobs, refused = [], []
    for block in blocks:
        try:
            jobs.append(_plan(gm, block, start, cost))
        except (DeferralError, UsageError) as error:
            refused.append(f"{block.start.name}: {_first_problem(error)}")
    position = {node: index for index, node in enumerate(graph.nodes)}
    jobs.sort(key=lambda job: position[job.place])
    if start == "now":
        _sink(graph, jobs)
        _order_starts(graph, jobs, cost)
    done = []
    for job in jobs:
        place = graph.move_to_next_iter_before(job.region, job.place, strict=True)
        done.append((job.block.start, job.region, place))
    outcome = moved(len(blocks), done)
    return Outcome(
        outcome.matched,
        outcome.changed,
        tuple(refused),
        outcome.detail,
        outcome.keeps_bits,
    )


def _plan(gm: IterGraphModule, block: CommBlock, start: str, cost: CostModel) -> _Job:
    if block.problem:
        raise UsageError(block.problem)
    graph = gm.graph
    moving = block.start if start == "next" else block.wait
    _check_only_updates(gm, block, moving)
    region = isolate_update(graph, moving)
    place = first_reader(graph, region)
    check_region(graph, region, place, [])
    return _Job(block, region, place, cost.comm_seconds(block.event) * _OPTIMISM)


def _check_only_updates(gm: IterGraphModule, block: CommBlock, moving: fx.Node) -> None:
    """Raise unless a reduction feeds updates alone: its compute stays where it is."""
    own = set(block.nodes)
    for node in find_all_descendants(gm, [moving]):
        owner = owner_of(node)
        if node not in own and owner.phase is not Phase.OPTIMIZER:
            raise UsageError(
                f"{node.name} needs it in this iteration ({owner.phase.value} of "
                f"{owner.module})"
            )


def _device(graph: fx.Graph) -> str:
    for node in graph.find_nodes(op="placeholder"):
        device = getattr(node.meta.get("val"), "device", None)
        if device is not None:
            return str(device.type)
    return "cpu"


def _first_problem(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.startswith("  ")]
    return lines[0] if lines else str(error)


def _sink(graph: fx.Graph, jobs: list[_Job]) -> None:
    """Put the deferred nodes last: they do not stand between a start and its place."""
    deferred = {node for job in jobs for node in job.region}
    for node in [node for node in graph.nodes if node in deferred]:
        output_node(graph).prepend(node)


def _order_starts(graph: fx.Graph, jobs: list[_Job], cost: CostModel) -> None:
    """Start reductions so that the wire is busy, the most urgent one that is ready first.

    Args:
        graph: The step.
        jobs: The reductions, the most urgent first.
        cost: How long nodes take.
    """
    waiting = {job.block.start: job for job in jobs}
    ready: list[_Job] = []
    free: dict[str, float] = {}
    now = 0.0
    deferred = {node for job in jobs for node in job.region}
    end = next(n for n in graph.nodes if n in deferred or n is output_node(graph))
    for node in list(graph.nodes):
        if node is end:
            break
        if node in waiting:
            ready.append(waiting[node])
        elif node.op not in ("placeholder", "get_attr"):
            for job in _due(jobs, ready, free, now):
                node.prepend(job.block.start)
            now += cost.compute_seconds(node)
    for job in [job for job in jobs if job in ready]:
        end.prepend(job.block.start)


def _due(
    jobs: list[_Job], ready: list[_Job], free: dict[str, float], now: float
) -> list[_Job]:
    """The reductions to start now: one for each group whose wire is free."""
    chosen = []
    for job in [job for job in jobs if job in ready]:
        group = job.block.group.name
        if free.get(group, 0.0) <= now:
            free[group] = now + job.seconds
            ready.remove(job)
            chosen.append(job)
    return chosen
