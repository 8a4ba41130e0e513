"""Helpers for tests of distributed code, yours and ours.

``fake_mesh`` gives any world size in one process, for shapes, layouts and counts.
``run_ranks`` starts real gloo processes, for numbers; ``Ranks`` keeps them for many runs.
"""

import contextlib
import datetime
import faulthandler
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchspmd import _torch
from torchspmd.errors import RankError, UsageError, WorldError

_START_SECONDS = 120.0  # to start the processes and join the group, on a busy machine
_GRACE_SECONDS = 0.3  # after a failure, for the rank that caused it to be heard too


@contextlib.contextmanager
def fake_mesh(
    shape: int | Sequence[int],
    names: Sequence[str] | None = None,
    *,
    rank: int = 0,
    device_type: str = "cpu",
) -> Iterator[DeviceMesh]:
    """A mesh of any size in this one process; collectives return at once.

    Shapes, layouts and counts are those of a real run, values are not. Also works as a
    decorator.

    Args:
        shape: Size of each mesh axis.
        names: Name of each axis, such as ``("dp", "tp")``.
        rank: Which rank this process plays.
        device_type: Where tensors of the mesh live.

    Example:
        >>> with fake_mesh((2, 4), ("dp", "tp")) as mesh:
        ...     mesh["tp"].size()
        4
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    world_size = math.prod(sizes)
    _check_fake_mesh(sizes, names, rank, world_size)
    with fake_world(world_size, rank=rank):
        mesh = init_device_mesh(
            device_type, sizes, mesh_dim_names=tuple(names) if names else None
        )
        yield mesh  # held here: the caller may not bind it


@contextlib.contextmanager
def fake_world(world_size: int, *, rank: int = 0) -> Iterator[None]:
    """A default process group of any size in this one process, gone again at the end."""
    if dist.is_initialized():
        raise WorldError(
            f"a fake world of {world_size} ranks cannot start: this process already has "
            f"a default process group of {dist.get_world_size()} ranks. "
            "Call torch.distributed.destroy_process_group() first."
        )
    dist.init_process_group(
        "fake", store=_torch.fake_store(), rank=rank, world_size=world_size
    )
    try:
        with _torch.ddp_on_fake_groups():
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _check_fake_mesh(
    sizes: tuple[int, ...], names: Sequence[str] | None, rank: int, world_size: int
) -> None:
    problems = []
    if not sizes or any(size < 1 for size in sizes):
        problems.append(f"shape {sizes}: every axis needs at least one rank")
    elif not 0 <= rank < world_size:
        problems.append(
            f"rank {rank}: the ranks of this mesh are 0 to {world_size - 1}"
        )
    if isinstance(names, str):
        problems.append(f"names {names!r}: pass a tuple of names, ({names!r},)")
    elif names is not None and len(names) != len(sizes):
        problems.append(f"names {tuple(names)}: the mesh has {len(sizes)} axes")
    if problems:
        raise UsageError("fake_mesh: " + "; ".join(problems) + ".")


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
                # A rank that died since the last run is told when its answer is read.
                with contextlib.suppress(OSError):
                    worker.connection.send_bytes(task)
            return self._collect(timeout, _name(fn))
        except BaseException:
            # Ranks may be anywhere in the function now: they cannot serve another run.
            self.close()
            raise

    def close(self) -> None:
        """End the processes; the next run starts new ones."""
        for worker in self._workers:
            worker.stop()
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
            self.close()
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
                    # Other ranks may fail of this one: they must not be told instead.
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
            target=_serve,
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
            return _Failure(
                f"rank {self.rank} died without a word "
                f"(exit code {self.process.exitcode}).",
                is_death=True,
            )
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

    def stop(self) -> None:
        self.connection.close()
        self.process.join(0.05)
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


def _serve(
    connection: "multiprocessing.connection.Connection[bytes, bytes]",
    rank: int,
    world_size: int,
    backend: str,
    folder: str,
) -> None:
    """The life of one rank: join the group, then run what is sent until the pipe ends."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with (Path(folder) / f"stack{rank}").open("w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
        torch.set_num_threads(1)
        _answer(connection, _join, rank, world_size, backend, folder)
        while True:
            try:
                fn, args, kwargs, seed = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                break
            except Exception:
                _answer(connection, _reraise, traceback.format_exc())
                continue
            torch.manual_seed(seed)
            _answer(connection, fn, *args, **kwargs)
    os._exit(0)  # a hanging collective of another rank must not keep this one


def _join(rank: int, world_size: int, backend: str, folder: str) -> None:
    if backend == "nccl":
        _take_device(rank, world_size)
    dist.init_process_group(
        backend,
        store=_torch.file_store(Path(folder) / "store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=300),
    )


def _take_device(rank: int, world_size: int) -> None:
    num_devices = torch.cuda.device_count()
    if num_devices < world_size:
        # NCCL refuses two ranks of one host on one device: let each be a host.
        os.environ.update(
            NCCL_HOSTID=f"rank{rank}",
            NCCL_P2P_DISABLE="1",
            NCCL_SHM_DISABLE="1",
            NCCL_SOCKET_IFNAME="lo",
        )
    torch.cuda.set_device(rank % num_devices)


def _reraise(text: str) -> None:
    raise RuntimeError(f"the rank could not import what it was sent:\n{text}")


def _answer(
    connection: "multiprocessing.connection.Connection[bytes, bytes]",
    fn: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> None:
    try:
        message = pickle.dumps(("ok", fn(*args, **kwargs)))
    except BaseException:
        message = pickle.dumps(("error", traceback.format_exc()))
    # The process ends without Python's own clean-up, which would do this.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    with contextlib.suppress(OSError):
        connection.send_bytes(message)
