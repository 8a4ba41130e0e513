"""Methods of one object that threads call one after another."""

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar, cast

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _Locked(Protocol):
    lock: threading.RLock


def one_at_a_time(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Run a method of an object only while it holds the object's ``lock``.

    A thread that saves a checkpoint looks at the model while another one trains: it waits
    for the end of the step.
    """

    @functools.wraps(method)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with cast(_Locked, args[0]).lock:
            return method(*args, **kwargs)

    return run
