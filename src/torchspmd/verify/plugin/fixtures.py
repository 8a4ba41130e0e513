"""What tests use: meshes of real or simulated ranks, a ledger, and a lock of it."""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchspmd.comm import Ledger, format_bytes
from torchspmd.errors import LockError, UsageError, WorldError
from torchspmd.testing import fake_world
from torchspmd.trace import CommDebugMode
from torchspmd.trace.modules import follow, unfollow
from torchspmd.verify.lock.changes import changes
from torchspmd.verify.lock.lockfile import (
    Lock,
    load_lock,
    lock_ledger,
    save_lock,
    to_text,
)
from torchspmd.verify.plugin.rank import RankPlugin
from torchspmd.verify.plugin.ranks import LOCK

# Ranks serve many tests, and torch never frees the groups of a mesh.
_meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}


class MeshMaker:
    """Makes meshes of named axes, in one world for each test; a context manager."""

    def __init__(self, *, on_real_ranks: bool) -> None:
        self._on_real_ranks = on_real_ranks
        self._world = contextlib.ExitStack()
        self._place: tuple[int, int] | None = None  # size and rank of a simulated world
        self._kept: list[DeviceMesh] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._kept.clear()
        self._world.close()

    def __call__(
        self, axes: Mapping[str, int] | None = None, /, *, rank: int = 0, **sizes: int
    ) -> DeviceMesh:
        """A mesh with these axes.

        Args:
            axes: Axes and sizes, for names that cannot be keywords.
            rank: Which rank this process plays; for simulated worlds.
            **sizes: Axes and sizes, as in ``spmd_mesh(dp=2, tp=4)``.
        """
        shape = {**(axes or {}), **sizes}
        _check_axes(shape)
        mesh = (
            self._real(shape, rank) if self._on_real_ranks else self._fake(shape, rank)
        )
        self._kept.append(mesh)  # the ledger finds names of axes in living meshes
        return mesh

    def _real(self, shape: dict[str, int], rank: int) -> DeviceMesh:
        world_size = math.prod(shape.values())
        if world_size != dist.get_world_size():
            raise WorldError(
                f"{_call(shape)} needs {world_size} ranks, and this test has "
                f"{dist.get_world_size()}: mark it spmd(world_size={world_size})."
            )
        if rank != 0:
            raise UsageError(
                f"spmd_mesh(rank={rank}): real ranks are all there; leave rank out."
            )
        key = tuple(shape.items())
        if key not in _meshes:
            device = "cuda" if dist.get_backend() == "nccl" else "cpu"
            _meshes[key] = _make(device, shape)
        return _meshes[key]

    def _fake(self, shape: dict[str, int], rank: int) -> DeviceMesh:
        world_size = math.prod(shape.values())
        if not 0 <= rank < world_size:
            raise UsageError(
                f"spmd_mesh(rank={rank}): the ranks of this mesh are 0 to "
                f"{world_size - 1}."
            )
        if self._place is None:
            self._world.enter_context(fake_world(world_size, rank=rank))
            self._place = (world_size, rank)
        elif self._place != (world_size, rank):
            raise WorldError(
                f"{_call(shape)} asks for rank {rank} of {world_size}; this test "
                f"already plays rank {self._place[1]} of {self._place[0]}. One test has "
                "one world."
            )
        return _make("cpu", shape)


def _make(device: str, shape: dict[str, int]) -> DeviceMesh:
    return init_device_mesh(device, tuple(shape.values()), mesh_dim_names=tuple(shape))


def _check_axes(shape: dict[str, int]) -> None:
    wrong = [
        name
        for name, size in shape.items()
        if not isinstance(size, int) or isinstance(size, bool) or size < 1
    ]
    if wrong or not shape:
        raise UsageError(
            f"{_call(shape)}: give each axis a whole number of ranks from 1 on, as in "
            "spmd_mesh(dp=2, tp=4)."
        )


def _call(shape: dict[str, int]) -> str:
    return f"spmd_mesh({', '.join(f'{name}={size}' for name, size in shape.items())})"


# ----------------------------------------------------------------------------
# What the fixture ``comm_ledger`` gives: a ledger that fills while the test runs.

_MAX_EVENTS = 1_000_000


