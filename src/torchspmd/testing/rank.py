"""What one rank does, in its own process."""

import contextlib
import datetime
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchspmd import _torch

_UNLINK_SECONDS = 1.0  # of a pool of threads, say, it may take for ever


def serve(
    connection: "multiprocessing.connection.Connection[bytes, bytes]",
    rank: int,
    world_size: int,
    backend: str,
    folder: str,
) -> None:
    """Join the group, then run what is sent until the pipe is closed."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    # As in a process that torchrun starts. Of the way in which this one was started, every
    # lock would have a name, which a rank that is killed leaves behind.
    multiprocessing.set_start_method(None, force=True)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with (Path(folder) / f"stack{rank}").open("w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
        # Where a crash was, for the parent to tell.
        faulthandler.enable(file=stack_file)
        torch.set_num_threads(1)
        gc.freeze()  # what the server imported stays: nothing to look for garbage in
        _answer(connection, _join, rank, world_size, backend, folder)
        while True:
            try:
                fn, args, kwargs, seed = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                break
            except Exception as error:
                text = "the rank could not import what it was sent"
                _send(
                    connection, pickle.dumps(("error", f"{text}:\n{_traceback(error)}"))
                )
                continue
            torch.manual_seed(seed)
            _answer(connection, fn, *args, **kwargs)
    _unlink_locks()
    os._exit(0)  # a hanging collective of another rank must not keep this one


def _unlink_locks() -> None:
    """Unlink named semaphores, which Python does only in a process that exits normally.

    Libraries make some (tqdm does when it is imported), which would be reported as leaked.
    """
    module: Any = util
    run = threading.Thread(target=module._run_finalizers, args=(0,), daemon=True)
    run.start()
    run.join(_UNLINK_SECONDS)


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


def _answer(
    connection: "multiprocessing.connection.Connection[bytes, bytes]",
    fn: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> None:
    try:
        message = pickle.dumps(("ok", fn(*args, **kwargs)))
    except BaseException as error:
        message = pickle.dumps(("error", _traceback(error)))
    # The process ends without Python's own clean-up, which would do this.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    _send(connection, message)


def _send(
    connection: "multiprocessing.connection.Connection[bytes, bytes]", message: bytes
) -> None:
    with contextlib.suppress(OSError):  # the parent may be gone
        connection.send_bytes(message)


def _traceback(error: BaseException) -> str:
    """Where it happened; our own call of the function says nothing about it."""
    frames = error.__traceback__
    inside = None if frames is None else frames.tb_next
    # A result that does not pickle has only our frame.
    return "".join(traceback.format_exception(type(error), error, inside or frames))
