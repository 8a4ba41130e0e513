"""How many Python calls a script makes beside its operators.

The host of an eager step also runs the Python of models and libraries: modules, properties,
checks of arguments. Calls are counted and not timed, so that every machine counts the same.
What happens inside of an operator's call belongs to the operator; what a rehearsal does by
itself does not exist in a real run. Nor does what the garbage collector calls count: when
it comes depends on all that has run before.
"""

import gc
import sys
import sysconfig
import threading
from enum import Enum
from inspect import CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from torchspmd import _torch
from torchspmd.trace.modules import observed_call

__all__ = ["Closed", "PythonCalls"]

_PACKAGE = Path(__file__).parent.parent
# Rooms that watch a script; the others are libraries that it may use.
_WATCHING = tuple(
    str(_PACKAGE / room)
    for room in ("_cli", "_torch", "comm", "predict", "rehearse", "trace")
)
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_SITE_PACKAGES = sysconfig.get_paths()["purelib"]
# Of torch, what is written in Python over operators.
_OVER_OPERATORS = (str(Path("nn", "modules")), str(Path("torch", "distributions")))
# Hands functions of torch to the mode that shows a GPU, which a real run has not.
_OVERRIDES = str(Path("torch", "overrides.py"))


class _Kind(Enum):
    COUNTED = "counted"
    PASSED = "passed"  # what it calls may count
    CLOSED = "closed"  # nor does what it calls


class Closed(NamedTuple):
    """Why nothing counts: a call of the rehearsal, and pauses."""

    frame: FrameType | None
    pauses: int


class PythonCalls:
    """Counts in the thread that starts it, between ``start`` and ``stop``.

    Attributes:
        is_counting: Whether it could start: there is one profiler in a thread.
    """

    def __init__(self) -> None:
        self.is_counting = False
        self._count = 0
        self._paused = 0
        self._thread = 0
        self._count_before_collection = 0
        self._closed: FrameType | None = None  # while this one runs, nothing counts
        # By identity: a code object's own hash reads all its bytecode. Held, so that no
        # other function can take their place.
        self._kinds: dict[int, tuple[CodeType, _Kind]] = {}

    def start(self) -> bool:
        """Begin to count; False where another profiler is in the way."""
        if sys.getprofile() is not None:
            return False
        self._thread = threading.get_ident()
        self.is_counting = True
        gc.callbacks.insert(0, self._before_collection)
        gc.callbacks.append(self._after_collection)  # behind callbacks of others
        sys.setprofile(self._notice)
        return True

    def stop(self) -> None:
        """Stop; the thread has no profiler afterwards."""
        if self.is_counting:
            self.is_counting = False
            sys.setprofile(None)
            gc.callbacks.remove(self._before_collection)
            gc.callbacks.remove(self._after_collection)

    def pause(self) -> None:
        """Until ``resume``, events cost nothing; may be nested."""
        if self.is_counting and threading.get_ident() == self._thread:
            self._paused += 1
            sys.setprofile(None)

    def resume(self) -> None:
        """The end of the last ``pause``."""
        if self.is_counting and threading.get_ident() == self._thread:
            self._paused -= 1
            if not self._paused:
                sys.setprofile(self._notice)

    def open(self) -> "Closed | None":
        """Count again where nothing does, as in what backward recomputes.

        Gives what ``close`` takes; None where calls count already.
        """
        caller = sys._getframe(1)
        if not self.is_counting or threading.get_ident() != self._thread:
            return None
        if not self._paused and self._closed in (None, caller):
            return None
        closed = Closed(self._closed, self._paused)
        self._closed, self._paused = None, 0
        sys.setprofile(self._notice)
        return closed

    def close(self, closed: "Closed") -> None:
        """The end of ``open``."""
        self._closed, self._paused = closed
        if self._paused:
            sys.setprofile(None)

    def take(self) -> int:
        """The calls since the last time that it was asked."""
        count, self._count = self._count, 0
        return count

    def _before_collection(self, phase: str, info: object) -> None:
        if phase == "start" and threading.get_ident() == self._thread:
            self._count_before_collection = self._count

    def _after_collection(self, phase: str, info: object) -> None:
        if phase == "stop" and threading.get_ident() == self._thread:
            self._count = self._count_before_collection

    def _notice(self, frame: FrameType, event: str, arg: object) -> None:
        if self._closed is not None:
            if event == "return" and frame is self._closed:
                self._closed = None
            return
        if event != "call":
            return
        code = frame.f_code
        seen = self._kinds.get(id(code))
        if seen is None:
            seen = self._kinds[id(code)] = (code, _kind(code))
        if seen[1] is _Kind.COUNTED:
            self._count += 1
        elif seen[1] is _Kind.CLOSED:
            self._closed = frame


def _kind(code: CodeType) -> _Kind:
    """Modules count, as do scripts and libraries; other Python of torch is an operator's.

    So is most of the standard library: torch's checkpoints alone call it for each tensor. A
    generator is called anew for each of its items, which is far cheaper than a call.
    """
    name = code.co_filename
    if code is observed_call.__code__ or code.co_flags & CO_GENERATOR:
        return _Kind.PASSED
    if name.startswith(_WATCHING) or name.endswith(_OVERRIDES):
        return _Kind.CLOSED
    if _torch.is_torch_code(code) and not any(each in name for each in _OVER_OPERATORS):
        return _Kind.PASSED
    if name.startswith(_STANDARD_LIBRARY) and not name.startswith(_SITE_PACKAGES):
        return _Kind.PASSED
    return _Kind.COUNTED
