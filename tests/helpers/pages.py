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

import argparse
import contextlib
import doctest
import io
import os
import re
import runpy
import shlex
import socket
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import Done, run_forked

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
    """The exit code and the standard output of a command.

    Nothing here imports torch anew: commands run in this process, which is a fork, and
    the ranks of torchrun are forks too.
    """
    name, *words = shlex.split(command, comments=True)
    if name == "torchrun":
        return _run_torchrun(words)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            returned = _COMMANDS[name](words)
        except SystemExit as exit:  # of argparse
            returned = int(exit.code or 0)
    return returned, output.getvalue()


def _run_pytest(words: list[str]) -> int:
    known = "ignore::pytest.PytestAssertRewriteWarning"  # it runs in this process
    others = [word for name in _PLUGINS for word in ("-p", f"no:{name}")]
    return int(pytest.main([*words, "-W", known, *others]))


# Of others: importing them on every rank takes longer than what the pages show.
_PLUGINS = ("anyio", "hypothesispytest", "timeout", "xdist", "xdist.looponfail")


def _run_python(words: list[str]) -> int:
    (script,) = words
    runpy.run_path(script, run_name="__main__")
    return 0


_COMMANDS = {"torchspmd": main, "pytest": _run_pytest, "python": _run_python}


def _run_torchrun(words: list[str]) -> tuple[int, str]:
    """Run a script on several ranks, with the variables that torchrun sets."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc-per-node", type=int, required=True)
    parser.add_argument("script")
    options = parser.parse_args(words)
    size = options.nproc_per_node
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])

    def run(rank: int) -> Done:
        folder = Path(f".rank{rank}").absolute()
        folder.mkdir()
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
        }
        return run_forked(
            _run_rank, variables, options.script, str(Path.cwd()), folder=folder
        )

    with ThreadPoolExecutor(size) as pool:
        ranks = list(pool.map(run, range(size)))
    failed = [rank for rank in ranks if rank.returncode]
    if failed:
        return 1, failed[0].stderr
    return 0, "".join(rank.stdout for rank in ranks)


def _run_rank(variables: dict[str, str], script: str, folder: str) -> int:
    os.environ.update(variables)
    os.chdir(folder)
    sys.path.insert(0, folder)
    runpy.run_path(script, run_name="__main__")
    return 0
