"""``torchspmd diff``: what changed between two saved results, or scripts."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from torchspmd._cli.output import say_written
from torchspmd._cli.script import (
    add_fake_options,
    add_step_options,
    fake_problems,
    output_problems,
    script_problems,
)
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

_SUFFIX = ".py"
_STDERR = 2


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


def run(options: argparse.Namespace) -> int:
    """Compare, print, and tell by the exit code whether they differ."""
    names = (str(options.before), str(options.after))
    _check(options)
    with tempfile.TemporaryDirectory() as folder:
        paths = (
            _ledger_file(options.before, options, Path(folder, "before.json")),
            _ledger_file(options.after, options, Path(folder, "after.json")),
        )
        both = zip(names, paths, strict=True)
        predictions = [name for name, path in both if _is_prediction(path)]
        if len(predictions) == 1:
            raise UsageError(
                f"only {predictions[0]} is a prediction: compare two predictions, or two "
                "ledgers. torchspmd show puts any two results side by side."
            )
        if predictions:
            differs = _compare_predictions(paths, options.json)
        else:
            changes = diff_ledgers(*map(load_ledger, paths))
            _print(None, changes, options.json)
            differs = bool(changes)
        if options.html is not None:
            before, after = map(read_result, paths)
            write_page(compare_results(before, after, names), options.html)
            say_written("Page", options.html, stderr=options.json)
    return int(differs)


def _check(options: argparse.Namespace) -> None:
    problems = output_problems(options.html, "--html", "page.html")
    scripts = [p for p in (options.before, options.after) if p.suffix == _SUFFIX]
    for script in scripts:
        problems += script_problems(script, options.steps, options.skip)
    if scripts:
        problems += fake_problems(options, fake=options.fake)
        if options.world_size is None:
            problems.append(
                "a script is traced: give --world-size N to simulate N ranks"
            )
    elif options.arguments or any(
        getattr(options, name) != usual for name, usual in _USUAL.items()
    ):
        problems.append(
            f"both are files, and options of a trace are for scripts ({_SUFFIX}): leave "
            "them out"
        )
    if problems:
        raise UsageError("; ".join(dict.fromkeys(problems)) + ".")


# Options of a trace that a script is run with, as they are where none is given.
_USUAL = {
    "world_size": None,
    "rank": 0,
    "steps": 1,
    "skip": 0,
    "fake": False,
    "gpu": None,
    "gpus_per_node": None,
}


def _ledger_file(path: Path, options: argparse.Namespace, out: Path) -> Path:
    """The file itself; for a script, one with what it does.

    A process of its own for each: two scripts may import modules of one name.
    """
    if path.suffix != _SUFFIX:
        return path
    command = [sys.executable, "-m", "torchspmd", "trace", str(path), "--out", str(out)]
    for name, usual in _USUAL.items():
        value = getattr(options, name)
        if value != usual:
            option = f"--{name.replace('_', '-')}"
            command += [option] if value is True else [option, str(value)]
    done = subprocess.run(
        [*command, "--", *options.arguments], stdout=_STDERR, check=False
    )
    if done.returncode:
        raise UsageError(f"{path} was not traced: the reason stands above.")
    return out


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
