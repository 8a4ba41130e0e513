"""Small collectives joined to buckets, so that fewer and larger ones travel."""

from typing import Literal, get_args

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import Kind, format_bytes
from torchspmd.errors import UsageError
from torchspmd.step.graph.comm_blocks import (
    CommBlock,
    get_all_comm_blocks,
    node_arguments,
    writes_in_place,
)
from torchspmd.step.graph.moves import earliest_place, hoist
from torchspmd.step.graph.new_nodes import NodeMaker, common_owner
from torchspmd.step.graph.queries import HasGraph
from torchspmd.step.graph.reports import ORDERS, Outcome
from torchspmd.step.passes.bucket_layout import (
    STARTS,
    keeps_ring_bits,
    lay_out,
    pack,
    unpack,
)
from torchspmd.step.passes.buckets import BucketPlan, Caps, names_of, plan_buckets
from torchspmd.step.passes.memory_budget import is_size
from torchspmd.step.passes.ordering import graph_optimization_pass

Layout = Literal["plain", "rank_major"]
_Key = tuple[Kind, str, object, torch.dtype, torch.device]


@graph_optimization_pass(prerequisites=[], apply_after=[], undoes_others=False)
def comm_fusion_with_concat(
    gm: HasGraph,
    bucket_size_mb: float,
    *,
    first_bucket_mb: float | None = 1.0,
    layout: Layout = "plain",
) -> Outcome:
    """Join all-reduces, reduce-scatters and all-gathers to buckets.

    Collectives of one kind, group, reduction, dtype and device are taken in graph order.
    A bucket starts once its last input is there, and ends before a result of it is read.
    The new collectives are called ``all_reduce_default``, ``all_reduce_default_1``, ...

    Args:
        gm: The graph module to edit.
        bucket_size_mb: MiB that no bucket exceeds. A larger tensor travels alone.
        first_bucket_mb: The first bucket closes as soon as it holds this many MiB, so
            that communication starts early; None for no such bucket.
        layout: How an all-reduce's bucket lies in memory. ``"plain"``: one tensor after
            the other. ``"rank_major"``: each rank's chunk of all tensors together, with
            the chunk edges of gloo's ring, so that each element is added up in the order
            it had alone; costs a copy of each result.

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
    caps = _caps(bucket_size_mb, first_bucket_mb, layout)
    blocks = [each for each in get_all_comm_blocks(gm) if each.kind in STARTS]
    if (writer := writes_in_place(gm.graph)) is not None:
        reason = f"{writer.name} writes in place: fuse before new values do"
        return Outcome(len(blocks), 0, (reason,))
    refused = [line for line in map(_obstacle, blocks) if line]
    plans = _plan([block for block in blocks if not _obstacle(block)], caps)
    refused += [line for plan in plans for line in plan.refused]
    buckets = sorted(
        (bucket for plan in plans for bucket in plan.buckets),
        key=lambda bucket: bucket[-1].start,
    )
    starts = [_fuse(gm.graph, bucket, layout) for bucket in buckets]
    _start_early(gm, set(starts))
    detail = map(_describe, starts, buckets)
    kept = [_orders(bucket, layout) for bucket in buckets]
    orders = tuple(each for each in ORDERS if all(each in these for these in kept))
    return Outcome(
        len(blocks), sum(map(len, buckets)), tuple(refused), tuple(detail), orders
    )


def _caps(bucket_size_mb: float, first_bucket_mb: float | None, layout: str) -> Caps:
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
    return Caps(int(bucket_size_mb * 2**20), int(first * 2**20))


def _obstacle(block: CommBlock) -> str:
    """Why a block cannot be in any bucket; empty where it can."""
    if block.problem:
        return block.problem
    name = block.start.name
    if block.start.target is not STARTS[block.kind] or len(block.inputs) != 1:
        return f"{name}: only plain functional collectives of one tensor are fused"
    value = block.inputs[0].meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(value.numel(), int):
        return f"{name}: the size of its input is not known"
    if block.kind is Kind.ALL_GATHER and value.ndim == 0:
        return f"{name}: it gathers single numbers"
    return f"{name}: it sends nothing" if value.numel() == 0 else ""


def _plan(blocks: list[CommBlock], caps: Caps) -> list[BucketPlan]:
    by_key: dict[_Key, list[CommBlock]] = {}
    for block in blocks:
        by_key.setdefault(_key(block), []).append(block)
    return [plan_buckets(alike, caps) for alike in by_key.values()]


def _key(block: CommBlock) -> _Key:
    value = block.inputs[0].meta["val"]
    reduction = block.argument("reduce_op")
    return block.kind, block.group.name, reduction, value.dtype, value.device


def _fuse(graph: fx.Graph, bucket: list[CommBlock], layout: str) -> fx.Node:
    """Replace blocks by one; it stands where the last of them starts."""
    rows = lay_out(bucket, layout)
    last = bucket[-1].start
    make = NodeMaker(graph, common_owner([block.start for block in bucket]))
    with graph.inserting_before(last):
        joined = pack(make, bucket, rows)
        start = make.call(last.target, joined, *list(node_arguments(last).values())[1:])
        results = unpack(make, make.call(_torch.WAIT, start), bucket, rows)
    # What scales or casts a result stands behind it: those of earlier members move on.
    for node in [node for block in bucket for node in block.tail if node < last]:
        last.prepend(node)
    for block, result in zip(bucket, results, strict=True):
        for wait in block.waits:
            wait.replace_all_uses_with(result)
            graph.erase_node(wait)
        graph.erase_node(block.start)
    return start


def _start_early(gm: HasGraph, starts: set[fx.Node]) -> None:
    """Put each new start behind its last input; none overtakes another on its group.

    Gathers of the step's inputs could all start at once, and stay.
    """
    before: dict[str, fx.Node] = {}
    for block in get_all_comm_blocks(gm):
        if block.start in starts and not block.gathers_inputs():
            hoist(block, earliest_place(block, before.get(block.group.name)))
        before[block.group.name] = block.start


def _orders(bucket: list[CommBlock], layout: str) -> tuple[str, ...]:
    """Reduction orders under which a bucket's results keep their bits."""
    if bucket[0].kind is Kind.ALL_GATHER:
        return ORDERS
    rows = lay_out(bucket, layout)
    return ("rank", "ring") if keeps_ring_bits(bucket, rows) else ("rank",)


def _describe(start: fx.Node, bucket: list[CommBlock]) -> str:
    size = format_bytes(sum(block.event.payload_bytes for block in bucket))
    return f"{start.name}: {size} from {len(bucket)} ({names_of(bucket)})"
