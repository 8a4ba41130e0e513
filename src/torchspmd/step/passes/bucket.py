"""Small collectives joined to buckets, so that fewer and larger ones are sent."""

import itertools
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import Kind, format_bytes
from torchspmd.errors import UsageError
from torchspmd.step.graph.aliases import is_view, node_arguments
from torchspmd.step.graph.argument_checks import check_flags, is_size
from torchspmd.step.graph.collectives import (
    CommBlock,
    earliest_place,
    get_all_comm_blocks,
    hoist,
    latest_place,
    writes_in_place,
)
from torchspmd.step.graph.metadata import owner_of
from torchspmd.step.graph.nodes import (
    HasGraph,
    NodeMaker,
    common_owner,
    replace_uses,
    tensor_value,
)
from torchspmd.step.graph.reduction_order import ring_chunks
from torchspmd.step.graph.reports import ORDERS, Outcome
from torchspmd.step.passes.runner import graph_optimization_pass

Layout = Literal["plain", "rank_major"]

_SHOWN = 3  # names in one line
_LARGEST_UNIT = 64 * 2**20  # of a block of modules that is gathered as one
_aten = torch.ops.aten
_CAST = _aten._to_copy.default
_STARTS: dict[Kind, Any] = {
    Kind.ALL_REDUCE: _torch.ALL_REDUCE,
    Kind.ALL_GATHER: _torch.ALL_GATHER,
    Kind.REDUCE_SCATTER: _torch.REDUCE_SCATTER,
}


@graph_optimization_pass(prerequisites=[], apply_after=[], undoes_others=False)
def comm_fusion_with_concat(
    gm: HasGraph,
    bucket_size_mb: float,
    *,
    first_bucket_mb: float | None = 1.0,
    layout: Layout = "plain",
    by_block: bool = False,
) -> Outcome:
    """Join all-reduces, reduce-scatters and all-gathers to buckets.

    Collectives of one kind, group, reduction, dtype and device are taken in graph order.
    A bucket starts once its last input is there, and ends before a result of it is read.
    Gathers of what the step takes in, as of sharded parameters, start with the first of
    their bucket; those of forward and of backward are in buckets of their own.
    The new collectives are called ``all_reduce_default``, ``all_reduce_default_1``, ...

    Args:
        gm: The graph module to edit.
        bucket_size_mb: MiB that no bucket exceeds. A larger tensor is sent alone.
        first_bucket_mb: The first bucket closes as soon as it holds this many MiB, so
            that communication starts early; None for no such bucket.
        layout: How an all-reduce's bucket lies in memory. ``"plain"``: one tensor after
            the other. ``"rank_major"``: each rank's chunk of all tensors together, with
            the chunk edges of gloo's ring, so that each element is added up in the order
            it had alone; costs a copy of each result.
        by_block: Gather and scatter the parameters of a block (an item of a list or a
            sequence of modules) in one bucket, whatever its size, as FSDP2 does; blocks
            are joined while they are less than ``bucket_size_mb``. All-reduces are
            joined by size alone.

    Example:
        >>> from torchspmd.step import compile
        >>> from torchspmd.testing import fake_mesh
        >>> def transformation(gm):
        ...     print(comm_fusion_with_concat(gm, 25).outcome.detail[0])
        ...     return gm
        >>> def step(model, batch):
        ...     model(batch).square().sum().backward()
        >>> with fake_mesh(4, ("dp",)):
        ...     train = compile(gm_transformation=transformation)(step)
        ...     train(torch.nn.Linear(8, 8), torch.ones(2, 8))
        all_reduce_default: 288 B from 2 (all_reduce, all_reduce_1)
    """
    check_flags("comm_fusion_with_concat", by_block=by_block)
    most, first = _limits(bucket_size_mb, first_bucket_mb, layout)
    blocks = [each for each in get_all_comm_blocks(gm) if each.kind in _STARTS]
    if (writer := writes_in_place(gm.graph)) is not None:
        reason = f"{writer.name} writes in place: fuse before new values do"
        return Outcome(len(blocks), 0, (reason,))
    refused = [line for line in map(_why_alone, blocks) if line]
    buckets = []
    followers = find_followers(blocks)
    able = [each for each in blocks if not _why_alone(each)]
    for alike in _alike(able, followers):
        members = _units(alike, by_block=by_block)
        filled, left = _fill(members, followers, most, first)
        buckets += filled
        refused += left
    buckets.sort(key=lambda bucket: bucket[-1].start)
    starts = [_fuse(gm.graph, bucket, followers, layout) for bucket in buckets]
    _start_early(gm, set(starts))
    detail = map(_describe, starts, buckets)
    kept = [_orders(bucket, followers, layout) for bucket in buckets]
    orders = tuple(each for each in ORDERS if all(each in these for these in kept))
    return Outcome(
        len(blocks), sum(map(len, buckets)), tuple(refused), tuple(detail), orders
    )


