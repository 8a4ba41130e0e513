"""How ``torchspmd plan`` is used."""

import argparse
from pathlib import Path

from torchspmd._cli.usage.common import (
    PAGE,
    add_file_options,
    output_problems,
    parse_mesh,
    refuse,
)

HELP = "show what a tensor-parallel plan does to a model"
DESCRIPTION = "Show what a tensor-parallel plan does to a model."
EPILOG = """\
examples:
  torchspmd plan model.py:build --mesh tp=8
  torchspmd plan model.py:build --mesh dp=16,tp=8 --plan plan.toml --batch 1
  torchspmd plan mypackage.models:llama --mesh tp=8 --auto --save plan.toml
  torchspmd plan model.py:build --mesh tp=8 --html page.html

The factory takes no arguments and returns the model. It runs on the meta device, so the
model may have any size. Without --plan, the plan is the one that comes with a Hugging
Face model; for other models it is inferred from which Linear feeds which.

exit code: 0 when the plan fits, 1 when it does not, 2 wrong use
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    parser.add_argument(
        "factory",
        help="what builds the model: file.py:function or package.module:function",
    )
    parser.add_argument(
        "--mesh", required=True, help="axes and their sizes, such as tp=8 or dp=16,tp=8"
    )
    parser.add_argument(
        "--axis",
        help="the axis that the plan splits over (default: the only one, or tp)",
    )
    parser.add_argument("--plan", type=Path, metavar="FILE", help="a plan in TOML")
    parser.add_argument(
        "--auto", action="store_true", help="infer the plan even if the model has one"
    )
    parser.add_argument(
        "--share-inputs",
        action="store_true",
        help="all-reduce the gradient of a tensor once for all layers that read it",
    )
    parser.add_argument(
        "--batch", type=int, metavar="N", help="sequences of a rank in a step"
    )
    parser.add_argument("--seq", type=int, metavar="N", help="tokens of a sequence")
    parser.add_argument("--dtype", help="dtype of the parameters, such as bfloat16")
    add_file_options(
        parser,
        json="also write the preview to FILE, as JSON",
        html=PAGE,
        save="write the plan to FILE, as TOML",
    )


def check(options: argparse.Namespace) -> None:
    """Refuse options that make no sense, before torch is loaded."""
    problems = _axis_problems(options.axis, parse_mesh(options.mesh))
    for name in ("batch", "seq"):
        value = getattr(options, name)
        if value is not None and value < 1:
            problems.append(f"--{name} must be at least 1")
    if options.plan is not None and not options.plan.is_file():
        problems.append(f"there is no plan {options.plan}")
    if options.plan is not None and options.auto:
        problems.append("give --plan or --auto, not both")
    problems += output_problems(options.json, "--json", "plan.json")
    problems += output_problems(options.save, "--save", "plan.toml")
    problems += output_problems(options.html, "--html", "page.html")
    refuse(problems)


def _axis_problems(axis: str | None, mesh: dict[str, int]) -> list[str]:
    """Why the plan's axis is not known; in the words of the command line."""
    axes = ", ".join(mesh)
    if axis is None and len(mesh) > 1 and "tp" not in mesh:
        return [f"the mesh has the axes {axes}: choose that of the plan with --axis"]
    if axis is not None and axis not in mesh:
        return [f"--axis {axis}: the mesh has the axes {axes}"]
    return []
