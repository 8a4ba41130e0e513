"""Run a user's script inside this process."""

import contextlib
import runpy
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from unittest import mock

import torchspmd
from torchspmd import _torch
from torchspmd._cli.usage.common import find_module
from torchspmd.errors import SpmdError
from torchspmd.rehearse.window import is_after_window
from torchspmd.rehearse.world import EndOfWindow

_PACKAGE = str(Path(_torch.__file__).parents[1])


def run_script(
    script: Path,
    arguments: Sequence[str],
    *watchers: contextlib.AbstractContextManager[object],
    module: bool = False,
    left: list[object] | None = None,
) -> bool:
    """Run it while the watchers are at work; False when it fails.

    Args:
        script: The file, or the name of a module.
        arguments: Its ``sys.argv[1:]``.
        watchers: Entered before it runs.
        module: Whether it is a module.
        left: Takes what the script leaves behind; without it, all of it is freed at once.
    """
    left = [] if left is None else left
    for name in torchspmd.__all__:  # now: what surrounds the script stands in for torch
        getattr(torchspmd, name)
    name, script = str(script), (module and find_module(str(script))) or script
    argv = [str(script), *arguments]
    folder = Path.cwd() if module else script.absolute().parent
    path = [str(folder), *sys.path[1:]]
    with mock.patch.object(sys, "argv", argv), mock.patch.object(sys, "path", path):
        try:
            with contextlib.ExitStack() as stack:
                for watcher in watchers:
                    stack.enter_context(watcher)
                if module:
                    run = partial(runpy.run_module, name, alter_sys=True)
                else:
                    run = partial(runpy.run_path, str(script))
                left.append(run(run_name="__main__"))
        except EndOfWindow as end:
            left.append(end)  # the frames of an exception hold the script's globals
        except SystemExit as end:
            left.append(end)
            return end.code in (None, 0) or is_after_window(end)
        except Exception as error:
            left.append(error)
            if is_after_window(error):
                return True
            _print_error(error, script)
            return False
    return True


def _print_error(error: Exception, script: Path) -> None:
    """The script's part of the traceback; where we refuse its call, that is the last."""
    told = traceback.TracebackException(type(error), error, _own_frames(error, script))
    if isinstance(error, SpmdError):
        while told.stack and told.stack[-1].filename.startswith(_PACKAGE):
            told.stack.pop()
    print(*told.format(), sep="", end="", file=sys.stderr)


def _own_frames(error: BaseException, script: Path) -> TracebackType | None:
    """The script's part of a traceback, without the frames that started it.

    All of it where it never came to run, but for a mistake in its syntax.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
        frames = frames.tb_next
    if frames is None and not isinstance(error, SyntaxError):
        return error.__traceback__
    return frames
