"""The default passes, in their order."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

from torchspmd.comm import Kind
from torchspmd.step.graph.collectives import events_of
from torchspmd.step.graph.cost import CostModel, check_cost, device_of
from torchspmd.step.graph.memory import predict_peak
from torchspmd.step.graph.options import check_bucket_size, check_flags, check_overlap
from torchspmd.step.graph.reports import PassReport
from torchspmd.step.passes.bucket import comm_fusion_with_concat
from torchspmd.step.passes.dedupe import dedupe_collectives
from torchspmd.step.passes.defer import defer_updates
from torchspmd.step.passes.embedding_rows import gather_embedding_gradients
from torchspmd.step.passes.optimizer import remove_copy_from_optimizer
from torchspmd.step.passes.overlap import prefetch_gathers, schedule_comm_wait

_SMALLEST_MB, _LARGEST_MB, _MORE = 1.0, 64.0, 2.0
_IN_FLIGHT = 2  # buckets that are gathered where memory is at its peak
_KEPT = 0.01  # of the peak memory


def default_passes(
    *,
    bucket_size_mb: float | None = None,
    overlap_iterations: bool | Literal["auto"] = False,
    gather_embeddings: bool = False,
    cost: CostModel | None = None,
) -> tuple[Callable[[Any], Any], ...]:
    """The passes of ``GraphModuleTransformation(enable_graph_optimization=True)``.

    Args:
        bucket_size_mb: How much one fused collective carries at most; by default a part
            of all gradients, so that there is something to overlap with.
        overlap_iterations: Also leave updates for the next step (``defer_updates``);
            ``"auto"`` does so only where that is simulated to be faster.
        gather_embeddings: Also send embeddings' gradients as the rows that were looked
            up, where that is less (``gather_embedding_gradients``).
        cost: What the size of buckets and the order of deferred reductions are chosen by.
    """
    check_bucket_size(bucket_size_mb, "default_passes")
    check_flags("default_passes", gather_embeddings=gather_embeddings)
    check_overlap("default_passes", overlap_iterations)
    check_cost(cost, "default_passes")
    passes: tuple[Callable[[Any], Any], ...] = (
        _dedupe,  # the same bytes are not sent twice
        functools.partial(_fuse, bucket_size_mb=bucket_size_mb, cost=cost),
        # fully sharded parameters, before the layers that need them
        functools.partial(_prefetch, bucket_size_mb=bucket_size_mb, cost=cost),
        schedule_comm_wait,  # starts early, waits late
        remove_copy_from_optimizer,
    )
    if gather_embeddings:  # before any of them is in a bucket
        passes = (functools.partial(gather_embedding_gradients, cost=cost), *passes)
    if overlap_iterations:
        is_auto = overlap_iterations == "auto"
        passes += (functools.partial(defer_updates, cost=cost, only_if_faster=is_auto),)
    return passes


def _dedupe(gm: Any) -> PassReport:
    """Whole parameters that cost next to no memory are kept from forward to backward."""
    peak = predict_peak(gm.graph, frozenset()).total_bytes / 2**20
    report: PassReport = dedupe_collectives(gm, keep_mb=_KEPT * peak)
    return report


def _or_guess(gm: Any, cost: CostModel | None) -> CostModel:
    return cost or CostModel.for_device(device_of(gm.graph))


def _prefetch(
    gm: Any, bucket_size_mb: float | None, cost: CostModel | None
) -> PassReport:
    """Two buckets may be on their way when memory is at its peak, as FSDP2 has them."""
    size = choose_bucket_size(gm, cost) if bucket_size_mb is None else bucket_size_mb
    report: PassReport = prefetch_gathers(
        gm, cost=_or_guess(gm, cost), memory_budget_mb=_IN_FLIGHT * size
    )
    return report


def _fuse(gm: Any, bucket_size_mb: float | None, cost: CostModel | None) -> PassReport:
    size = choose_bucket_size(gm, cost) if bucket_size_mb is None else bucket_size_mb
    report: PassReport = comm_fusion_with_concat(gm, size, by_block=True)
    return report


def choose_bucket_size(gm: Any, cost: CostModel | None = None) -> float:
    """Megabytes for a bucket, between 1 and 64.

    What the next forward needs first is ready last: the smaller its bucket, the less of it
    is exposed. But each bucket costs the latency of a collective. With n buckets that take
    w seconds on the network and l seconds each to begin, w / n + n * l is least where n is
    the root of w / l; where computing takes longer, most of n * l is hidden, so there are
    twice as many. Where the network is the limit it is idle until the first bucket is
    computed: there computing counts instead of w.
    """
    check_cost(cost, "choose_bucket_size")
    cost = _or_guess(gm, cost)
    events = [
        event
        for _, event in events_of(gm.graph)
        if event.kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)
    ]
    wire = sum(event.wire_bytes for event in events) / cost.network_bytes
    computing = sum(map(cost.compute_seconds, gm.graph.nodes))
    more = min(_MORE, max(1.0, _MORE * computing / max(wire, 1e-9)))
    shorter = min(wire, computing) / max(cost.latency_seconds, 1e-9)
    count = max(1.0, more * math.sqrt(shorter))
    megabytes = sum(event.payload_bytes for event in events) / 2**20
    return min(_LARGEST_MB, max(_SMALLEST_MB, megabytes / count))
