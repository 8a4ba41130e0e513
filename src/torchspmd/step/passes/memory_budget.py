"""How far moving collectives may raise the memory that a graph's values take."""

from collections.abc import Callable

from torch import fx

from torchspmd.errors import UsageError
from torchspmd.step.graph.collectives import (
    CommBlock,
    after_start,
    hoist,
    remember,
    sink,
)
from torchspmd.step.graph.edit import HasGraph
from torchspmd.step.graph.memory import LiveBytes, held_until_wait, value_bytes

_MOST_MB = 2**40


def is_size(value: object) -> bool:
    """Whether a value is a finite number of MiB, not below 0.

    >>> [is_size(value) for value in (25, 0, -1, float("inf"), "25", True)]
    [True, True, False, False, False, False]
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 <= value <= _MOST_MB


def check_budget(rise_mb: object, what: str, otherwise: str) -> None:
    """Refuse a memory budget that is no number of MiB."""
    if not is_size(rise_mb):
        raise UsageError(
            f"{what}(memory_budget_mb={rise_mb!r}): use 0 or more, a finite number of MiB, "
            f"{otherwise}."
        )


def check_bucket_size(size_mb: object, what: str) -> None:
    """Refuse the size of a bucket that is neither chosen later nor a number of MiB."""
    if size_mb is not None and (not is_size(size_mb) or size_mb == 0):
        raise UsageError(
            f"{what}(bucket_size_mb={size_mb!r}): use more than 0, a finite number of MiB, "
            "or None to have it chosen."
        )


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
        check_budget(rise_mb, what, "or None for no limit")
        self._memory = LiveBytes(gm.graph)
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
