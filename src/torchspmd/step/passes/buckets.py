"""Which collectives go into one bucket: a plan, made from sizes and places alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx

from torchspmd.comm import format_bytes
from torchspmd.step.graph.comm_blocks import CommBlock
from torchspmd.step.graph.moves import latest_place

_SHOWN = 3  # names in one line


@dataclass(frozen=True, slots=True)
class Caps:
    """How large buckets get, in bytes.

    Attributes:
        most: What no bucket exceeds.
        first: The first bucket closes as soon as it holds this much, so that the first
            communication starts early.
    """

    most: int
    first: int


@dataclass(slots=True)
class _Bucket:
    """A bucket that is being filled."""

    blocks: list[CommBlock] = field(default_factory=list)
    size: int = 0
    deadline: fx.Node | None = None  # the first reader of a member

    def add(self, block: CommBlock, reader: fx.Node) -> None:
        self.blocks.append(block)
        self.size += block.event.payload_bytes
        self.deadline = reader if self.deadline is None else min(self.deadline, reader)

    def is_open_until(self, node: fx.Node | None) -> bool:
        """Whether all results are still unread when a node runs."""
        return node is None or self.deadline is None or node < self.deadline


@dataclass(slots=True)
class BucketPlan:
    """The buckets of several members, and why other blocks are in none, a line each."""

    buckets: list[list[CommBlock]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def plan_buckets(blocks: Sequence[CommBlock], caps: Caps) -> BucketPlan:
    """Fill buckets with blocks that may be fused with each other, in graph order."""
    plan = BucketPlan()
    blocks = [block for block in blocks if not _is_too_large(block, caps, plan)]
    bucket, is_first = _Bucket(), True
    for number, block in enumerate(blocks):
        later = blocks[number + 1].start if number + 1 < len(blocks) else None
        obstacle = _obstacle(bucket, block, caps)
        if obstacle:
            _close(bucket, plan, obstacle)
            bucket, is_first = _Bucket(), False
        reader = latest_place(block)
        if bucket.blocks and _would_end(bucket, reader, later):
            early = f"{reader.name} reads its result before the next one starts"
            plan.refused.append(f"{block.start.name}: {early}")
            continue
        bucket.add(block, reader)
        if is_first and bucket.size >= caps.first:
            _close(bucket, plan, "the first bucket is full")
            bucket, is_first = _Bucket(), False
    _close(bucket, plan, "no other of its kind is left")
    return plan


def names_of(blocks: Iterable[CommBlock]) -> str:
    """The names of blocks' starts, shortened."""
    names = [block.start.name for block in blocks]
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest


def _is_too_large(block: CommBlock, caps: Caps, plan: BucketPlan) -> bool:
    size = block.event.payload_bytes
    if size <= caps.most:
        return False
    sizes = f"{format_bytes(size)} are more than a bucket of {format_bytes(caps.most)}"
    plan.refused.append(f"{block.start.name}: {sizes}; it travels alone")
    return True


def _obstacle(bucket: _Bucket, block: CommBlock, caps: Caps) -> str:
    """Why a block cannot join a bucket; empty where it can."""
    if not bucket.is_open_until(block.start):
        assert bucket.deadline is not None
        return f"{bucket.deadline.name} reads its result before {block.start.name}"
    if bucket.size + block.event.payload_bytes > caps.most:
        return f"{block.start.name} would not fit in too"
    return ""


def _would_end(bucket: _Bucket, reader: fx.Node, later: fx.Node | None) -> bool:
    """Whether one block's early reader alone would close a bucket that can go on."""
    return later is not None and reader < later and bucket.is_open_until(later)


def _close(bucket: _Bucket, plan: BucketPlan, why: str) -> None:
    if len(bucket.blocks) > 1:
        plan.buckets.append(bucket.blocks)
    elif bucket.blocks:
        (block,) = bucket.blocks
        plan.refused.append(f"{block.start.name}: alone in its bucket, {why}")
