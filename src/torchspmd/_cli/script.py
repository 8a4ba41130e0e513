"""Run a user's script inside this process, as ``python script.py`` would."""

import argparse
import contextlib
import runpy
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn
from unittest import mock

from torchspmd._cli.window import EndOfWindow


def run_script(
    script: Path,
    arguments: Sequence[str],
    *watchers: contextlib.AbstractContextManager[object],
    left: list[object] | None = None,
) -> bool:
    """Run it while the watchers are at work; False when it fails.

    Args:
        script: The file.
        arguments: Its ``sys.argv[1:]``.
        watchers: Entered before it runs.
        left: Takes what the script leaves behind; without it, all of it is freed at once.
    """
    left = [] if left is None else left
    argv = [str(script), *arguments]
    path = [str(script.absolute().parent), *sys.path[1:]]
    with mock.patch.object(sys, "argv", argv), mock.patch.object(sys, "path", path):
        try:
            with contextlib.ExitStack() as stack:
                for watcher in watchers:
                    stack.enter_context(watcher)
                left.append(runpy.run_path(str(script), run_name="__main__"))
        except EndOfWindow as end:
            left.append(end)  # the frames of an exception hold the script's globals
        except SystemExit as end:
            left.append(end)
            return end.code in (None, 0)
        except Exception as error:
            left.append(error)
            traceback.print_exception(type(error), error, _own_frames(error, script))
            return False
    return True


def _own_frames(error: BaseException, script: Path) -> TracebackType | None:
    """The script's part of a traceback: not the frames that brought it to run.

    All of it where it never came to run, but for a mistake in its syntax.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
        frames = frames.tb_next
    if frames is None and not isinstance(error, SyntaxError):
        return error.__traceback__
    return frames


# ----------------------------------------------------------------------------
# Words of the command line: ours, and those of a script.


def split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Our own words, and those after ``--``, which are for a script.

    >>> split_words(["trace", "a.py", "--", "--layers", "2"])
    (['trace', 'a.py'], ['--layers', '2'])
    """
    if "--" not in words:
        return words, []
    place = words.index("--")
    return words[:place], words[place + 1 :]


def refuse_words(
    parser: argparse.ArgumentParser, options: argparse.Namespace, unknown: list[str]
) -> NoReturn:
    """End on words that are no options of the subcommand; a script may want them."""
    words = shlex.join(unknown)
    hint = ""
    if "script" in options:
        command = f"{parser.prog} {shlex.quote(str(options.script))} ... -- {words}"
        hint = f". Arguments of the script stand behind --, as in {command}"
    parser.error(f"unrecognized arguments: {words}{hint}")


# ----------------------------------------------------------------------------
# Files that a command is given, looked at before anything runs.


def script_problems(script: Path) -> list[str]:
    """Why there is no script to run; empty where there is one."""
    if script.is_dir():
        return [f"{script} is a folder, not a script"]
    return [] if script.is_file() else [f"there is no script {script}"]


def output_problems(path: Path | None, option: str, example: str) -> list[str]:
    """Why nothing can be written there; empty where it can, or none is asked for.

    >>> output_problems(Path("/"), "--out", "report.json")
    ['--out / is a folder: name a file in it, as in /report.json']
    """
    if path is None:
        return []
    if path.is_dir():
        named = path / example
        return [f"{option} {path} is a folder: name a file in it, as in {named}"]
    if not path.absolute().parent.is_dir():
        return [f"there is no folder {path.parent} for {option}"]
    return []