def _limits(
    bucket_size_mb: float, first_bucket_mb: float | None, layout: str
) -> tuple[int, int]:
    """Bytes that no bucket exceeds, and that close the first one."""
    first = bucket_size_mb if first_bucket_mb is None else first_bucket_mb
    problems = []
    if not is_size(bucket_size_mb) or bucket_size_mb == 0:
        problems.append(
            f"bucket_size_mb={bucket_size_mb!r}: a bucket needs a size above 0, a finite "
            "number of MiB (for one bucket, more than all gradients have)"
        )
    if first_bucket_mb is not None and not (is_size(first) and first > 0):
        problems.append(
            f"first_bucket_mb={first_bucket_mb!r}: use more than 0, a finite number of "
            "MiB, or None"
        )
    if layout not in get_args(Layout):
        problems.append(f"layout={layout!r}: choose 'plain' or 'rank_major'")
    if problems:
        raise UsageError("comm_fusion_with_concat: " + "; ".join(problems) + ".")
    return int(bucket_size_mb * 2**20), int(first * 2**20)


def _why_alone(block: CommBlock) -> str:
    """Why a block cannot be in any bucket; empty where it can."""
    if block.problem:
        return block.problem
    name = block.start.name
    if block.start.target is not _STARTS[block.kind] or len(block.inputs) != 1:
        return f"{name}: only plain functional collectives of one tensor are fused"
    value = block.inputs[0].meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(value.numel(), int):
        return f"{name}: the size of its input is not known"
    if block.kind is Kind.ALL_GATHER and value.ndim == 0:
        return f"{name}: it gathers single numbers"
    return f"{name}: it sends nothing" if value.numel() == 0 else ""


_Followers = Mapping[fx.Node, CommBlock]


def find_followers(blocks: Sequence[CommBlock]) -> dict[fx.Node, CommBlock]:
    """All-reduces of what was scattered, by the start of the scatter: hybrid sharding.

    Nothing else reads what was scattered, so that a bucket is scattered and reduced.
    """
    by_input = {
        block.inputs[0]: block
        for block in blocks
        if block.kind is Kind.ALL_REDUCE and len(block.inputs) == 1
    }
    return {
        block.start: by_input[block.wait]
        for block in blocks
        if block.kind is Kind.REDUCE_SCATTER
        and len(block.waits) == 1
        and block.wait in by_input
        and len(block.wait.users) == 1
        and not by_input[block.wait].problem
    }


def _alike(blocks: Sequence[CommBlock], followers: _Followers) -> list[list[CommBlock]]:
    """Blocks that may be in one bucket: of one kind, group, reduction, dtype and device.

    A parameter that is gathered for forward would be kept until backward in its bucket.
    """
    found: dict[Any, list[CommBlock]] = {}
    following = {id(block) for block in followers.values()}
    for block in blocks:
        if id(block) in following:
            continue
        value = tensor_value(block.inputs[0])
        phase = owner_of(block.start).phase if block.gathers_inputs() else None
        key = block.kind, *_terms(block), value.dtype, value.device, phase
        if (follower := followers.get(block.start)) is not None:
            key += _terms(follower)
        found.setdefault(key, []).append(block)
    return list(found.values())


def _terms(block: CommBlock) -> tuple[Any, ...]:
    return block.group.name, block.argument("reduce_op")


