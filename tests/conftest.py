"""Fixtures for all tiers: one seed, and real ranks that are started once for a run."""

import functools
import multiprocessing
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest
import torch
from hypothesis import settings
from processes import IMPORTS

from torchspmd.testing import Ranks

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
