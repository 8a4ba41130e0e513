"""Signals that end a process end a rehearsal, whatever the script does with them."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any, NoReturn
from unittest import mock

from torchspmd.rehearse.place import read_place
from torchspmd.rehearse.values import Values

__all__ = ["signals_end"]

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
_ENDING = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
_DEFAULT = (signal.SIG_DFL, signal.default_int_handler)


@contextlib.contextmanager
def signals_end(values: Values) -> Iterator[None]:
    """Inside, handlers for these signals are not installed, and are a note.

    Trainers save a checkpoint and go on to the end of a step, or of an epoch: here that
    would keep Ctrl-C and ``timeout`` from whoever waits for the prediction.
    """
    plain_set, plain_get = signal.signal, signal.getsignal
    given: dict[int, Any] = {}

    def set_handler(signalnum: int, handler: Any, /) -> Any:
        if signalnum not in _ENDING:
            return plain_set(signalnum, handler)
        before = get_handler(signalnum)
        given[signalnum] = handler
        if handler not in _DEFAULT:
            line = read_place().line or "the script"
            name = signal.Signals(signalnum).name
            values.note(f"{line} handles {name}: skipped, it ends the rehearsal.")
        return before

    def get_handler(signalnum: int, /) -> Any:
        return given[signalnum] if signalnum in given else plain_get(signalnum)

    with (
        _caught_interrupts_go_on(),
        mock.patch.object(signal, "signal", set_handler),
        mock.patch.object(signal, "getsignal", get_handler),
    ):
        yield


@contextlib.contextmanager
def _caught_interrupts_go_on() -> Iterator[None]:
    """A ``KeyboardInterrupt`` that the script catches is raised again behind it."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupted = False

    def interrupt(signalnum: int, frame: object) -> NoReturn:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupted:
            raise KeyboardInterrupt