# ----------------------------------------------------------------------------
# Which collectives go into one bucket, from sizes and places alone.


@dataclass(frozen=True, slots=True)
class _Unit:
    """What stays together in a bucket: a collective, or those of a block of modules."""

    name: str
    size: int
    is_whole: bool  # whether its members stay together at any size


def _units(
    blocks: Sequence[CommBlock], *, by_block: bool
) -> list[tuple[CommBlock, _Unit]]:
    """Each collective with what it stays together with."""
    # Of other gathers, those of activations, nothing is known to be needed together.
    is_gather = blocks[0].kind is Kind.ALL_GATHER
    is_sharded = blocks[0].kind is Kind.REDUCE_SCATTER or (
        is_gather and all(block.gathers_inputs() for block in blocks)
    )
    if not by_block or not is_sharded:
        return [(block, _alone(block)) for block in blocks]
    places = [block_of(owner_of(block.start).module) for block in blocks]
    sizes: Counter[str] = Counter()
    for block, place in zip(blocks, places, strict=True):
        sizes[place] += block.event.payload_bytes
    found = []
    for block, place in zip(blocks, places, strict=True):
        is_whole = place != "" and sizes[place] <= _LARGEST_UNIT
        unit = _Unit(place, sizes[place], is_whole) if is_whole else _alone(block)
        found.append((block, unit))
    return found


def _alone(block: CommBlock) -> _Unit:
    return _Unit(block.start.name, block.event.payload_bytes, is_whole=False)


def block_of(path: str) -> str:
    """The outermost item of a list of modules that a module is in; empty for none.

    >>> block_of("GPT.layers.3.mlp.0"), block_of("GPT.head")
    ('GPT.layers.3', '')
    """
    parts = path.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else ""


@dataclass(slots=True)
class _Bucket:
    """A bucket that is being filled."""

    blocks: list[CommBlock] = field(default_factory=list)
    size: int = 0
    unit: _Unit | None = None  # of the last member
    deadline: fx.Node | None = None  # the first reader of a member

    def add(self, block: CommBlock, unit: _Unit, reader: fx.Node) -> None:
        self.blocks.append(block)
        self.size += block.event.payload_bytes
        self.unit = unit
        self.deadline = reader if self.deadline is None else min(self.deadline, reader)

    def is_open_until(self, node: fx.Node | None) -> bool:
        """Whether all results are still unread when a node runs."""
        return node is None or self.deadline is None or node < self.deadline

    def obstacle(self, block: CommBlock, unit: _Unit, most: int) -> str:
        """Why a block cannot join; empty where it can."""
        if not self.is_open_until(block.start):
            assert self.deadline is not None
            return f"{self.deadline.name} reads its result before {block.start.name}"
        if self.blocks and self.unit != unit and self.size + unit.size > most:
            return f"{block.start.name} would not fit in too"
        return ""


def _fill(
    members: Sequence[tuple[CommBlock, _Unit]],
    followers: _Followers,
    most: int,
    first: int,
) -> tuple[list[list[CommBlock]], list[str]]:
    """Fill buckets with blocks that may be fused with each other, in graph order.

    Args:
        members: What is fused, and what each stays together with.
        followers: What is reduced after it was scattered.
        most: Bytes that no bucket exceeds.
        first: The first bucket closes as soon as it holds this many bytes, so that the
            first communication starts early.

    Returns:
        The buckets of several members, and why other blocks are in none, a line each.
    """
    buckets: list[list[CommBlock]] = []
    refused = [
        f"{block.start.name}: {format_bytes(block.event.payload_bytes)} are more than a "
        f"bucket of {format_bytes(most)}; it is sent alone"
        for block, unit in members
        if unit.size > most and not unit.is_whole
    ]

    def close(why: str) -> _Bucket:
        if len(bucket.blocks) > 1:
            buckets.append(bucket.blocks)
        elif bucket.blocks:
            name = bucket.blocks[0].start.name
            refused.append(f"{name}: alone in its bucket, {why}")
        return _Bucket()

    members = [each for each in members if each[1].is_whole or each[1].size <= most]
    starts = [*(block.start for block, _ in members), None]
    bucket, is_first = _Bucket(), True
    for (block, unit), later in zip(members, starts[1:], strict=True):
        if obstacle := bucket.obstacle(block, unit, most):
            bucket, is_first = close(obstacle), False
        reader = _deadline(followers.get(block.start, block))
        # One early reader does not close a bucket that can go on without its block.
        would_end = later is not None and reader < later and bucket.is_open_until(later)
        if bucket.blocks and would_end:
            early = f"{reader.name} reads its result before the next one starts"
            refused.append(f"{block.start.name}: {early}")
            continue
        bucket.add(block, unit, reader)
        if is_first and bucket.size >= first and not unit.is_whole:
            bucket, is_first = close("the first bucket is full"), False
    close("no other of its kind is left")
    return buckets, refused


