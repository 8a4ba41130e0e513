"""What a compiled step is doing: in a log, in a profile, and in a line on a terminal."""

import contextlib
import logging
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Self, final

import torch.distributed as dist
from rich.console import Console
from torch.profiler import record_function

logger = logging.getLogger("torchspmd")

_TOLD_AFTER = 2.0  # seconds: a quicker capture leaves no line behind
_LOGGED_AFTER = 10.0  # the same in a file, and between two lines there


class StatusLine:
    """A line on standard error that says what is being done, for as long as it lasts.

    Args:
        what: What is being done.
        console: Where the line is shown; a quiet console on ranks that do not report.
    """

    def __init__(self, what: str, console: Console) -> None:
        self.what = what
        self.console = console
        self._status = console.status(what)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._status.stop()

    def show(self, detail: str) -> None:
        """Add to the line how far it is; nothing where there is no terminal."""
        if self.console.is_terminal:
            self._status.update(f"{self.what}: {detail}")

    def print(self, text: str) -> None:
        """Write a line that stays."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


@final
class Progress:
    """One capture, from its first to its last phase.

    On a terminal the phase is shown on standard error while it lasts, and a line with all
    times stays behind when the capture was long. Elsewhere, as in the log of a job, a long
    capture writes a line now and then, and one with all times.

    Attributes:
        what: What is captured.
        seconds: How long each phase took, in order.
    """

    def __init__(self, what: str, console: Console | None = None) -> None:
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        self._line = StatusLine(
            what, console or Console(stderr=True, quiet=not is_first)
        )
        self.what = what
        self.seconds: dict[str, float] = {}
        self._inside = [0.0]  # of each open phase: the seconds of phases within it

    def __enter__(self) -> Self:
        self._start = self._told = time.perf_counter()
        self._token = _current.set(self)
        self._line.__enter__()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._line.__exit__()
        _current.reset(self._token)
        least = _TOLD_AFTER if self._line.console.is_terminal else _LOGGED_AFTER
        if error is None and sum(self.seconds.values()) > least:
            self._line.print(f"{self.what}: {self.describe()}")

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self._start

    def describe(self) -> str:
        """The total and each phase, in seconds.

        >>> progress = Progress("compile step")
        >>> progress.seconds.update(tracing=1.0, passes=0.25)
        >>> progress.describe()
        '1.25 s (tracing 1.00, passes 0.25)'
        """
        phases = ", ".join(f"{name} {took:.2f}" for name, took in self.seconds.items())
        return f"{sum(self.seconds.values()):.2f} s ({phases})"

    def begin(self, name: str) -> None:
        """Show what is being done now."""
        self._inside.append(0.0)
        self._line.show(name)
        now = time.perf_counter()
        if not self._line.console.is_terminal and now - self._told > _LOGGED_AFTER:
            self._told = now
            self._line.print(f"{self.what}: {name}, after {now - self._start:.0f} s")

    def end(self, name: str, took: float) -> None:
        """Note how long a phase took; what lies within it is a phase of its own."""
        own = took - self._inside.pop()
        self._inside[-1] += took
        self.seconds[name] = self.seconds.get(name, 0.0) + own


# Phases are entered far below what shows them, in capture, passes and lowering: as an
# argument, the display would go through every function in between. No result depends on it.
_current: ContextVar[Progress | None] = ContextVar("progress", default=None)


@contextlib.contextmanager
def phase(name: str, what: str = "torchspmd") -> Iterator[None]:
    """Show what runs inside as this phase: in a profile, the log and on a terminal.

    Args:
        name: The phase.
        what: What it is a phase of in the log, where no capture is under way.
    """
    progress = _current.get()
    what = what if progress is None else progress.what
    logger.debug("%s: %s begins", what, name)
    if progress is not None:
        progress.begin(name)
    start = time.perf_counter()
    try:
        with record_function(f"torchspmd::{name}"):
            yield
    finally:
        took = time.perf_counter() - start
        if progress is not None:
            progress.end(name, took)
        logger.info("%s: %s took %.3f s", what, name, took)
