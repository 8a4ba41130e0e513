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
from torchspmd._cli.usage.diff import OF_A_TRACE, SUFFIX
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

_STDERR = 2


def run(options: argparse.Namespace) -> int:
    """Compare, print, and tell by the exit code whether they differ."""
    names = (str(options.before), str(options.after))
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


def _ledger_file(path: Path, options: argparse.Namespace, out: Path) -> Path:
    """The file itself; for a script, one with what it does.

    A process of its own for each: two scripts may import modules of one name.
    """
    if path.suffix != SUFFIX:
        return path
    command = [sys.executable, "-m", "torchspmd", "trace", str(path), "--out", str(out)]
    for name, usual in OF_A_TRACE.items():
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