def _deadline(block: CommBlock) -> fx.Node:
    """The node before which a block's bucket must start.

    None, so the output, for what needs the step's inputs alone: its bucket starts where
    the first member does.
    """
    if block.gathers_inputs():
        return block.start.graph.output_node()
    return latest_place(block)


def _fuse(
    graph: fx.Graph, bucket: list[CommBlock], followers: _Followers, layout: str
) -> fx.Node:
    """Replace blocks by one, where the last starts; where the first does, for inputs."""
    if bucket[0].gathers_inputs():
        for before, block in itertools.pairwise(bucket):
            hoist(block, before.start)
    rows = _lay_out(bucket, layout)
    last = bucket[-1].start
    make = NodeMaker(graph, common_owner([block.start for block in bucket]))
    casts = _shared_casts(bucket)
    owned = [_tail_of(block, followers) for block in bucket]
    tails = _shared_tails(bucket, owned)
    with graph.inserting_before(last):
        inputs = [_source(cast) for cast in casts] or [b.inputs[0] for b in bucket]
        joined = _pack(make, inputs, rows)
        if casts:
            joined = make.call(_CAST, joined, **casts[0].kwargs)
        start = make.call(last.target, joined, *list(node_arguments(last).values())[1:])
        made = make.call(_torch.WAIT, start)
        for node in tails[0][1:]:
            made = make.call(node.target, made, *node.args[1:], **node.kwargs)
        results = _unpack(make, made, bucket, [tail[-1] for tail in tails], rows)
    # What scales or casts a result comes after it: move those of earlier members.
    taken = {node for tail in tails for node in tail}
    for node in [node for tail in owned for node in tail if node < last]:
        if node not in taken:
            last.prepend(node)
    ends = [
        (tail[-1], *block.waits[1:]) for block, tail in zip(bucket, tails, strict=True)
    ]
    replace_uses(
        {e: result for own, result in zip(ends, results, strict=True) for e in own}
    )
    for block, tail in zip(bucket, tails, strict=True):
        for node in (*reversed(tail), *block.waits[1:], block.start):
            graph.erase_node(node)
    for cast in casts:
        graph.erase_node(cast)
    return start


def _shared_casts(bucket: Sequence[CommBlock]) -> list[fx.Node]:
    """The casts of all inputs, where they can be one cast of the bucket."""
    casts = [block.inputs[0] for block in bucket]
    if not all(
        cast.target is _CAST and set(cast.kwargs) == {"dtype"} and cast in block.head
        for cast, block in zip(casts, bucket, strict=True)
    ):
        return []
    pairs = [(tensor_value(cast), tensor_value(_source(cast))) for cast in casts]
    dtypes = {(made.dtype, given.dtype) for made, given in pairs}
    keeps_strides = all(made.stride() == given.stride() for made, given in pairs)
    return casts if len(dtypes) == 1 and keeps_strides else []


def _source(cast: fx.Node) -> fx.Node:
    (source,) = cast.all_input_nodes
    return source


def _tail_of(block: CommBlock, followers: _Followers) -> tuple[fx.Node, ...]:
    """The tail of a block, with what reduces its result once more."""
    follower = followers.get(block.start)
    if follower is None:
        return block.tail
    return follower.start, follower.wait, *follower.tail


