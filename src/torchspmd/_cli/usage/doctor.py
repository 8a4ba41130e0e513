"""How ``torchspmd doctor`` is used."""

import argparse

HELP = "check what works on this machine, and why the rest does not"
DESCRIPTION = (
    "Try a small example of each feature, and report which work on this machine."
)
EPILOG = """\
examples:
  torchspmd doctor
  torchspmd doctor --json > doctor.json            for a bug report

exit code: 0 when everything works that needs no special hardware or package, else 1
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def check(options: argparse.Namespace) -> None:
    """Every use is right."""