@contextmanager
def recording() -> Iterator[Ledger]:
    """Record what is done inside, from the first module call on."""
    with CommDebugMode(sources=True, max_events=_MAX_EVENTS) as mode:
        start = _Start(mode.ledger)
        follow(start)
        try:
            yield mode.ledger
        finally:
            unfollow(start)


class _Start:
    """Empties a ledger at the first module call."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._begun = False

    def enter(self, module: nn.Module) -> None:
        """A module is called."""
        if self._begun:
            return
        self._begun = True
        setup = self._ledger.total()
        # The test holds this very ledger already, so it is begun anew, not replaced.
        self._ledger.clear()
        if setup.count:
            self._ledger.note(
                f"what was sent before the first module call is left out: {setup.count} "
                f"communications, {format_bytes(setup.payload_bytes)} payload"
            )

    def leave(self) -> None:
        """A module's call ends: nothing to do."""


# ----------------------------------------------------------------------------
# What the mark ``comm_lock`` does: one small lock file for each test that has it.

FOLDER = "comm_locks"

_WRITTEN: pytest.StashKey[list[str]] = pytest.StashKey()
_UPDATE = "pytest --comm-lock-update"


def check_use(item: pytest.Item) -> None:
    """Refuse the mark where there is nothing to compare."""
    if "comm_ledger" not in getattr(item, "fixturenames", ()):
        pytest.fail(
            f"{item.name}: the mark comm_lock compares what comm_ledger records: let "
            "the test take that fixture.",
            pytrace=False,
        )


def lock_test(item: pytest.Item, rank: RankPlugin | None) -> None:
    """Compare a test's communication with its lock, or write the lock."""
    if item.get_closest_marker("spmd") is not None and rank is None:
        lock = item.stash[LOCK]
    else:
        lock = lock_ledger(_ledger_of(item), _identity(item))
    if rank is not None:
        rank.lock = lock
        return
    if lock is None:
        pytest.fail(f"{item.name}: rank 0 sent no ledger to lock.", pytrace=False)
    path = _path(item)
    if item.config.getoption("comm_lock_update"):
        _write(item, lock, path)
    else:
        _compare(lock, path)


def written(config: pytest.Config) -> list[str]:
    """A line for each lock that this run wrote."""
    return config.stash.get(_WRITTEN, [])


def _ledger_of(item: pytest.Item) -> Ledger:
    assert isinstance(item, pytest.Function), item
    ledger = item.funcargs["comm_ledger"]
    assert isinstance(ledger, Ledger), ledger
    return ledger


def _identity(item: pytest.Item) -> str:
    """The test's name from its file on, the same wherever pytest was started."""
    return f"{item.path.name}::{item.nodeid.partition('::')[2]}"


def _path(item: pytest.Item) -> Path:
    name = re.sub(r"[^\w.-]+", "-", item.nodeid.partition("::")[2].replace("::", "."))
    return item.path.parent / FOLDER / f"{item.path.stem}.{name}.lock"


def _write(item: pytest.Item, lock: Lock, path: Path) -> None:
    if path.is_file() and path.read_text(encoding="utf-8") == to_text(lock):
        return
    path.parent.mkdir(exist_ok=True)
    save_lock(lock, path)
    lines = item.config.stash.setdefault(_WRITTEN, [])
    lines.append(f"comm locks: wrote {_shown(item, path)}")


def _shown(item: pytest.Item, path: Path) -> str:
    root = item.config.rootpath
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


def _compare(lock: Lock, path: Path) -> None:
    if not path.is_file():
        pytest.fail(f"there is no lock {path}: write it with {_UPDATE}.", pytrace=False)
    try:
        locked = load_lock(path)
    except LockError as error:
        pytest.fail(f"{error} ({_UPDATE})", pytrace=False)
    if locked.made_by != lock.made_by:
        pytest.fail(
            f"{path} is the lock of {locked.made_by}, not of {lock.made_by}: give one "
            "of the tests another name.",
            pytrace=False,
        )
    sentences = changes(locked, lock)
    if sentences:
        version = (
            f"\nThe lock was made with torch {locked.torch}, this is {lock.torch}."
            if locked.torch != lock.torch
            else ""
        )
        pytest.fail(
            f"{lock.made_by} does not communicate what its lock says:\n  "
            + "\n  ".join(sentences)
            + f"{version}\nTo accept: {_UPDATE}",
            pytrace=False,
        )
