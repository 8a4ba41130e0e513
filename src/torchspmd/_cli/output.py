"""Output whose reader may go away, as in ``torchspmd trace ... | head``.

What nobody reads is dropped, and the command goes on: it still writes its files, and its
exit code is the one that it has with a reader. Death by SIGPIPE would be simpler, but it
would also meet the sockets of the script that runs in this process.
"""

import io
import sys
from typing import Any


class _Unread(io.FileIO):
    """Takes everything, also when nobody reads it any more."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def outlive_readers() -> None:
    """From now on, standard output and standard error need no reader."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()
            setattr(sys, name, _outliving(stream))


def _outliving(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """The same stream, for text as for bytes."""
    raw = _Unread(stream.fileno(), "w", closefd=False)
    buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
