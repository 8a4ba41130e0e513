"""Fixtures for all tiers: one seed, and real ranks that are started once for a run."""

import functools
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest
import torch
from hypothesis import settings
from processes import IMPORTS
from torch.distributed.device_mesh import DeviceMesh

from torchspmd.testing import Ranks, fake_mesh

# Inductor compiles a few small kernels: its pool of processes would import torch for them.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Shadow steps have tests of their own; all others would run each step twice.
os.environ.setdefault("TORCHSPMD_SHADOW", "0")

# The same examples in every run; `--hypothesis-profile explore` draws new ones.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.register_profile("explore", max_examples=500, deadline=None)
settings.load_profile("repeatable")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("ranks") is not None:
        _start_fork_server()


@pytest.fixture
def fork_server() -> None:
    """Forks of one process do not import torch anew."""
    _start_fork_server()


@functools.cache
def _start_fork_server() -> None:
    """Start it before the package does so with fewer imports."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTS)
    forkserver.ensure_running()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def ranks2() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def ranks3() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def ranks4() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(params=(2, 3))
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """What divides by two is uneven on three, and the third gets none of four rows."""
    found: Ranks = request.getfixturevalue(f"ranks{request.param}")
    return found


@pytest.fixture
def tp2() -> Iterator[DeviceMesh]:
    with fake_mesh(2, ("tp",)) as mesh:
        yield mesh


@pytest.fixture
def tp4() -> Iterator[DeviceMesh]:
    with fake_mesh(4, ("tp",)) as mesh:
        yield mesh


@pytest.fixture
def dp2_tp2() -> Iterator[DeviceMesh]:
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        yield mesh


@pytest.fixture
def dp2_tp4() -> Iterator[DeviceMesh]:
    with fake_mesh((2, 4), ("dp", "tp")) as mesh:
        yield mesh
