"""Passes over a step's graph, one a file; ``default`` shows the usual order."""

from torchspmd.step.passes.comm_fusion import comm_fusion_with_concat
from torchspmd.step.passes.dead_code import remove_dead_code
from torchspmd.step.passes.dedupe import dedupe_collectives
from torchspmd.step.passes.default import default_passes
from torchspmd.step.passes.defer import defer_updates
from torchspmd.step.passes.embedding_gradients import gather_embedding_gradients
from torchspmd.step.passes.iter_move import iter_move_grads_and_optimizers
from torchspmd.step.passes.optimizer_copies import remove_copy_from_optimizer
from torchspmd.step.passes.prefetch import prefetch_gathers
from torchspmd.step.passes.schedule import schedule_comm_wait
from torchspmd.step.passes.split_optimizer import split_fused_optimizer, split_optimizer

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