def _shared_tails(
    bucket: Sequence[CommBlock], owned: Sequence[tuple[fx.Node, ...]]
) -> list[list[fx.Node]]:
    """Of each block its wait, and what scales and casts all results alike behind it.

    The bucket is scaled and cast instead, once.
    """
    tails = [[block.wait] for block in bucket]
    if any(len(block.waits) > 1 for block in bucket):
        return tails
    while all(len(tail[-1].users) == 1 for tail in tails):
        after = [next(iter(tail[-1].users)) for tail in tails]
        forms = {(node.target, repr((node.args[1:], node.kwargs))) for node in after}
        is_tail = all(n in tail for n, tail in zip(after, owned, strict=True))
        if len(forms) > 1 or not is_tail or not _is_elementwise(after[0]):
            break
        for tail, node in zip(tails, after, strict=True):
            tail.append(node)
    return tails


def _is_elementwise(node: fx.Node) -> bool:
    if node.target in (_torch.ALL_REDUCE, _torch.WAIT):
        return True
    if node.target is _CAST:
        return set(node.kwargs) == {"dtype"}
    factors = node.args[1:]
    is_scaling = node.target in (_aten.div.Tensor, _aten.mul.Tensor)
    return is_scaling and len(factors) == 1 and isinstance(factors[0], (int, float))


def _start_early(gm: HasGraph, starts: set[fx.Node]) -> None:
    """Put each new start behind its last input; none overtakes another on its group.

    Gathers of the step's inputs could all start at once, and stay.
    """
    before: dict[str, fx.Node] = {}
    for block in get_all_comm_blocks(gm):
        if block.start in starts and not block.gathers_inputs():
            hoist(block, earliest_place(block, before.get(block.group.name)))
        before[block.group.name] = block.start


def _orders(
    bucket: list[CommBlock], followers: _Followers, layout: str
) -> tuple[str, ...]:
    """Reduction orders under which a bucket's results keep their bits."""
    if bucket[0].start in followers:
        return ("rank",)
    if bucket[0].kind is Kind.ALL_GATHER:
        return ORDERS
    rows = _lay_out(bucket, layout)
    return ("rank", "ring") if _keeps_ring_bits(bucket, rows) else ("rank",)


def _describe(start: fx.Node, bucket: list[CommBlock]) -> str:
    size = format_bytes(sum(block.event.payload_bytes for block in bucket))
    return f"{start.name}: {size} from {len(bucket)} ({_names(bucket)})"


def _names(blocks: Sequence[CommBlock]) -> str:
    names = [block.start.name for block in blocks]
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest


# ----------------------------------------------------------------------------
# How tensors are packed into a bucket, and unpacked.


@dataclass(frozen=True, slots=True)
class _Rows:
    """A bucket of ``num_rows`` rows, each with a piece of every tensor.

    Attributes:
        num_rows: One, or one for each rank.
        widths: How much of a row each tensor takes.
        spare: Elements at the end of a row that hold nothing.
    """

    num_rows: int
    widths: tuple[int, ...]
    spare: int = 0


