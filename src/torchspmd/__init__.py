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
from torchspmd.parallel import Plan, auto_plan, clip_grad_norm_, parallelize_module
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
    "CommDebugMode",
    "CommEvent",
    "DataParallel",
    "GraphModuleTransformation",
    "IterGraphModule",
    "Kind",
    "Ledger",
    "Phase",
    "Plan",
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
]

__version__ = "0.1.0"
