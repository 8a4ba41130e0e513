"""Run a training script as one rank of a world that does not exist.

Collectives return at once, ``init_process_group`` accepts whatever the script passes,
and on a machine without CUDA the script's ``cuda`` is this machine's ``cpu``.
"""

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.overrides import TorchFunctionMode

from torchspmd import _torch
from torchspmd.predict.hardware import DEFAULT_NETWORK, load_gpu, load_network
from torchspmd.predict.rehearsed import rehearsed_gpu
from torchspmd.rehearse.device import Gpu, NoMemory
from torchspmd.rehearse.recording import Recording
from torchspmd.rehearse.rehearsal import rehearsal
from torchspmd.rehearse.world import World
from torchspmd.testing import fake_world

# Functions of torch.cuda that do something to a device, and return nothing.
_CUDA_EFFECTS = (
    "empty_cache",
    "manual_seed",
    "manual_seed_all",
    "reset_peak_memory_stats",
    "set_device",
    "synchronize",
)


@contextlib.contextmanager
def simulated_world(world_size: int, rank: int) -> Iterator[None]:
    """A default process group of any size, for a script that may start its own."""
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }

    def start(*args: object, **kwargs: object) -> None:
        # The script's backend, address and sizes would wait for ranks that never come.
        if not dist.is_initialized():
            store = _torch.fake_store()
            plain_start("fake", store=store, rank=rank, world_size=world_size)

    plain_start = dist.init_process_group
    atexit.register(_silence_unwaited_warning)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        stack.enter_context(fake_world(world_size, rank=rank))
        for module in (dist, distributed_c10d, device_mesh):
            stack.enter_context(mock.patch.object(module, "init_process_group", start))
        yield


def _silence_unwaited_warning() -> None:
    """Keep torch's warning of unwaited collectives off the terminal.

    A simulated script is ended in the middle, so some collectives are never waited for,
    and torch warns of them when the process ends.
    """
    if _torch.num_unwaited():
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@contextlib.contextmanager
def rehearsed_world(world: World, gpu: str | None) -> Iterator[None]:
    """A world of any size, and a device whose tensors hold no memory.

    Args:
        world: The ranks.
        gpu: Its name, or a TOML file; None where the script need not know.
    """
    recording = Recording(world.size, world.rank, world.gpus_per_node)
    device = Gpu("a rehearsed GPU", 80 << 30, (9, 0))
    if gpu is not None:
        device = rehearsed_gpu(load_gpu(gpu), load_network(DEFAULT_NETWORK), world)
    atexit.register(_silence_unwaited_warning)
    with rehearsal(recording, world, device, NoMemory()):
        yield


@contextlib.contextmanager
def cuda_as_cpu() -> Iterator[None]:
    """Let code that asks for ``cuda`` run on this machine's ``cpu``."""
    plain_mesh = device_mesh.DeviceMesh.__init__

    def build_mesh(mesh: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        plain_mesh(mesh, _to_cpu(device_type), *args, **kwargs)

    plain_autocast: Any = torch.autocast.__init__

    def build_autocast(
        context: Any, device_type: str, *args: Any, **kwargs: Any
    ) -> None:
        plain_autocast(context, _to_cpu(device_type), *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for name in _CUDA_EFFECTS:
            # One function each: torch's compiler keeps them in a table by identity.
            stack.enter_context(mock.patch.object(torch.cuda, name, _no_effect()))
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: 0))
        stack.enter_context(
            mock.patch.object(device_mesh.DeviceMesh, "__init__", build_mesh)
        )
        # torch keeps which module a device has, and would keep the CPU's for "cuda".
        stack.callback(torch.get_device_module.cache_clear)
        # Without it a script's casts, and so half of what it sends, would be lost.
        stack.enter_context(
            mock.patch.object(torch.autocast, "__init__", build_autocast)
        )
        stack.enter_context(_CudaAsCpu())
        yield


class _CudaAsCpu(TorchFunctionMode):
    """Every torch function that is given a CUDA device gets the CPU instead."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        places = kwargs or {}
        return func(
            *(_to_cpu(arg) for arg in args),
            **{name: _to_cpu(value) for name, value in places.items()},
        )


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value


def _no_effect() -> Callable[..., None]:
    return lambda *args, **kwargs: None
