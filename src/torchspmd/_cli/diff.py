"""``torchspmd diff``: what changed between two saved ledgers or predictions."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from torchspmd._cli.output import say_written
from torchspmd._cli.script import output_problems
from torchspmd.comm import Change, diff_ledgers, ledger_from_dict, load_ledger
from torchspmd.errors import UsageError
from torchspmd.report import (
    compare_results,
    differing_figures,
    print_changes,
    print_figures,
    read_result,
    write_page,
)
from torchspmd.report.results import PREDICTION, ledger_of

HELP = "compare two ledgers of trace --out, or two predictions"
DESCRIPTION = (
    "Compare two ledgers, by module and kind of communication; or two predictions, by "
    "their figures and, where both have one, their ledgers."
)
EPILOG = """\
examples:
  torchspmd diff before.json after.json
  torchspmd diff before.json after.json --json > changes.json
  torchspmd diff before.json after.json --html page.html

two scripts, of any size, without GPUs: trace each, or predict each, then compare
  torchspmd trace a.py --world-size 8 --fake --out a.json
  torchspmd trace b.py --world-size 8 --fake --out b.json
  torchspmd diff a.json b.json

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
    paths = (options.before, options.after)
    if all(map(_is_prediction, paths)):
        differs = _compare_predictions(paths, options.json)
    else:
        changes = diff_ledgers(*map(load_ledger, paths))
        _print(None, changes, options.json)
        differs = bool(changes)
    if options.html is not None:
        before, after = map(read_result, paths)
        names = (str(options.before), str(options.after))
        write_page(compare_results(before, after, names), options.html)
        say_written("Page", options.html, stderr=options.json)
    return int(differs)


def _is_prediction(path: Path) -> bool:
    """Whether the file says so; what is wrong with others, their reader tells."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and data.get("format") == PREDICTION


def _compare_predictions(paths: tuple[Path, Path], as_json: bool) -> bool:
    before, after = map(read_result, paths)
    names = (str(paths[0]), str(paths[1]))
    figures = differing_figures(before, after, names)
    ledgers = [ledger_of(before), ledger_of(after)]
    changes = None
    if None not in ledgers:
        changes = diff_ledgers(*map(ledger_from_dict, ledgers, names))
    _print(figures, changes, as_json)
    return bool(figures or changes)


def _print(
    figures: list[dict[str, Any]] | None,
    changes: Sequence[Change] | None,
    as_json: bool,
) -> None:
    """The changes; of predictions, their figures first."""
    if as_json:
        rows = None if changes is None else [asdict(change) for change in changes]
        both = {"figures": figures, "communication": rows}
        print(json.dumps(rows if figures is None else both, indent=1))
        return
    console = Console()
    if figures is not None:
        print_figures(figures, console)
    if changes is None:
        console.print("One of them has no ledger: communication was not compared.")
    else:
        print_changes(changes, console)
