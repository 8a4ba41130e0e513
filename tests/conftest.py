"""Fixtures for all tiers: one seed, and real ranks that are started once for a run."""

import gc
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from processes import IMPORTS, freeze_garbage
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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each test has the mark of its folder; some need a newer torch than the oldest.

    One worker of xdist has all tests on ranks: its ranks are started and warm once.
    """
    for item in items:
        newer = item.get_closest_marker("newer_torch")
        if newer is not None and torch.__version__ < (2, 13):
            reason = f"torch {torch.__version__}: {newer.args[0]}"
            item.add_marker(pytest.mark.skip(reason=reason))
        for folder in _TIERS:
            if item.path.is_relative_to(folder):
                item.add_marker(folder.name)
        if item.get_closest_marker("ranks") is not None:
            item.add_marker(pytest.mark.xdist_group("ranks"))


_TIERS = [
    Path(__file__).parent / name for name in ("unit", "fake", "ranks", "browser", "gpu")
]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let garbage collection, and whoever looks for meshes, not walk all of torch."""
    gc.freeze()
    # Before the package starts the server of forks, with fewer imports.
    if any(map(_may_fork, session.items)):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTS)
        forkserver.ensure_running()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The same for what the tests of a file leave in caches, here and on ranks."""
    if nextitem is None or nextitem.path != item.path:
        freeze_garbage()
        for ranks in _STARTED if item.get_closest_marker("ranks") else ():
            ranks.run(freeze_garbage)


_STARTED: list[Ranks] = []


def _may_fork(item: pytest.Item) -> bool:
    return isinstance(item, pytest.DoctestItem) or any(
        item.get_closest_marker(name) for name in ("ranks", "forks")
    )


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process: updates are deferred behind reductions."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def ranks2() -> Iterator[Ranks]:
    yield from _started(2)


@pytest.fixture(scope="session")
def ranks3() -> Iterator[Ranks]:
    yield from _started(3)


@pytest.fixture(scope="session")
def ranks4() -> Iterator[Ranks]:
    yield from _started(4)


def _started(world_size: int) -> Iterator[Ranks]:
    with Ranks(world_size) as ranks:
        _STARTED.append(ranks)
        yield ranks
    _STARTED.remove(ranks)


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
