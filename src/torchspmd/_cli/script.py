"""Run a user's script inside this process, as ``python script.py`` would."""

import contextlib
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from torchspmd._cli.window import EndOfWindow


def run_script(
    script: Path,
    arguments: Sequence[str],
    *watchers: contextlib.AbstractContextManager[object],
) -> bool:
    """Run it while the watchers are at work; False when it fails."""
    argv = [str(script), *arguments]
    path = [str(script.absolute().parent), *sys.path[1:]]
    with mock.patch.object(sys, "argv", argv), mock.patch.object(sys, "path", path):
        try:
            with contextlib.ExitStack() as stack:
                for watcher in watchers:
                    stack.enter_context(watcher)
                runpy.run_path(str(script), run_name="__main__")
        except EndOfWindow:
            pass
        except SystemExit as end:
            return end.code in (None, 0)
        except Exception:
            traceback.print_exc()
            return False
    return True
