"""How the process writes and ends. Pipes may be closed: ``torchspmd trace ... | head``.

What nobody reads is dropped, and the command goes on: it still writes its files, and its
exit code is the usual one. Ending on SIGPIPE would be simpler, but the signal would also
come from the sockets of the script that runs in this process.
"""

import atexit
import contextlib
import io
import os
import sys
import threading
from typing import Any, NoReturn


class _IgnoresClosedPipe(io.FileIO):
    """Drops what is written into a closed pipe."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def ignore_closed_pipes() -> None:
    """From now on, writing to a closed standard output or error is no failure."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()
            setattr(sys, name, _ignoring_closed_pipe(stream))


def _ignoring_closed_pipe(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """The same stream, for text as for bytes."""
    raw = _IgnoresClosedPipe(stream.fileno(), "w", closefd=False)
    buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


# ----------------------------------------------------------------------------
# End the process without freeing torch's process groups.
#
# A process group that is freed waits for its gloo threads with Python's lock held. A thread
# that still has a backward's ``all_reduce`` in hand needs that lock to let go of it
# (autograd hangs a Python object on it), and neither ends: about one ``torchrun`` in eight
# with ``DistributedDataParallel`` does so in torch 2.13, with or without torchspmd.

#: The exit code after Ctrl-C, as of shells: 128 and the number of SIGINT.
INTERRUPTED = 130
#: What a script under torchrun left behind: kept until the process ends.
NEVER_FREED: list[object] = []


def exit_process(code: int) -> NoReturn:
    """End with this exit code, after threads, exit handlers and written text.

    After Ctrl-C nothing is waited for: a pool whose worker was interrupted may never end.
    """
    if code != INTERRUPTED:
        # Waits for threads, and before that ends the workers of executors.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def say(command: str, *sentences: str) -> None:
    """Say something beside the answer, which standard output is for."""
    for sentence in sentences:
        print(f"torchspmd {command}: {sentence}", file=sys.stderr)
