"""How ``torchspmd lock`` is used."""

import argparse
import math
import os
from pathlib import Path

from torchspmd._cli.usage.common import (
    add_fake_options,
    add_script_options,
    fake_problems,
    output_problems,
    parse_mesh,
    refuse,
    script_problems,
)

HELP = "write what a training script communicates to a lock, for CI"
DESCRIPTION = (
    "Write what a step of a training script communicates, and the memory it holds, to a "
    "small text file."
)
USAGE = "torchspmd lock script.py --mesh dp=2,tp=4 [options] [-- script arguments]"
EPILOG = """\
examples:
  torchspmd lock train.py --mesh dp=2,tp=4 -o comm.lock
  torchspmd lock train.py --mesh dp=64,tp=8 --steps 2 --skip 1 -- --layers 4
  torchspmd lock train.py --mesh dp=128,tp=8 --fake --gpu h100
  torchspmd check comm.lock                   exit code 1 when something changed

This process plays one rank of a simulated world of any size, on the CPU. The script makes
its own mesh; --mesh gives the number of ranks, and must agree with that mesh.

exit code: 0 when the lock is written, 1 when the script failed, 2 wrong use
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    add_script_options(parser)
    add_fake_options(parser)
    parser.add_argument(
        "--mesh", required=True, help="axes and their sizes, such as tp=8 or dp=2,tp=4"
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("comm.lock"),
        metavar="FILE",
        help="write the lock to FILE (default: comm.lock)",
    )


def check(options: argparse.Namespace) -> None:
    """Refuse options that make no sense, before torch is loaded."""
    problems = output_problems(options.out, "--out", "comm.lock")
    problems += fake_problems(options, fake=options.fake)
    size = math.prod(parse_mesh(options.mesh).values())
    problems += simulation_problems(
        options.script, options.steps, options.skip, rank=options.rank, size=size
    )
    refuse(problems)


def simulation_problems(
    script: Path, steps: int, skip: int, *, rank: int, size: int
) -> list[str]:
    """Why a script cannot be run as this rank of a simulated world."""
    problems = script_problems(script, steps, skip)
    if not 0 <= rank < size:
        problems.append(f"--rank must be 0 to {size - 1}")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        problems.append("start it without torchrun: one process plays the whole world")
    return problems
