"""Lay a model over a mesh, see every byte it sends, prove it right, run it as one graph."""

from torchspmd.comm import (
    CommEvent,
    Kind,
    Ledger,
    Phase,
    diff_ledgers,
    load_ledger,
    save_ledger,
)
from torchspmd.errors import SpmdError
from torchspmd.local import local_map
from torchspmd.parallel import (
    ColwiseParallel,
    ExpertParallel,
    FusedColwiseParallel,
    KeyValueParallel,
    ParallelStyle,
    Plan,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    ReplicateParallel,
    RowwiseParallel,
    SequenceParallel,
    auto_plan,
    clip_grad_norm_,
    parallelize_module,
    vocab_parallel_cross_entropy,
)
from torchspmd.step import (
    DataParallel,
    GraphModuleTransformation,
    IterGraphModule,
    compile,
    run_virtual,
)
from torchspmd.trace import CommDebugMode
from torchspmd.verify import check_parity, expect

__all__ = [
    "ColwiseParallel",
    "CommDebugMode",
    "CommEvent",
    "DataParallel",
    "ExpertParallel",
    "FusedColwiseParallel",
    "GraphModuleTransformation",
    "IterGraphModule",
    "KeyValueParallel",
    "Kind",
    "Ledger",
    "ParallelStyle",
    "Phase",
    "Plan",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "ReplicateParallel",
    "RowwiseParallel",
    "SequenceParallel",
    "SpmdError",
    "auto_plan",
    "check_parity",
    "clip_grad_norm_",
    "compile",
    "diff_ledgers",
    "expect",
    "load_ledger",
    "local_map",
    "parallelize_module",
    "run_virtual",
    "save_ledger",
    "vocab_parallel_cross_entropy",
]

__version__ = "0.1.0"
