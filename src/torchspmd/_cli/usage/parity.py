"""How ``torchspmd parity`` is used."""

import argparse
from pathlib import Path

from torchspmd._cli.usage.common import refuse

HELP = "compare two recordings of a training run"
DESCRIPTION = "Compare loss, gradients, parameters and state of two recorded runs."
EPILOG = """\
examples:
  torchspmd parity runs/one-device runs/tp4
  torchspmd parity runs/tp4 runs/tp4-compiled --bitwise
  torchspmd parity a b --without-grad 'vision.*' --json > verdict.json

Recordings are made by torchspmd.verify.record in a training script, on one device or under
torchrun, and by check_parity with RunOptions(save=...). The first is taken as right.

exit code: 0 when they agree, 1 when they differ or their agreement means nothing,
2 when a recording cannot be read
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    parser.add_argument(
        "reference", type=Path, help="the folder that is taken as right"
    )
    parser.add_argument("other", type=Path, help="the folder to compare with it")
    parser.add_argument("--tolerance", type=float, help="relative to a tensor's size")
    parser.add_argument(
        "--bitwise", action="store_true", help="every bit must be equal"
    )
    parser.add_argument(
        "--without-grad",
        action="append",
        default=[],
        metavar="PATTERN",
        help="parameters that are meant to get no gradient; may be given again",
    )
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")


def check(options: argparse.Namespace) -> None:
    """Refuse options that make no sense, before torch is loaded."""
    if options.bitwise and options.tolerance is not None:
        refuse(["give --tolerance or --bitwise, not both"])
