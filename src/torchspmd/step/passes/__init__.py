"""Passes over a step's graph, one a file; ``default`` shows the usual order."""

from torchspmd.step.passes.comm_fusion import (
    comm_fusion_with_concat as comm_fusion_with_concat,
)
from torchspmd.step.passes.dead_code import remove_dead_code as remove_dead_code
from torchspmd.step.passes.dedupe import dedupe_collectives as dedupe_collectives
from torchspmd.step.passes.default import default_passes as default_passes
from torchspmd.step.passes.defer import defer_updates as defer_updates
from torchspmd.step.passes.iter_move import (
    iter_move_grads_and_optimizers as iter_move_grads_and_optimizers,
)
from torchspmd.step.passes.optimizer_copies import (
    remove_copy_from_optimizer as remove_copy_from_optimizer,
)
from torchspmd.step.passes.prefetch import prefetch_gathers as prefetch_gathers
from torchspmd.step.passes.schedule import schedule_comm_wait as schedule_comm_wait
from torchspmd.step.passes.split_optimizer import (
    split_fused_optimizer as split_fused_optimizer,
)
from torchspmd.step.passes.split_optimizer import split_optimizer as split_optimizer
