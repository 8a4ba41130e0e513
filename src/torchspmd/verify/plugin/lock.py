"""Locks of tests: one small file for each test marked ``comm_lock``."""

import re
from pathlib import Path

import pytest

from torchspmd.comm import Ledger
from torchspmd.errors import LockError
from torchspmd.verify.lock.changes import changes
from torchspmd.verify.lock.contents import Lock, lock_ledger
from torchspmd.verify.lock.text import load_lock, save_lock, to_text
from torchspmd.verify.plugin.rank import RankPlugin
from torchspmd.verify.plugin.ranks import LOCK

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
