"""Collectives that start as early and are waited for as late as possible."""

from dataclasses import dataclass, field

from torch import fx

from torchspmd.step.graph.comm_blocks import (
    CommBlock,
    get_all_comm_blocks,
    writes_in_place,
)
from torchspmd.step.graph.moves import earliest_place, latest_place
from torchspmd.step.graph.queries import HasGraph
from torchspmd.step.graph.reports import ORDERS, Outcome
from torchspmd.step.passes.comm_fusion import comm_fusion_with_concat
from torchspmd.step.passes.embedding_gradients import gather_embedding_gradients
from torchspmd.step.passes.memory_budget import MemoryBudget
from torchspmd.step.passes.ordering import graph_optimization_pass


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
    for block in blocks:
        if not block.problem:
            schedule.wait_late(block)
    moved = _moves(blocks, before, _places(gm.graph, blocks))
    return Outcome(len(blocks), len(moved), schedule.reasons(), tuple(moved), ORDERS)


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
    """How many nodes of the computation stand before each start and wait."""
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
