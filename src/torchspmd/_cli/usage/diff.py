"""How ``torchspmd diff`` is used."""

import argparse
from pathlib import Path

from torchspmd._cli.usage.common import (
    PAGE,
    add_fake_options,
    add_file_options,
    add_step_options,
    fake_problems,
    output_problems,
    refuse,
    script_problems,
)

HELP = "compare two traces, two predictions, or two scripts"
DESCRIPTION = (
    "Compare two ledgers (trace --out) by module and kind of communication, or two "
    "predictions (predict --json) by their figures and ledgers. A script (.py) in the "
    "place of a ledger is traced first."
)
USAGE = "torchspmd diff before after [options] [-- script arguments]"
EPILOG = """\
examples:
  torchspmd diff before.json after.json
  torchspmd diff before.json after.json --json > changes.json
  torchspmd diff before.json after.json --html page.html
  torchspmd diff before.json train.py --world-size 8
  torchspmd diff old/train.py new/train.py --world-size 1024 --fake --gpu h100

Each script runs in a process of its own, as with torchspmd trace; both get the same
options. Their reports go to standard error.

exit code: 0 when they are equal, 1 when they differ, 2 wrong use, a file that cannot be
read, or a script that failed
"""

SUFFIX = ".py"  # of a script
# Options of a trace that a script is run with, as they are where none is given.
OF_A_TRACE = {
    "world_size": None,
    "rank": 0,
    "steps": 1,
    "skip": 0,
    "fake": False,
    "gpu": None,
    "gpus_per_node": None,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    parser.add_argument("before", type=Path, help="a ledger, a prediction or a script")
    parser.add_argument("after", type=Path, help="what it is compared with")
    parser.add_argument("--json", action="store_true", help="print the changes as JSON")
    add_file_options(parser, html=PAGE)
    of_scripts = parser.add_argument_group("for scripts")
    of_scripts.add_argument(
        "--world-size", type=int, metavar="N", help="simulate a world of N ranks"
    )
    add_step_options(of_scripts)
    add_fake_options(of_scripts)


def check(options: argparse.Namespace) -> None:
    """Refuse options that make no sense, before torch is loaded."""
    problems = output_problems(options.html, "--html", "page.html")
    scripts = [p for p in (options.before, options.after) if p.suffix == SUFFIX]
    for script in scripts:
        problems += script_problems(script, options.steps, options.skip)
    if scripts:
        problems += fake_problems(options, fake=options.fake)
        if options.world_size is None:
            problems.append(
                "a script is traced: give --world-size N to simulate N ranks"
            )
    elif options.arguments or any(
        getattr(options, name) != usual for name, usual in OF_A_TRACE.items()
    ):
        problems.append(
            f"both are files, and options of a trace are for scripts ({SUFFIX}): leave "
            "them out"
        )
    refuse(problems)
