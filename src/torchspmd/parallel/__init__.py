"""Lay a model over a mesh: styles, the loss and the gradient norm that go with them."""

from torchspmd.parallel.apply import parallelize_module as parallelize_module
from torchspmd.parallel.auto import auto_plan as auto_plan
from torchspmd.parallel.clip import clip_grad_norm_ as clip_grad_norm_
from torchspmd.parallel.colwise import ColwiseParallel as ColwiseParallel
from torchspmd.parallel.experts import ExpertParallel as ExpertParallel
from torchspmd.parallel.experts import ReplicateParallel as ReplicateParallel
from torchspmd.parallel.fused import FusedColwiseParallel as FusedColwiseParallel
from torchspmd.parallel.fused import KeyValueParallel as KeyValueParallel
from torchspmd.parallel.loss import (
    vocab_parallel_cross_entropy as vocab_parallel_cross_entropy,
)
from torchspmd.parallel.plan import Plan as Plan
from torchspmd.parallel.prepare import PrepareModuleInput as PrepareModuleInput
from torchspmd.parallel.prepare import (
    PrepareModuleInputOutput as PrepareModuleInputOutput,
)
from torchspmd.parallel.prepare import PrepareModuleOutput as PrepareModuleOutput
from torchspmd.parallel.rowwise import RowwiseParallel as RowwiseParallel
from torchspmd.parallel.sequence import SequenceParallel as SequenceParallel
from torchspmd.parallel.style import ParallelStyle as ParallelStyle
