"""``torchspmd plan``: what a plan does to a model, before anything is done."""

import argparse
import importlib
import importlib.util
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchspmd._cli.output import say_written, wrap, write_file
from torchspmd._cli.usage.common import parse_mesh
from torchspmd._cli.words import typed_command
from torchspmd.errors import PlanError, UsageError
from torchspmd.parallel.plan.auto import auto_plan
from torchspmd.parallel.plan.plan import Plan
from torchspmd.report import write_page


def run(options: argparse.Namespace) -> int:
    """Build the model, preview the plan; 1 when the plan does not fit."""
    mesh = parse_mesh(options.mesh)
    if options.dtype is not None and not _is_dtype(options.dtype):
        raise UsageError(f"torch has no floating-point dtype {options.dtype}.")
    model = _build(options.factory, options.dtype)
    try:
        plan = _plan(options, model)
        if options.share_inputs:
            plan = _share(plan, model)
        preview = plan.preview(
            model, mesh, axis=options.axis, batch=options.batch, seq=options.seq
        )
    except PlanError as error:
        print(wrap(str(error)), file=sys.stderr)
        return 1
    print(preview)
    document = {**preview.as_dict(), "command": typed_command(options)}
    if options.json is not None:
        write_file(options.json, json.dumps(document, indent=1) + "\n")
        say_written("Preview", options.json)
    if options.html is not None:
        write_page(document, options.html)
        say_written("Page", options.html)
    if options.save is not None:
        write_file(options.save, plan.to_toml())
        say_written("Plan", options.save)
    return 0


def _share(plan: Plan, model: nn.Module) -> Plan:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = plan.share_inputs(model)
    for warning in caught:
        print(wrap(str(warning.message)), file=sys.stderr)
    return plan


def _is_dtype(name: str) -> bool:
    dtype = getattr(torch, name, None)
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def _plan(options: argparse.Namespace, model: nn.Module) -> Plan:
    if options.plan is not None:
        return Plan.load(options.plan)
    if options.auto or not getattr(model, "tp_plan", None):
        return auto_plan(model)
    return Plan.from_transformers(model)


def _build(factory: str, dtype: str | None) -> nn.Module:
    """The model, on the meta device."""
    function = _find(factory)
    try:
        with torch.device("meta"):
            model = function()
    except Exception as error:
        raise UsageError(
            f"{factory} raised {type(error).__name__}: {error}. It is called without "
            'arguments under torch.device("meta"), and must return a model.'
        ) from error
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{factory} returned a {type(model).__name__}; it must return an nn.Module."
        )
    return model if dtype is None else model.to(getattr(torch, dtype))


def _find(factory: str) -> Callable[[], Any]:
    source, colon, name = factory.rpartition(":")
    if not (source and colon and name):
        raise UsageError(
            f"{factory}: write file.py:function or package.module:function."
        )
    module = _load_file(Path(source)) if source.endswith(".py") else _load(source)
    function: Callable[[], Any] | None = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{source} has no function {name}.")
    return function


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"there is no file {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    # As for a script: its neighbours can be imported.
    sys.path.insert(0, str(path.absolute().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(
            f"{path} cannot be loaded: {type(error).__name__}: {error}."
        ) from error
    return module


def _load(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{name} cannot be imported: {error}.") from error
