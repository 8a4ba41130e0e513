"""Observe every communication operator that runs, from Python, C++ or compiled code.

While there is a listener, a kernel runs in front of each operator of the communication
namespaces; without one, there is none. Other operators are not touched.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import torch

from torchspmd import _torch
from torchspmd.comm import Operator, find_operator
from torchspmd.comm.kinds import NAMESPACES

# Gets a communication operator and its arguments by name, before it runs.
Listener = Callable[[Operator, Mapping[str, Any]], None]

_lock = threading.Lock()
_listeners: tuple[Listener, ...] = ()
_remove: Callable[[], None] | None = None
_inside = threading.local()  # operator: one is running; alone: who hears this thread


def listen(listener: Listener) -> Callable[[], None]:
    """Call ``listener`` before each communication; return the function that ends it."""
    # Where torch.compile fell back to eager for a region, it still looks at every Python
    # function that runs in it, and would try to compile the recording.
    listener = torch.compiler.disable(listener)
    global _listeners, _remove  # noqa: PLW0603  # the dispatcher is process-wide too
    with _lock:
        if _remove is None:
            _remove = _torch.observe(_kernels(_torch.operator_generation()))
        _listeners = (*_listeners, listener)

    def stop() -> None:
        global _listeners, _remove  # noqa: PLW0603
        with _lock:
            _listeners = tuple(other for other in _listeners if other is not listener)
            if not _listeners and _remove is not None:
                _remove()
                _remove = None

    return stop


@contextlib.contextmanager
def listen_alone(listener: Listener) -> Iterator[None]:
    """Send this thread's communication to ``listener`` alone: a rehearsal sends nothing."""
    stop = listen(lambda operator, arguments: None)  # the kernels are there
    before = getattr(_inside, "alone", None)
    _inside.alone = torch.compiler.disable(listener)
    try:
        yield
    finally:
        _inside.alone = before
        stop()


@lru_cache(maxsize=1)
def _kernels(generation: object) -> dict[Any, _torch.Kernel]:
    """Listing all of torch's operators takes milliseconds: done when there may be more."""
    for function in (_run, _torch.call_below, _torch.is_tracing_for_compile):
        _torch.keep_from_compiler(function)
    kernels: dict[Any, _torch.Kernel] = {}
    for op in _torch.registered_operators(NAMESPACES):
        operator = find_operator(_torch.packet_name(op))
        if operator is not None:
            names = _torch.argument_names(op)
            kernels[op] = partial(_run, op, operator, names)
    return kernels


def _run(
    op: _torch.OpOverload,
    operator: Operator,
    names: tuple[str, ...],
    keyset: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    # A functional collective calls an in-place one inside: that is one communication.
    # What torch.compile traces does not run, and would be counted again when it does.
    if getattr(_inside, "operator", False) or _torch.is_tracing_for_compile():
        return _torch.call_below(op, keyset, args, kwargs)
    _inside.operator = True
    try:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        alone = getattr(_inside, "alone", None)
        for listener in _listeners if alone is None else (alone,):
            listener(operator, arguments)
        return _torch.call_below(op, keyset, args, kwargs)
    finally:
        _inside.operator = False
