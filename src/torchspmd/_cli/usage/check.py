"""How ``torchspmd check`` is used."""

import argparse
from pathlib import Path

from torchspmd._cli.usage.common import add_fake_options, refuse

HELP = "compare a training script with its lock"
DESCRIPTION = "Compare what a training script communicates with its lock."
EPILOG = """\
examples:
  torchspmd check                                  ./comm.lock
  torchspmd check configs/llama.lock
  torchspmd check comm.lock --fake --gpu h200      as if it ran there

The lock knows its script, mesh, arguments and the options of --fake; options given here
replace those. Each change is one sentence. To accept the changes, run the command in the
last line and commit the lock.

exit code: 0 when nothing changed, 1 when something did or the script failed, 2 wrong use
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    parser.add_argument(
        "lock",
        type=Path,
        nargs="?",
        default=Path("comm.lock"),
        help="the lock (default: comm.lock)",
    )
    add_fake_options(parser)


def check(options: argparse.Namespace) -> None:
    """Refuse options that make no sense, before torch is loaded."""
    if options.arguments:
        refuse(
            [
                f"{options.lock} knows the script's arguments; write another lock for "
                "others"
            ]
        )
