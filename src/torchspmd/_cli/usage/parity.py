"""How ``torchspmd parity`` is used."""

import argparse
from pathlib import Path

from torchspmd._cli.usage.common import refuse

HELP = "compare two recorded training runs"
DESCRIPTION = "Compare loss, gradients, parameters and state of two recorded runs."
EPILOG = """\
examples:
  torchspmd parity runs/one-device runs/tp4
  torchspmd parity runs/tp4 runs/tp4-compiled --bitwise
  torchspmd parity a b --without-grad 'vision.*' --json > verdict.json

torchspmd.verify.record makes recordings in a training script, on one device or under
torchrun; check_parity makes them with RunOptions(save=...).

exit code: 0 when they agree, 1 when they differ or the comparison proves nothing, 2 wrong
use or a recording that cannot be read
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    parser.add_argument("reference", type=Path, help="folder of the run that is right")
    parser.add_argument("other", type=Path, help="folder of the run to check")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest difference, relative to a tensor's size",
    )
    parser.add_argument("--bitwise", action="store_true", help="demand equal bits")
    parser.add_argument(
        "--without-grad",
        action="append",
        default=[],
        metavar="PATTERN",
        help="parameters that need not get a gradient; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")


def check(options: argparse.Namespace) -> None:
    """Refuse options that make no sense, before torch is loaded."""
    if options.bitwise and options.tolerance is not None:
        refuse(["give --tolerance or --bitwise, not both"])
