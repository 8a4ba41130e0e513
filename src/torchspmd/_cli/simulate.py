"""Run a training script as one rank of a world that does not exist.

Collectives return at once, ``init_process_group`` accepts whatever the script passes,
and a machine without CUDA shows the script a GPU.
"""

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from unittest import mock

import torch

from torchspmd import _torch
from torchspmd.predict.hardware import DEFAULT_NETWORK, load_gpu, load_network
from torchspmd.predict.rehearsed import rehearsed_gpu
from torchspmd.rehearse.device import Gpu, NoMemory
from torchspmd.rehearse.nodes import Nodes
from torchspmd.rehearse.on_cpu import cuda_on_cpu
from torchspmd.rehearse.recording import Recording
from torchspmd.rehearse.rehearsal import rehearsal
from torchspmd.rehearse.values import Values
from torchspmd.rehearse.world import World, fake_groups
from torchspmd.testing import fake_world


def _some_gpu(count: int) -> Gpu:
    """What a script is shown where nobody says which GPU it is."""
    return Gpu("a rehearsed GPU", 80 << 30, (9, 0), count=count)


@contextlib.contextmanager
def simulated_world(
    world_size: int, rank: int, *, use_gpu: bool
) -> Iterator[list[str]]:
    """A default process group of any size, for a script that may start its own.

    Args:
        world_size: The ranks.
        rank: The one that is played.
        use_gpu: Whether tensors of ``cuda`` lie on this machine's GPU, where it has one.

    Yields:
        What a reader of the results must know; complete once the script has run.
    """
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }
    atexit.register(_silence_unwaited_warning)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        stack.enter_context(fake_world(world_size, rank=rank))
        stack.enter_context(fake_groups(World(world_size, rank, Nodes(world_size))))
        notes: list[str] = []
        if not (use_gpu and torch.cuda.is_available()):
            # One node: each rank's GPU has its number.
            notes = stack.enter_context(cuda_on_cpu(_some_gpu(world_size)))
        yield notes


def _silence_unwaited_warning() -> None:
    """Keep torch's warning of unwaited collectives off the terminal.

    A simulated script is ended in the middle, so some collectives are never waited for,
    and torch warns of them when the process ends.
    """
    if _torch.num_unwaited():
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@contextlib.contextmanager
def rehearsed_world(world: World, gpu: str | None) -> Iterator[list[str]]:
    """A world of any size, and a device whose tensors hold no memory.

    Args:
        world: The ranks.
        gpu: Its name, or a TOML file; None where the script need not know.

    Yields:
        What a reader of the results must know; complete once the script has run.
    """
    recording = Recording(world.size, world.rank, world.nodes)
    device = _some_gpu(world.nodes.gpus_per_node)
    if gpu is not None:
        device = rehearsed_gpu(load_gpu(gpu), load_network(DEFAULT_NETWORK), world)
    atexit.register(_silence_unwaited_warning)
    try:
        with rehearsal(recording, world, device, NoMemory(Values(recording.notes))):
            yield recording.notes
    finally:
        recording.notes.extend(recording.skipped)
