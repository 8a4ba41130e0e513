"""Run a user's script inside this process, as ``python script.py`` would."""

import contextlib
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
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
