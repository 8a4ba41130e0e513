"""Run what a page of the documentation shows, in the order of the page.

======================================  ================================================
```` ```python ````                     runs; names go on from block to block of the page
```` ```python title="train.py" ````    is written into the folder where the page runs
```` ```console ````                    ``$`` lines are run; what follows is their output,
                                        in which ``...`` stands for anything; a command
                                        that fails has ``# exits with 1`` behind it
``<!-- python`` ... ``-->``             runs too, and readers do not see it
======================================  ================================================

Blocks in other languages, or in none, are for reading.
"""

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

from torchspmd._cli import main

ROOT = Path(__file__).parents[2]

_BLOCK = re.compile(
    r"^```(?P<language>python|console)(?: title=\"(?P<title>[^\"]+)\")?\n"
    r"(?P<code>.*?)^```$"
    r"|^<!-- python\n(?P<hidden>.*?)^-->$",
    re.DOTALL | re.MULTILINE,
)
_EXITS = re.compile(r"# exits with (\d+)")
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_MODULES = {"torchrun": "torch.distributed.run", "pytest": "pytest"}


@dataclass(frozen=True)
class Block:
    """One block of a page that is run, with the line where its code begins."""

    language: str
    title: str | None
    code: str
    line: int


def find_blocks(text: str) -> list[Block]:
    """The blocks of a page that are run, in order."""
    return [
        Block(
            found["language"] or "python",
            found["title"],
            found["code"] if found["hidden"] is None else found["hidden"],
            text.count("\n", 0, found.start()) + 2,
        )
        for found in _BLOCK.finditer(text)
    ]


def run_page(path: Path) -> int:
    """Run every block of the page in the current folder; an exception is a failure."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    for folder in ("examples", "benchmarks"):
        Path(folder).symlink_to(ROOT / folder)
    namespace = {"__name__": "page"}
    for block in find_blocks(path.read_text()):
        if block.language == "console":
            _run_console(block, path)
        elif block.title:
            Path(block.title).write_text(block.code)
        else:
            code = "\n" * (block.line - 1) + block.code  # lines of tracebacks
            exec(compile(code, str(path), "exec"), namespace)
    return 0


def _run_console(block: Block, path: Path) -> None:
    for part in re.split(r"^\$ ", block.code, flags=re.MULTILINE)[1:]:
        command, _, wanted = part.replace("\\\n", " ").partition("\n")
        exits = _EXITS.search(command)
        returned, output = _run_command(command)
        is_met = doctest.OutputChecker().check_output(wanted, output, _FLAGS)
        if returned != (int(exits[1]) if exits else 0) or not is_met:
            raise AssertionError(
                f"{path}:{block.line}: $ {command}\nexit code {returned}\n"
                f"--- the page says\n{wanted}--- it printed\n{output}"
            )


def _run_command(command: str) -> tuple[int, str]:
    """The exit code and the standard output (and error, where it failed)."""
    name, *words = shlex.split(command, comments=True)
    if name == "torchspmd":
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            try:
                returned = main(words)
            except SystemExit as exit:  # of argparse
                returned = int(exit.code or 0)
        return returned, output.getvalue()
    if name in _MODULES:
        words = ["-m", _MODULES[name], *words]
    elif name != "python":
        raise AssertionError(f"console blocks run no {name}: {command}")
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stdout + (done.stderr if done.returncode else "")
