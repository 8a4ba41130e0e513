"""Lay a model over a mesh: styles, the loss and the gradient norm that go with them."""

from torchspmd.parallel.apply import parallelize_module
from torchspmd.parallel.clip import clip_grad_norm_
from torchspmd.parallel.experts import ExpertParallel, ReplicateParallel
from torchspmd.parallel.fused import FusedColwiseParallel, KeyValueParallel
from torchspmd.parallel.linear import ColwiseParallel, RowwiseParallel
from torchspmd.parallel.loss import vocab_parallel_cross_entropy
from torchspmd.parallel.plan.auto import auto_plan
from torchspmd.parallel.plan.plan import Plan
from torchspmd.parallel.prepare import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
from torchspmd.parallel.sequence import SequenceParallel
from torchspmd.parallel.style import ParallelStyle

__all__ = [
    "ColwiseParallel",
    "ExpertParallel",
    "FusedColwiseParallel",
    "KeyValueParallel",
    "ParallelStyle",
    "Plan",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "ReplicateParallel",
    "RowwiseParallel",
    "SequenceParallel",
    "auto_plan",
    "clip_grad_norm_",
    "parallelize_module",
    "vocab_parallel_cross_entropy",
]
