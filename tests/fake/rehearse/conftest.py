"""Rehearse a function, and look at what was recorded."""

import contextlib
from collections import Counter

import pytest

from torchspmd.rehearse.device import Gpu
from torchspmd.rehearse.on_cpu import cuda_on_cpu
from torchspmd.rehearse.recording import Alloc, Free, Recording
from torchspmd.rehearse.rehearsal import rehearsal
from torchspmd.rehearse.world import World, fake_groups
from torchspmd.testing.fake import fake_world

GPU = Gpu("NVIDIA H100", 80 << 30, (9, 0))


class Memory:
    def count(self):
        return 512, 1024

    def peaks(self):
        return 2048, 4096

    def reset_peaks(self):
        pass


@contextlib.contextmanager
def rehearsed(size=1, rank=0):
    recording = Recording(size, rank)
    with rehearsal(recording, World(size, rank), GPU, Memory()):
        yield recording


@contextlib.contextmanager
def run_on_cpu(size=1):
    with fake_world(size), fake_groups(World(size, 0)), cuda_on_cpu(GPU) as notes:
        yield notes


@pytest.fixture
def rehearse():
    return rehearsed


@pytest.fixture
def on_cpu():
    return run_on_cpu


def live_bytes(recording, stop=None):
    """Bytes by category after this many events."""
    live = {}
    for event in recording.events[:stop]:
        if isinstance(event, Alloc):
            live[event.storage] = event.nbytes
        elif isinstance(event, Free):
            live.pop(event.storage, None)
    totals = Counter()
    for storage, nbytes in live.items():
        totals[recording.storages[storage].category.value] += nbytes
    return dict(totals)


@pytest.fixture(name="live_bytes")
def _live_bytes():
    return live_bytes
