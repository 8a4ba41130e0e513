"""End the process without taking torch apart.

A process group that is freed waits for its gloo threads with Python's lock held. A thread
that still has a backward's ``all_reduce`` in hand needs that lock to let go of it (autograd
hangs a Python object on it), and neither ends: about one ``torchrun`` in eight with
``DistributedDataParallel`` does so in torch 2.13, with or without torchspmd.
"""

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn

#: What a script left behind in a real world: not freed before the process ends.
KEPT: list[object] = []


def leave(code: int) -> NoReturn:
    """End with this exit code, after threads, exit handlers and written text."""
    # Waits for threads, and before that ends the workers of executors.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
