"""``torchspmd diff``: what changed between two saved ledgers."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from torchspmd._cli.output import say_written
from torchspmd._cli.script import output_problems
from torchspmd.comm import diff_ledgers, load_ledger
from torchspmd.errors import UsageError
from torchspmd.report import compare_results, print_changes, read_result, write_page

HELP = "compare two ledgers written by trace --out"
DESCRIPTION = "Compare two ledgers, by module and kind of communication."
EPILOG = """\
examples:
  torchspmd diff before.json after.json
  torchspmd diff before.json after.json --json > changes.json
  torchspmd diff before.json after.json --html page.html

exit code: 0 when they are equal, 1 when they differ, 2 when a file cannot be read
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--json", action="store_true", help="print the changes as JSON")
    parser.add_argument("--html", type=Path, help="write a page to look at here")


def run(options: argparse.Namespace) -> int:
    """Compare, print, and tell by the exit code whether they differ."""
    problems = output_problems(options.html, "--html", "page.html")
    if problems:
        raise UsageError("; ".join(problems) + ".")
    changes = diff_ledgers(load_ledger(options.before), load_ledger(options.after))
    if options.json:
        print(json.dumps([asdict(change) for change in changes], indent=1))
    else:
        print_changes(changes, Console())
    if options.html is not None:
        names = (str(options.before), str(options.after))
        results = (read_result(options.before), read_result(options.after))
        write_page(compare_results(*results, names), options.html)
        say_written("Page", options.html, stderr=options.json)
    return 1 if changes else 0
