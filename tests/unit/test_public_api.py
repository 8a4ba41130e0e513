"""What `import torchspmd` gives, and that it changes nothing else."""

import ast
import importlib
import inspect
import subprocess
import sys
import types
from pathlib import Path

import pytest

import torchspmd

_NAMES = {
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
}


def _public_names(module):
    """Its names as `dir` has them; submodules appear by being imported."""
    return {
        name
        for name in dir(module)
        if not name.startswith("_")
        and not isinstance(getattr(module, name), types.ModuleType)
    }


def test_public_names_are_these():
    assert _public_names(torchspmd) == _NAMES


def test_type_checkers_see_the_names_that_are_loaded_when_they_are_used():
    """The imports that they read, and the table that `__getattr__` reads."""
    tree = ast.parse(Path(torchspmd.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.name: node.module.removeprefix("torchspmd.")
        for node in block.body
        for alias in node.names
    }
    assert imported == torchspmd._PACKAGES
    assert sorted(imported) == torchspmd.__all__


def test_a_name_that_is_not_there():
    with pytest.raises(
        AttributeError, match="'torchspmd' has no attribute 'no_such_name'"
    ):
        torchspmd.no_such_name  # noqa: B018


def test_packages_can_be_used_without_a_line_that_imports_them():
    assert (
        torchspmd.testing.fake_mesh
        is importlib.import_module("torchspmd.testing").fake_mesh
    )


@pytest.mark.parametrize("name", sorted(_NAMES))
def test_every_public_name_has_its_own_docstring(name):
    value = getattr(torchspmd, name)
    inherited = [base.__doc__ for base in getattr(value, "__mro__", ())[1:]]
    assert value.__doc__
    assert value.__doc__ not in inherited
    assert value.__module__.startswith("torchspmd.")


_PUBLIC_MODULES = [
    "torchspmd",
    "torchspmd.errors",
    "torchspmd.local",
    "torchspmd.parallel",
    "torchspmd.report",
    "torchspmd.step",
    "torchspmd.step.passes",
    "torchspmd.testing",
    "torchspmd.trace",
    "torchspmd.verify",
]


def _is_ours(value):
    """Not a submodule, and not a name that was imported from elsewhere."""
    if isinstance(value, types.ModuleType):
        return False
    return getattr(value, "__module__", "torchspmd").startswith("torchspmd")


@pytest.mark.parametrize("name", _PUBLIC_MODULES)
def test_all_lists_every_public_name_and_no_other(name):
    module = importlib.import_module(name)
    listed = module.__all__
    assert len(listed) == len(set(listed))
    public = {key for key in dir(module) if not key.startswith("_")}
    assert set(listed) == {key for key in public if _is_ours(getattr(module, key))}
    namespace = {}
    exec(f"from {name} import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(listed)


# Public names whose docstring has no example that runs, and where one is.
_RANKS = "starts processes: docs/parity.md has examples, which the tests run"
_PASS = (
    "edits a captured step with ranks: docs/passes.md and docs/iterations.md show it"
)
_STEP = "made by `compile`, whose docstring has the example"
_CLOCK = "measures ranks that train: docs/passes.md shows it"
_WITHOUT_EXAMPLE = {
    "check_parity": _RANKS,
    "check_local_parity": _RANKS,
    "compare_recordings": _RANKS,
    "Verdict": _RANKS,
    "CompiledStep": _STEP,
    "Program": _STEP,
    "ClosedProgram": _STEP,
    "measure_exposure": _CLOCK,
    "print_exposure": _CLOCK,
    "ExposureReport": _CLOCK,
    "MeasuredExposure": _CLOCK,
    "write_perfetto": "writes what `perfetto_trace`, which has the example, returns",
    "Outcome": "in the example of `graph_optimization_pass`, which returns one",
    "PassReport": "in the example of `graph_optimization_pass`, which makes one",
    "get_all_fused_optimizer_blocks": _PASS,
    "dedupe_collectives": _PASS,
    "defer_updates": _PASS,
    "gather_embedding_gradients": _PASS,
    "iter_move_grads_and_optimizers": _PASS,
    "prefetch_gathers": _PASS,
    "remove_copy_from_optimizer": _PASS,
    "split_fused_optimizer": _PASS,
    "split_optimizer": _PASS,
}


def test_every_public_name_has_an_example_or_a_reason():
    """Errors have a page each, with cause and fix; the rest shows how it is used."""
    without = set()
    for module in map(importlib.import_module, _PUBLIC_MODULES):
        for name in module.__all__:
            value = getattr(module, name)
            is_error = inspect.isclass(value) and issubclass(value, Exception)
            if not is_error and ">>>" not in (value.__doc__ or ""):
                without.add(name)
    assert without == set(_WITHOUT_EXAMPLE)


def test_no_module_shares_its_name_with_a_public_function():
    functions = {n for n in _NAMES if inspect.isfunction(getattr(torchspmd, n))}
    shadowed = [n for n in functions if f"torchspmd.{n}" in sys.modules]
    assert shadowed == []


def test_version_is_a_number():
    assert all(part.isdigit() for part in torchspmd.__version__.split("."))


_PROBE = """
import logging, os, sys, threading, warnings
import torch, torch.distributed, torch.distributed.tensor
from torch import nn
from torch.nn.parallel import DistributedDataParallel

def state():
    names = [None, *logging.root.manager.loggerDict]
    loggers = [logging.getLogger(name) for name in names]
    return {
        "environ": dict(os.environ),
        "handlers": {log.name: list(log.handlers) for log in loggers if log.handlers},
        "level": logging.getLogger().level,
        "threads": torch.get_num_threads(),
        "python threads": threading.active_count(),
        "filters": list(warnings.filters),
        "path": list(sys.path),
        "excepthook": sys.excepthook,
        "module": dict(vars(nn.Module)),
        "ddp": dict(vars(DistributedDataParallel)),
        "optimizer": dict(vars(torch.optim.Optimizer)),
        "graph": dict(vars(torch.cuda.CUDAGraph)),
        "seed": torch.get_rng_state().tolist(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "world": torch.distributed.is_initialized(),
        "libraries": len(torch.library._defs), "impls": len(torch.library._impls),
    }

before = state()
import torchspmd
for name in torchspmd.__all__:
    getattr(torchspmd, name)
after = state()
changed = sorted(key for key in before if before[key] != after[key])
print("changed:", changed)
"""


def _run_python(code):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_the_package_is_imported_without_torch():
    loaded = "import sys, torchspmd, torchspmd.errors; print('torch' in sys.modules)"
    assert _run_python(loaded) == ["False"]


def test_importing_changes_nothing():
    assert _run_python(_PROBE) == ["changed: []"]
