"""How far moving collectives may raise the memory that a graph's values take."""

from collections.abc import Callable

from torch import fx

from torchspmd.errors import UsageError
from torchspmd.step.graph.comm_blocks import CommBlock
from torchspmd.step.graph.live_bytes import LiveBytes, held_until_wait, value_bytes
from torchspmd.step.graph.moves import after_start, hoist, remember, sink
from torchspmd.step.graph.queries import HasGraph


class MemoryBudget:
    """How much memory a graph's values may take at once, while collectives move.

    Args:
        gm: The graph.
        rise_mb: MiB above the graph's peak as it is now, or None for no limit.
        what: The pass, for the message on a wrong value.
    """

    def __init__(self, gm: HasGraph, rise_mb: float | None, what: str) -> None:
        self._most: int | None = None
        if rise_mb is None:
            return
        if not rise_mb >= 0:
            raise UsageError(
                f"{what}(memory_budget_mb={rise_mb}): use 0 or more, or None for no limit."
            )
        self._memory = LiveBytes(gm)
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
        size = sum(value_bytes(node.meta.get("val")) for node in held_until_wait(block))
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
