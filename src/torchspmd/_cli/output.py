"""What a command tells: texts on a terminal, files, and a line while it works."""

import re
import textwrap
from pathlib import Path

from rich.console import Console

from torchspmd.comm.storage import write_whole
from torchspmd.errors import UsageError
from torchspmd.step.progress import StatusLine


def say_written(what: str, path: Path, *, stderr: bool = False) -> None:
    """Say where a file is; the path stays whole, however long it is, to be copied."""
    Console(stderr=stderr).print(
        f"{what} written to {path}.", highlight=False, markup=False, soft_wrap=True
    )


# What a line begins with: a bullet, or a figure and perhaps its share.
_FRONT = re.compile(r" *(?:\* |[\d.,]+ \w+(?: +[\d.]+%)?  +)?")


def wrap(text: str, width: int = 80) -> str:
    """Lines of at most this width; what goes on stands under the words of its line.

    >>> print(wrap("  * one two three", 11))
      * one two
        three
    >>> print(wrap("   1.00 GiB  one two", 16))
       1.00 GiB  one
                 two
    """
    lines = []
    for line in text.split("\n"):
        front = len(_FRONT.match(line)[0])  # type: ignore[index]
        spaces = len(line) - len(line.lstrip())
        lines += textwrap.wrap(
            line,
            width,
            subsequent_indent=" "
            * (front if front > spaces or not spaces else front + 2),
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(lines)


def write_file(path: Path, text: str) -> None:
    """Write a result; where that fails, say so in a sentence."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror or error}. Name a file in a folder that "
            "you may write to."
        ) from None


def status_line(what: str, *, quiet: bool = False) -> StatusLine:
    """A line that says what is being done: a moving one, or a plain one in a log."""
    line = StatusLine(what, Console(stderr=True, quiet=quiet))
    if not line.console.is_terminal:
        line.print(f"{what} ...")
    return line
