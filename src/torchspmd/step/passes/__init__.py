"""Passes over a step's graph, one family a file; ``pipeline`` shows the usual order."""

from torchspmd.step.passes.bucket import comm_fusion_with_concat
from torchspmd.step.passes.dedupe import dedupe_collectives, remove_dead_code
from torchspmd.step.passes.defer import defer_updates, iter_move_grads_and_optimizers
from torchspmd.step.passes.embedding_rows import gather_embedding_gradients
from torchspmd.step.passes.optimizer import (
    remove_copy_from_optimizer,
    split_fused_optimizer,
    split_optimizer,
)
from torchspmd.step.passes.overlap import prefetch_gathers, schedule_comm_wait
from torchspmd.step.passes.pipeline import default_passes

__all__ = [
    "comm_fusion_with_concat",
    "dedupe_collectives",
    "default_passes",
    "defer_updates",
    "gather_embedding_gradients",
    "iter_move_grads_and_optimizers",
    "prefetch_gathers",
    "remove_copy_from_optimizer",
    "remove_dead_code",
    "schedule_comm_wait",
    "split_fused_optimizer",
    "split_optimizer",
]
