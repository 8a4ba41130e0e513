"""``torchspmd lock``: write down what a script's step communicates."""

import argparse
import os
from pathlib import Path
from typing import Any

from torchspmd._cli.files import output_problems
from torchspmd._cli.lock_run import simulate
from torchspmd.comm import format_bytes
from torchspmd.errors import UsageError
from torchspmd.verify.lock.contents import Recipe
from torchspmd.verify.lock.text import save_lock

_EPILOG = """\
examples:
  torchspmd lock train.py --mesh dp=2,tp=4 -o comm.lock
  torchspmd lock train.py --mesh dp=64,tp=8 --steps 2 --skip 1 -- --layers 4
  torchspmd check comm.lock                        exit code 1 when something changed

This process plays one rank of a simulated world, on the CPU, whatever its size. The
script makes its own mesh; --mesh says how many ranks there are and is compared with it.
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's options."""
    parser = subparsers.add_parser(
        "lock",
        help="write down what a training script communicates, for check",
        usage="torchspmd lock script.py --mesh dp=2,tp=4 [options] [-- script arguments]",
        description="Write down what a training script communicates and holds.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", type=Path)
    parser.add_argument("--mesh", required=True, help="axes and sizes: tp=8, dp=2,tp=4")
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("comm.lock"),
        help="write the lock here (comm.lock)",
    )
    parser.add_argument("--rank", type=int, default=0, help="the rank to play (0)")
    parser.add_argument(
        "--steps", type=int, default=1, help="optimizer steps to record; 0: all (1)"
    )
    parser.add_argument(
        "--skip", type=int, default=0, help="optimizer steps to let pass before (0)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Simulate and write; 1 when the script fails."""
    problems = output_problems(options.out, "--out", "comm.lock")
    if problems:
        raise UsageError("; ".join(problems) + ".")
    folder = options.out.absolute().parent
    recipe = Recipe(
        Path(os.path.relpath(options.script, folder)).as_posix(),
        options.mesh.replace(" ", ""),
        options.rank,
        options.steps,
        options.skip,
        tuple(options.arguments),
    )
    lock = simulate(recipe, folder, "lock")
    if lock is None:
        return 1
    save_lock(lock, options.out)
    total = lock.total()
    print(
        f"{options.out}: {total.count} communications, "
        f"{format_bytes(total.payload_bytes)} payload, {len(lock.rows)} rows."
    )
    return 0
