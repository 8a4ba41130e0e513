"""Threads of the script: they compute on the rehearsed device as its main one does.

The modes that a rehearsal is made of are those of one thread. So each thread that the
script starts gets them, too; operators wait for each other, since all write one recording.
Python of other threads runs beside the one that trains: it takes that one no time, and does
not make it wait.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torchspmd import _torch
from torchspmd.rehearse.values import Values
from torchspmd.rehearse.world import EndOfWindow

__all__ = ["threads_take_part"]

# Loaders and queues start threads that work on the host alone.
_LEFT_ALONE = ("torch.", "multiprocessing.")
_NOTE = (
    "Threads of the script work on the GPU beside the one that trains: what they do takes "
    "that one no time, and is in the prediction in the order in which it came."
)


@contextlib.contextmanager
def threads_take_part(
    mode: _torch.FakeDeviceMode, shown: _torch.ShownAsCuda, values: Values
) -> Iterator[None]:
    """Inside, threads that are started see the same device as this one.

    They end at their first operator behind it, and nobody waits for them: a script that
    ends in the middle cannot tell them to.
    """
    plain = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        target = getattr(thread, "_target", None)
        if not str(getattr(target, "__module__", "")).startswith(_LEFT_ALONE):
            thread.run = _inside(thread.run)  # type: ignore[method-assign]
            thread.daemon = True
        plain(thread)

    def _inside(run: Callable[[], None]) -> Callable[[], None]:
        def work() -> None:
            try:
                with _torch.in_another_thread(mode, shown):
                    run()
            except EndOfWindow:  # the script trains here
                pass
            except BaseException:
                if not mode.is_over:
                    raise

        return work

    def tell(*args: Any) -> None:
        values.note(_NOTE)

    mode.on_other_thread = tell
    with mock.patch.object(threading.Thread, "start", start):
        try:
            yield
        finally:
            mode.is_over = True
