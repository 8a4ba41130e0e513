"""Rehearse a function, and look at what was recorded."""

import contextlib
from collections import Counter

import pytest

from torchspmd.rehearse.device import Gpu
from torchspmd.rehearse.recording import Alloc, Free, Recording
from torchspmd.rehearse.rehearsal import rehearsal
from torchspmd.rehearse.world import World


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
    gpu = Gpu("NVIDIA H100", 80 << 30, (9, 0))
    with rehearsal(recording, World(size, rank), gpu, Memory()):
        yield recording


@pytest.fixture
def rehearse():
    return rehearsed


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
