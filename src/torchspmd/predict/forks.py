"""Work in processes of their own, forked from one that has imported everything.

Importing torch takes longer than rehearsing a few blocks. So one process imports it, works
on nothing itself, and forks for each piece of work that it is asked for: by the process
that started it, or by one of its forks, over a socket in a folder that all of them know.
"""

import contextlib
import io
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, Self, TypeAlias

from torchspmd.errors import UsageError

__all__ = ["Forks", "quiet", "serve"]

# Does what is asked for, in a fork; gives why it could not be done, or "".
Work: TypeAlias = Callable[[Any], str]
_SOCKET = "forks"
_LONGEST = 80  # bytes of a folder's name: beside the socket's own


class Forks:
    """Asks the process that forks. A context: that process ends with it.

    Args:
        folder: An empty one, of this user alone.
        command: Starts that process (``serve``) for the first piece of work, with
            ``environment``; None: somebody has started it.
    """

    def __init__(
        self,
        folder: Path,
        command: list[str] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self._command, self._environment = command, environment
        self._starting = threading.Lock()
        self._stop = contextlib.ExitStack()

    @classmethod
    def of_this_process(cls, folder: Path, work: Work) -> Self:
        """Those of a process that has done nothing yet, as it is now."""
        listener = _listen(folder)
        mine, others = os.pipe()
        sys.stdout.flush()
        process = os.fork()
        if not process:
            os.close(others)
            _fork_for_each(listener, mine, work)
        os.close(mine)
        listener.close()
        forks = cls(folder)
        forks._stop.callback(os.waitpid, process, 0)
        forks._stop.callback(os.close, others)
        return forks

    def ask(self, question: object, seconds: float) -> str:
        """Have it done: why that could not be, or "".

        Raises:
            TimeoutError: It took longer than these seconds.
        """
        with self._connect() as connection:
            connection.send(question)
            if not connection.poll(seconds):
                raise TimeoutError
            try:
                return str(connection.recv())
            except EOFError:
                return "its process was ended, perhaps for want of memory."

    def _connect(self) -> Connection:
        with self._starting:
            if not (self.folder / _SOCKET).exists() and self._command:
                self._start(self._command)
        asking = socket.socket(socket.AF_UNIX)
        with _short(self.folder) as folder:
            asking.connect(str(folder / _SOCKET))
        return Connection(asking.detach())

    def _start(self, command: list[str]) -> None:
        said = self.folder / "said"
        with said.open("wb") as file:
            process = subprocess.Popen(
                command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=file,
            )
        self._stop.callback(process.communicate)  # closes what it reads from
        while not (self.folder / _SOCKET).exists():
            if process.poll() is not None:
                text = said.read_text(encoding="utf-8", errors="replace").strip()
                raise UsageError(
                    "the process that rehearses other ranks did not start: "
                    f"{text.splitlines()[-1] if text else process.returncode}"
                )
            time.sleep(0.01)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.close()


def serve(folder: Path, work: Work) -> NoReturn:
    """What the process of a ``command`` does, until its standard input ends."""
    _fork_for_each(_listen(folder), 0, work)


def _listen(folder: Path) -> socket.socket:
    """Who finds the socket can connect to it."""
    listener = socket.socket(socket.AF_UNIX)
    with _short(folder) as short_folder:
        path = short_folder / f"{_SOCKET}-{os.getpid()}"
        listener.bind(str(path))
        listener.listen()
        path.rename(short_folder / _SOCKET)
    return listener


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[Path]:
    """A name that is short enough for a socket, which are at most 104 bytes long."""
    names = Path("/proc/self/fd")
    if len(os.fsencode(folder)) < _LONGEST or not names.exists():
        yield folder
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        yield names / str(number)
    finally:
        os.close(number)


def _fork_for_each(listener: socket.socket, parent: int, work: Work) -> NoReturn:
    """Until the other end of ``parent`` is closed, as it is when that process ends."""
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(parent, selectors.EVENT_READ)
        handlers = {
            number: signal.signal(number, signal.SIG_IGN)
            for number in (signal.SIGINT, signal.SIGCHLD)  # no zombies
        }
        while all(key.fileobj is listener for key, _ in selector.select()):
            asked, _ = listener.accept()
            if not os.fork():
                for number, handler in handlers.items():
                    signal.signal(number, handler)
                listener.close()
                _do(Connection(asked.detach()), work)
            asked.close()
    os._exit(0)


def _do(connection: Connection, work: Work) -> NoReturn:
    with contextlib.suppress(OSError), quiet():  # nobody may wait for it any more
        try:
            problem = work(connection.recv())
        except BaseException as error:
            problem = short(error)
        connection.send(problem)
    os._exit(0)


def short(error: BaseException) -> str:
    """Its type, and the first line of what it says."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, nothing that is printed is seen.

    Loggers that were made before, and C++, write to the descriptors themselves.
    """
    kept = [os.dup(number) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    output = io.StringIO()
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            yield
    finally:
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)
        os.close(nowhere)
