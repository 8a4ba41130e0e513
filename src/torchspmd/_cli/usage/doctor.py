"""How ``torchspmd doctor`` is used."""

import argparse

HELP = "say what works on this machine, what does not, and why"
DESCRIPTION = "Try each feature in small, and say what works on this machine."
EPILOG = """\
examples:
  torchspmd doctor
  torchspmd doctor --json > doctor.json            for a bug report

exit code: 0 when everything works that needs no special hardware or package, 1 when
something of that does not
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def check(options: argparse.Namespace) -> None:
    """Every use is right."""