def _lay_out(blocks: Sequence[CommBlock], layout: str) -> _Rows:
    """The rows of a bucket of all-reduces, reduce-scatters or all-gathers."""
    kind, num_ranks = blocks[0].kind, blocks[0].group.size
    sizes = [tensor_value(block.inputs[0]).numel() for block in blocks]
    if kind is Kind.REDUCE_SCATTER:
        widths = tuple(size // num_ranks for size in sizes)
    elif kind is Kind.ALL_GATHER or layout == "plain":
        return _Rows(1, tuple(sizes))
    else:
        widths = tuple(_ring_chunk(blocks, size) for size in sizes)
    spare = _spare(blocks, sum(widths)) if layout == "rank_major" else 0
    return _Rows(num_ranks, widths, spare)


def _pack(make: NodeMaker, inputs: Sequence[Any], rows: _Rows) -> fx.Node:
    """Join inputs to one flat tensor."""
    parts = [
        _as_rows(make, each, rows.num_rows, width)
        for each, width in zip(inputs, rows.widths, strict=True)
    ]
    if rows.num_rows == 1:
        return make.call(_aten.cat.default, parts)
    joined = make.call(_aten.cat.default, parts, 1)
    if rows.spare:
        joined = make.call(_aten.constant_pad_nd.default, joined, [0, rows.spare])
    return make.call(_aten.view.default, joined, [-1])


def _unpack(
    make: NodeMaker,
    bucket: fx.Node,
    blocks: Sequence[CommBlock],
    likes: Sequence[fx.Node],
    rows: _Rows,
) -> list[fx.Node]:
    """The results of blocks, from the result of their bucket, each like another node.

    What leaves the graph is copied: the caller must not keep the whole bucket alive, nor
    get tensors that share memory.
    """
    kind, num_ranks = blocks[0].kind, blocks[0].group.size
    num_rows = 1 if kind is Kind.REDUCE_SCATTER else rows.num_rows
    if kind is Kind.ALL_GATHER:
        num_rows = num_ranks
    widths = [*rows.widths, rows.spare] if rows.spare else list(rows.widths)
    if num_rows == 1:
        pieces = make.call(_aten.split_with_sizes.default, bucket, widths)
    else:
        width = sum(widths)
        table = make.call(_aten.view.default, bucket, [num_rows, width])
        pieces = make.call(_aten.split_with_sizes.default, table, widths, 1)
    return [_restore(make, pieces, number, like) for number, like in enumerate(likes)]


def _keeps_ring_bits(blocks: Sequence[CommBlock], rows: _Rows) -> bool:
    """Whether each element of a sum keeps its place in gloo's ring.

    Gloo scatters what it has reduced whole, so that a ring's chunks and a rank's part of
    the result may have different edges.
    """
    num_ranks = blocks[0].group.size
    if rows.num_rows != num_ranks:
        return False
    row = sum(rows.widths) + rows.spare
    sizes = [tensor_value(block.inputs[0]).numel() for block in blocks]
    chunks = tuple(_ring_chunk(blocks, size) for size in sizes)
    return chunks == rows.widths and _ring_chunk(blocks, row * num_ranks) == row


def _as_rows(make: NodeMaker, source: fx.Node, num_rows: int, width: int) -> fx.Node:
    value = tensor_value(source)
    if num_rows == 1:
        is_flat = value.ndim == 1
        return source if is_flat else make.call(_aten.reshape.default, source, [-1])
    missing = num_rows * width - value.numel()
    if missing:
        source = make.call(_aten.reshape.default, source, [-1])
        source = make.call(_aten.constant_pad_nd.default, source, [0, missing])
    return make.call(_aten.reshape.default, source, [num_rows, width])


def _restore(make: NodeMaker, pieces: fx.Node, number: int, node: fx.Node) -> fx.Node:
    like = tensor_value(node)
    piece = make.call(operator.getitem, pieces, number)
    if _leaves(node):
        piece = make.call(_aten.clone.default, piece)
    if tensor_value(piece).numel() != like.numel():
        flat = make.call(_aten.reshape.default, piece, [-1])
        piece = make.call(_aten.slice.Tensor, flat, 0, 0, like.numel())
    if tensor_value(piece).shape != like.shape:
        piece = make.call(_aten.reshape.default, piece, list(like.shape))
    if tensor_value(piece).stride() != like.stride():
        # With other strides some operators take another kernel, and give other bits.
        piece = make.call(_aten.clone.default, piece)
    return piece


def _leaves(node: fx.Node) -> bool:
    """Whether a value, or a view of it, is an output of the graph."""
    return any(
        user.op == "output" or (is_view(user) and _leaves(user)) for user in node.users
    )


def _spare(blocks: Sequence[CommBlock], width: int) -> int:
    """How much longer a row must be for a ring to cut the bucket between rows."""
    longer = width
    while (cut := _ring_chunk(blocks, longer * blocks[0].group.size)) != longer:
        longer = cut  # never shorter than a row, and it stays once it is even
    return longer - width


def _ring_chunk(blocks: Sequence[CommBlock], num_elements: int) -> int:
    element = tensor_value(blocks[0].inputs[0]).element_size()
    return ring_chunks(num_elements, element, blocks[0].group.size)[0][1]
