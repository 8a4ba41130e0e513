"""Gathers of sharded parameters that start before the layer in front of them computes."""

from dataclasses import dataclass, field

from torch import fx

from torchspmd.comm import format_bytes
from torchspmd.errors import UsageError
from torchspmd.step.graph.comm_blocks import (
    CommBlock,
    get_all_comm_blocks,
    writes_in_place,
)
from torchspmd.step.graph.moves import latest_place
from torchspmd.step.graph.options import is_whole
from torchspmd.step.graph.queries import HasGraph
from torchspmd.step.graph.reports import ORDERS, Outcome
from torchspmd.step.passes.comm_fusion import comm_fusion_with_concat
from torchspmd.step.passes.memory_budget import MemoryBudget, is_size
from torchspmd.step.passes.ordering import graph_optimization_pass


# Parameters of the next layer overtake gradients of this one on their way to it.
@graph_optimization_pass(
    prerequisites=[],
    apply_after=[comm_fusion_with_concat],
    undoes_others=False,
    reorders_collectives=True,
)
def prefetch_gathers(
    gm: HasGraph,
    distance: int = 1,
    *,
    in_flight_mb: float | None = None,
    memory_budget_mb: float | None = None,
) -> Outcome:
    """Start the gathers of a layer's parameters before an earlier layer computes.

    A gather of something that the step takes in, as ``DataParallel("fully_shard")`` makes
    them in forward and again in backward, needs nothing that the step computes. Gathers
    with the same first reader count as one layer. Where a limit is reached, a gather
    starts before a nearer layer, or stays.

    Args:
        gm: The graph module to edit.
        distance: How many layers ahead a gather starts.
        in_flight_mb: MiB of gathered values that may be on their way at once; None for no
            limit.
        memory_budget_mb: MiB by which the peak of the memory that the graph's values take
            may rise; None for no limit.
    """
    limit = _limit(distance, in_flight_mb)
    gathers = [each for each in get_all_comm_blocks(gm) if each.gathers_inputs()]
    if (writer := writes_in_place(gm.graph)) is not None:
        reason = f"{writer.name} writes in place: prefetch before new values do"
        return Outcome(len(gathers), 0, (reason,))
    budget = MemoryBudget(gm, memory_budget_mb, "prefetch_gathers")
    ahead = _Prefetch(gathers, budget, limit)
    for block in gathers:
        ahead.move(block, distance)
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
