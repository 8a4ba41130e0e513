"""Options that several commands have, and what can be wrong with them."""

import argparse
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from torchspmd.errors import UsageError
from torchspmd.predict.hardware import load_gpu
from torchspmd.rehearse.nodes import GPUS_PER_NODE, read_nodes

PAGE = "write a page for the browser to FILE"  # the help of --html


def refuse(problems: list[str]) -> None:
    """Raise when there are problems, with all of them in one text."""
    if problems:
        raise UsageError("; ".join(dict.fromkeys(problems)) + ".")


def add_script_options(parser: argparse.ArgumentParser) -> None:
    """The script, and which of its steps are recorded as which rank."""
    parser.add_argument("script", type=Path, help="the training script")
    add_step_options(parser)


def add_module_option(parser: argparse.ArgumentParser) -> None:
    """Whether the script is named as a module."""
    parser.add_argument(
        "-m",
        "--module",
        action="store_true",
        help="the script is a Python module, as for torchrun -m: torchtitan.train",
    )


def add_file_options(parser: argparse._ActionsContainer, **written: str) -> None:
    """Files that a command writes, by the option that names them."""
    for name, text in written.items():
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=text)


def find_module(name: str) -> Path | None:
    """The file of a module here or among the installed ones.

    Nothing of it is imported: where its packages look for a GPU, one is rehearsed.

    >>> find_module("json.tool").name, find_module("no.such")
    ('tool.py', None)
    """
    for whole in (name, f"{name}.__main__"):
        where: list[str] | None = [str(Path.cwd()), *sys.path[1:]]
        for end in (place for place, c in enumerate(f"{whole}.") if c == "."):
            spec = where and PathFinder.find_spec(whole[:end], where)
            if not spec:
                break
            where = spec.submodule_search_locations and [
                *spec.submodule_search_locations
            ]
        else:
            if spec and spec.has_location and spec.origin and not where:
                return Path(spec.origin)
    return None


def add_step_options(parser: argparse._ActionsContainer) -> None:
    """Which steps of a script are recorded, as which rank."""
    parser.add_argument(
        "--rank",
        type=int,
        default=0,
        metavar="N",
        help="the rank that this process plays (default: 0)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=1,
        metavar="N",
        help="optimizer steps to record, 0 for all (default: %(default)s)",
    )
    parser.add_argument(
        "--skip",
        type=int,
        default=0,
        metavar="N",
        help="optimizer steps to skip first (default: %(default)s)",
    )


def add_fake_options(parser: argparse._ActionsContainer) -> None:
    """Whether tensors hold memory, and which GPU and nodes a script is shown then."""
    parser.add_argument(
        "--fake",
        action="store_true",
        help="use tensors without memory, for models of any size and scripts for GPUs",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="with --fake: the GPU that the script sees, such as h100",
    )
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        metavar="N",
        help="with --fake: ranks on each node (default: 8)",
    )


def add_world_options(parser: argparse._ActionsContainer) -> None:
    """The ranks and GPUs of a predicted world, and how ranks are spread over nodes."""
    parser.add_argument(
        "--world-size", type=int, default=1, metavar="N", help="ranks (default: 1)"
    )
    parser.add_argument(
        "--gpu",
        required=True,
        metavar="NAME",
        help="the GPU: a name such as h100, or a hardware file (.toml)",
    )
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        default=GPUS_PER_NODE,
        metavar="N",
        help="ranks on each node (default: 8)",
    )
    parser.add_argument(
        "--rank-order",
        default="block",
        metavar="ORDER",
        help="which node each rank is on: block (the default) fills one node after the "
        "other, cyclic goes from node to node, or a file has the host of each rank, one "
        "a line",
    )


def world_problems(options: argparse.Namespace) -> list[str]:
    """What is wrong with the ranks and their nodes; ``options.nodes`` are these."""
    if options.world_size < 1 or options.gpus_per_node < 1:
        return ["--world-size and --gpus-per-node must be at least 1"]
    if not 0 <= options.rank < options.world_size:
        return [f"--rank must be 0 to {options.world_size - 1}"]
    try:
        options.nodes = read_nodes(
            options.rank_order, options.world_size, options.gpus_per_node
        )
    except UsageError as error:
        return [str(error).removesuffix(".")]
    return []


def fake_problems(options: argparse.Namespace, *, fake: bool) -> list[str]:
    """What is wrong with the options that go with ``--fake``."""
    problems = []
    if options.gpus_per_node is not None and options.gpus_per_node < 1:
        problems.append("--gpus-per-node must be at least 1")
    if not fake and (options.gpu or options.gpus_per_node is not None):
        problems.append("--gpu and --gpus-per-node are for --fake: add it")
    elif options.gpu:
        try:
            load_gpu(options.gpu)
        except UsageError as error:
            problems.append(str(error).removesuffix("."))
    return problems


def script_problems(
    script: Path, steps: int, skip: int, *, module: bool = False
) -> list[str]:
    """Why there is no script to run, or no steps of it to record."""
    problems = []
    if module:
        if find_module(str(script)) is None:
            wrong = script.suffix == ".py" or script.parent.name
            fix = ": name it as in import, or leave -m" if wrong else ""
            problems.append(
                f"-m: there is no module {script} here or among those installed{fix}"
            )
    elif script.is_dir():
        problems.append(f"{script} is a folder, not a script")
    elif not script.is_file():
        fix = ": for a module, add -m" if find_module(str(script)) else ""
        problems.append(f"there is no script {script}{fix}")
    if steps < 0 or skip < 0:
        problems.append("--steps and --skip cannot be negative")
    return problems


def output_problems(path: Path | None, option: str, example: str) -> list[str]:
    """Why nothing can be written there; empty where it can, or none is asked for.

    >>> output_problems(Path("/"), "--out", "report.json")
    ['--out / is a folder: name a file in it, as in /report.json']
    """
    if path is None:
        return []
    if str(path) == "-":
        return [f"{option} -: name a file, or /dev/stdout"]
    if path.is_dir():
        named = path / example
        return [f"{option} {path} is a folder: name a file in it, as in {named}"]
    if not path.absolute().parent.is_dir():
        return [f"there is no folder {path.parent} for {option}"]
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        return [f"{option} {path}: you may not write there; name another folder"]
    return []


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
