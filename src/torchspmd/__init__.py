"""Lay a model over a mesh, see every byte it sends, prove it right, run it as one graph.

Importing the package loads nothing else, not even torch: a name is loaded when it is first
used. So ``torchspmd --help`` answers at once.
"""

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
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
else:  # type checkers do not see __getattr__: with it, any name would do
    import importlib

    # Which package has a name, as in the imports above.
    _PACKAGES = {
        "ColwiseParallel": "parallel",
        "CommDebugMode": "trace",
        "CommEvent": "comm",
        "DataParallel": "step",
        "ExpertParallel": "parallel",
        "FusedColwiseParallel": "parallel",
        "GraphModuleTransformation": "step",
        "IterGraphModule": "step",
        "KeyValueParallel": "parallel",
        "Kind": "comm",
        "Ledger": "comm",
        "ParallelStyle": "parallel",
        "Phase": "comm",
        "Plan": "parallel",
        "PrepareModuleInput": "parallel",
        "PrepareModuleInputOutput": "parallel",
        "PrepareModuleOutput": "parallel",
        "ReplicateParallel": "parallel",
        "RowwiseParallel": "parallel",
        "SequenceParallel": "parallel",
        "SpmdError": "errors",
        "auto_plan": "parallel",
        "check_parity": "verify",
        "clip_grad_norm_": "parallel",
        "compile": "step",
        "diff_ledgers": "comm",
        "expect": "verify",
        "load_ledger": "comm",
        "local_map": "local",
        "parallelize_module": "parallel",
        "run_virtual": "step",
        "save_ledger": "comm",
        "vocab_parallel_cross_entropy": "parallel",
    }
    # Packages that can be used without a line that imports them.
    _SUBMODULES = (
        "comm",
        "errors",
        "local",
        "parallel",
        "report",
        "step",
        "testing",
        "trace",
        "verify",
    )

    def __getattr__(name):
        """Load what a name stands for, at its first use."""
        if name in _PACKAGES:
            package = importlib.import_module(f"torchspmd.{_PACKAGES[name]}")
            value = globals()[name] = getattr(package, name)
            return value
        if name in _SUBMODULES:
            return importlib.import_module(f"torchspmd.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        own = (name for name in globals() if name.startswith("__"))
        return sorted({*own, *__all__, *_SUBMODULES})
