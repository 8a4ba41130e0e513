"""Real ranks on this machine, seen from the process that starts them."""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from torchspmd.errors import RankError, UsageError, WorldError
from torchspmd.testing.rank import serve

_START_SECONDS = 120.0  # to start the processes and join the group, on a busy machine
_IDLE_SECONDS = 5.0  # for ranks that wait for work to end by themselves, and tidily
_BUSY_SECONDS = 0.05  # the same after a failure: most of them never would
_GRACE_SECONDS = 0.3  # after a failure, for the rank that caused it to be heard too


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    seed: int = 0,
    backend: str = "gloo",
    **kwargs: Any,
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` on real ranks of this machine.

    Each rank is a process with a default process group, one thread, ``RANK`` and
    ``WORLD_SIZE`` in its environment and the same seed.

    Args:
        fn: A function at module level (it is sent by name); its result must pickle.
        world_size: How many ranks.
        *args: Passed to ``fn``.
        timeout: Seconds that the function may take.
        seed: For ``torch.manual_seed`` on every rank.
        backend: ``gloo``, or ``nccl`` for CUDA; see ``Ranks``.
        **kwargs: Passed to ``fn``.

    Returns:
        What ``fn`` returned, by rank.

    Raises:
        RankError: A rank failed, died, or took longer than ``timeout``; the text has
            the rank's own traceback. No process is left behind.

    Example:
        >>> import torch.distributed as dist
        >>> run_ranks(dist.get_world_size, 2)
        [2, 2]
    """
    with Ranks(world_size, backend=backend) as ranks:
        return ranks.run(fn, *args, timeout=timeout, seed=seed, **kwargs)


class Ranks:
    """Ranks that are started once and serve many runs; a context manager.

    Args:
        world_size: How many ranks.
        backend: ``gloo``, or ``nccl``: rank r then has CUDA device r; where there are
            fewer devices than ranks, ranks share them and talk over loopback sockets.

    Example:
        >>> import torch.distributed as dist
        >>> with Ranks(2) as ranks:
        ...     ranks.run(dist.get_rank)
        ...     ranks.run(dist.get_world_size)
        [0, 1]
        [2, 2]
    """

    def __init__(self, world_size: int, *, backend: str = "gloo") -> None:
        if world_size < 1:
            raise UsageError(f"Ranks({world_size}): at least one rank is needed.")
        if backend not in ("gloo", "nccl"):
            raise UsageError(f"Ranks(backend={backend!r}): choose 'gloo' or 'nccl'.")
        if backend == "nccl" and not torch.cuda.is_available():
            raise WorldError("Ranks(backend='nccl'): this machine has no CUDA device.")
        self.world_size = world_size
        self.backend = backend
        self._workers: list[_Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        seed: int = 0,
        **kwargs: Any,
    ) -> list[Any]:
        """Run a function on every rank; arguments and errors as in ``run_ranks``."""
        task = _pickle_task(fn, args, kwargs, seed)
        if not self._workers:
            self._start()
        try:
            for worker in self._workers:
                # A rank that died since the last run is reported when its answer is read.
                with contextlib.suppress(OSError):
                    worker.connection.send_bytes(task)
            return self._collect(timeout, _name(fn))
        except BaseException:
            # Ranks may be anywhere in the function now: they cannot serve another run.
            self._end(_BUSY_SECONDS)
            raise

    def close(self) -> None:
        """End the processes; the next run starts new ones."""
        self._end(_IDLE_SECONDS)

    def _end(self, seconds: float) -> None:
        for worker in self._workers:
            worker.connection.close()  # an idle rank ends by itself then
        for worker in self._workers:
            worker.stop(seconds)
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="torchspmd-ranks-")
        folder = Path(self._folder.name)
        self._workers = [
            _Worker(rank, self.world_size, self.backend, folder)
            for rank in range(self.world_size)
        ]
        try:
            self._collect(_START_SECONDS, "the start of the ranks")
        except BaseException:
            self._end(_BUSY_SECONDS)
            raise

    def _collect(self, timeout: float, what: str) -> list[Any]:
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        failures: list[_Failure] = []
        waiting = {worker.connection: worker for worker in self._workers}
        while waiting:
            left = deadline - time.monotonic()
            ready = multiprocessing.connection.wait(list(waiting), max(left, 0))
            if not ready:
                break
            for connection in ready:
                worker = waiting.pop(connection)  # type: ignore[call-overload]
                answer = worker.receive()
                if isinstance(answer, _Failure):
                    failures.append(answer)
                    # Other ranks may fail because of this one, and must not be reported in
                    # its place.
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                else:
                    results[worker.rank] = answer
        if failures:
            failures.sort(key=lambda failure: not failure.is_death)
            raise RankError(f"{what}: " + "\n\n".join(each.text for each in failures))
        if waiting:
            raise RankError(_timeout_text(what, timeout, list(waiting.values())))
        return [results[rank] for rank in range(self.world_size)]


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a rank gave no result."""

    text: str
    is_death: bool = False


class _Worker:
    """The parent's end of one rank."""

    def __init__(self, rank: int, world_size: int, backend: str, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        # The server imports torch once; each rank is then a quick fork of it.
        context.set_forkserver_preload(["torch", "torch.distributed.tensor"])
        self.rank = rank
        self.stack_file = folder / f"stack{rank}"
        self.connection, child = context.Pipe()
        self.process = context.Process(
            target=serve,
            args=(child, rank, world_size, backend, str(folder)),
            daemon=True,
        )
        self.process.start()
        child.close()

    def receive(self) -> Any:
        """The rank's result, or a ``_Failure``."""
        try:
            message = self.connection.recv_bytes()
        except (EOFError, OSError):
            self.process.join(5)
            text = f"rank {self.rank} died (exit code {self.process.exitcode})."
            return _Failure(f"{text}\n{self._crash_stack()}".rstrip(), is_death=True)
        try:
            status, payload = pickle.loads(message)
        except Exception as error:
            return _Failure(
                f"rank {self.rank} gave a result that does not load here: "
                f"{type(error).__name__}: {error}"
            )
        if status == "error":
            return _Failure(f"rank {self.rank} failed:\n\n{payload}")
        return payload

    def _crash_stack(self) -> str:
        """Where the process crashed, if it could still write it."""
        with contextlib.suppress(OSError):
            return self.stack_file.read_text()
        return ""

    def stack(self) -> str:
        """Where the rank is now, from its own process."""
        if self.process.pid is None or not self.process.is_alive():
            return "(the process is gone)"
        os.kill(self.process.pid, signal.SIGUSR1)
        for _ in range(20):
            time.sleep(0.05)
            if self.stack_file.exists() and (text := self.stack_file.read_text()):
                return text
        return "(no stack: the process does not answer)"

    def stop(self, seconds: float) -> None:
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
        self.process.join(5)


def _pickle_task(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], seed: int
) -> bytes:
    try:
        return pickle.dumps((fn, args, kwargs, seed))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"run_ranks: {_name(fn)} or its arguments cannot be sent to the ranks "
            f"({error}). Define the function at module level, not inside another "
            "function, and pass arguments that pickle."
        ) from None


def _timeout_text(what: str, timeout: float, late: "list[_Worker]") -> str:
    ranks = ", ".join(str(worker.rank) for worker in late)
    stacks = "\n".join(f"rank {worker.rank}:\n{worker.stack()}" for worker in late)
    return (
        f"{what}: no answer from rank {ranks} after {timeout:g} s. A collective that "
        "not all ranks call, or that they call in another order, waits like this.\n\n"
        f"{stacks}"
    )


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))
