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
from torchspmd._cli.script import output_problems, typed_command
from torchspmd.errors import PlanError, UsageError
from torchspmd.parallel.plan.auto import auto_plan
from torchspmd.parallel.plan.plan import Plan
from torchspmd.report import write_page

HELP = "show what a tensor-parallel plan does to a model"
DESCRIPTION = "Show what a tensor-parallel plan does to a model."
EPILOG = """\
examples:
  torchspmd plan model.py:build --mesh tp=8
  torchspmd plan model.py:build --mesh dp=16,tp=8 --plan plan.toml --batch 1
  torchspmd plan mypackage.models:llama --mesh tp=8 --auto --save plan.toml
  torchspmd plan model.py:build --mesh tp=8 --html page.html

The factory is called without arguments and returns the model; its weights are made on
the meta device, so any size will do. Without --plan, the plan is the one that a Hugging
Face model carries, else one inferred from which Linears feed which.

exit code: 0 when the plan fits, 1 when it does not, 2 when the command was used wrongly
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    parser.add_argument("factory", help="file.py:function or package.module:function")
    parser.add_argument(
        "--mesh", required=True, help="axes and sizes: tp=8, dp=16,tp=8"
    )
    parser.add_argument("--axis", help="the axis of the plan (the only one, else tp)")
    parser.add_argument("--plan", type=Path, help="a plan in TOML")
    parser.add_argument(
        "--auto", action="store_true", help="infer the plan even if the model has one"
    )
    parser.add_argument(
        "--share-inputs",
        action="store_true",
        help="let layers that read one tensor sum its gradient once",
    )
    parser.add_argument("--batch", type=int, help="sequences a rank sees in a step")
    parser.add_argument("--seq", type=int, help="length of each")
    parser.add_argument("--dtype", help="of the parameters, such as bfloat16")
    parser.add_argument("--json", type=Path, help="also write it here, as JSON")
    parser.add_argument("--html", type=Path, help="write a page to look at here")
    parser.add_argument("--save", type=Path, help="write the plan here, as TOML")


def run(options: argparse.Namespace) -> int:
    """Build the model, preview the plan; 1 when the plan does not fit."""
    mesh = parse_mesh(options.mesh)
    _check(options, mesh)
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


def parse_mesh(text: str) -> dict[str, int]:
    """A mesh from the command line.

    >>> parse_mesh("dp=16,tp=8")
    {'dp': 16, 'tp': 8}
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not (
            name and equals and size.isdecimal() and int(size) and name not in axes
        ):
            raise UsageError(
                f"--mesh {text}: write each axis once with its number of ranks, as in "
                "tp=8 or dp=16,tp=8."
            )
        axes[name] = int(size)
    return axes


def _check(options: argparse.Namespace, mesh: dict[str, int]) -> None:
    problems = _axis_problems(options.axis, mesh)
    for name in ("batch", "seq"):
        value = getattr(options, name)
        if value is not None and value < 1:
            problems.append(f"--{name} must be at least 1")
    if options.plan is not None and not options.plan.is_file():
        problems.append(f"there is no plan {options.plan}")
    if options.plan is not None and options.auto:
        problems.append("give --plan or --auto, not both")
    if options.dtype is not None and not _is_dtype(options.dtype):
        problems.append(f"torch has no floating-point dtype {options.dtype}")
    problems += output_problems(options.json, "--json", "plan.json")
    problems += output_problems(options.save, "--save", "plan.toml")
    problems += output_problems(options.html, "--html", "page.html")
    if problems:
        raise UsageError("; ".join(problems) + ".")


def _axis_problems(axis: str | None, mesh: dict[str, int]) -> list[str]:
    """Why the plan's axis is not known; in the words of the command line."""
    axes = ", ".join(mesh)
    if axis is None and len(mesh) > 1 and "tp" not in mesh:
        return [f"the mesh has the axes {axes}: choose that of the plan with --axis"]
    if axis is not None and axis not in mesh:
        return [f"--axis {axis}: the mesh has the axes {axes}"]
    return []


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
