"""How ``torchspmd diff`` is used."""

import argparse
from pathlib import Path

from torchspmd._cli.usage.common import (
    add_fake_options,
    add_step_options,
    fake_problems,
    output_problems,
    refuse,
    script_problems,
)

HELP = "compare two ledgers of trace --out, two predictions, or scripts"
DESCRIPTION = (
    "Compare two ledgers, by module and kind of communication; or two predictions, by "
    "their figures and, where both have one, their ledgers. A script (.py) in the place of "
    "a file is traced first."
)
USAGE = "torchspmd diff before after [options] [-- script arguments]"
EPILOG = """\
examples:
  torchspmd diff before.json after.json
  torchspmd diff before.json after.json --json > changes.json
  torchspmd diff before.json after.json --html page.html
  torchspmd diff before.json train.py --world-size 8
  torchspmd diff old/train.py new/train.py --world-size 1024 --fake --gpu h100

A script is run by itself, as by torchspmd trace with these options; both get the same
ones. Its report goes to standard error.

exit code: 0 when they are equal, 1 when they differ, 2 when a file cannot be read or a
script fails
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
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--json", action="store_true", help="print the changes as JSON")
    parser.add_argument("--html", type=Path, help="write a page to look at here")
    of_scripts = parser.add_argument_group("for scripts")
    of_scripts.add_argument("--world-size", type=int, help="simulate this many ranks")
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
