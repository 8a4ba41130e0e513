"""The pytest plugin of torchspmd: fixtures, marks and ``--comm-lock-update``.

It stands outside of the package, so that pytest starts without torch for tests that
use none of it; all work is done in ``torchspmd.verify``, imported when it is needed.
"""

import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torchspmd import Ledger
    from torchspmd.verify.plugin.fixtures import MeshMaker

# The name under which a rank's own pytest knows that it is one; see verify.plugin.rank.
RANK_PLUGIN = "torchspmd-rank"

_MARKS = (
    "spmd(world_size, timeout=60, seed=0, backend='gloo'): run the test on that many "
    "real ranks of this machine.",
    "comm_lock: compare what comm_ledger records with a lock next to the test file; "
    "pytest --comm-lock-update writes it.",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--comm-lock-update`` and ``spmd_max_ranks``."""
    parser.getgroup("torchspmd").addoption(
        "--comm-lock-update",
        action="store_true",
        help="write the communication locks of the tests that run, instead of comparing",
    )
    parser.addini(
        "spmd_max_ranks",
        "the most real ranks that a test marked spmd may ask for "
        "(four for each core of the machine, and at least 8)",
        default="",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the marks known."""
    for mark in _MARKS:
        config.addinivalue_line("markers", mark)


@pytest.fixture
def spmd_mesh(request: pytest.FixtureRequest) -> Iterator["MeshMaker"]:
    """Makes meshes: ``spmd_mesh(dp=2, tp=4)``.

    In a test marked ``spmd`` over its real ranks, else over a simulated world of any
    size, which is gone after the test.
    """
    from torchspmd.verify.plugin.fixtures import MeshMaker

    with MeshMaker(on_real_ranks=_is_rank(request.config)) as maker:
        yield maker


@pytest.fixture
def comm_ledger() -> Iterator["Ledger"]:
    """A ledger that fills with what the test communicates.

    What is sent before the first module call is set-up: once a module is called it is
    left out, and a note of the ledger says so.
    """
    from torchspmd.verify.plugin.fixtures import recording

    with recording() as ledger:
        yield ledger


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse wrong marks; leave the fixtures of a test on ranks to the ranks."""
    if _is_rank(item.config):
        return
    if item.get_closest_marker("spmd") is not None:
        from torchspmd.verify.plugin.ranks import prepare

        prepare(item)
    if item.get_closest_marker("comm_lock") is not None:
        from torchspmd.verify.plugin.fixtures import check_use

        check_use(item)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked ``spmd`` on its ranks."""
    if pyfuncitem.get_closest_marker("spmd") is None or _is_rank(pyfuncitem.config):
        return None
    from torchspmd.verify.plugin.ranks import run_on_ranks

    run_on_ranks(pyfuncitem)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """After a test that passed: compare what it communicated with its lock."""
    result = yield
    if item.get_closest_marker("comm_lock") is not None:
        from torchspmd.verify.plugin.fixtures import lock_test

        lock_test(item, item.config.pluginmanager.get_plugin(RANK_PLUGIN))
    return result


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Name the locks that were written."""
    if config.getoption("comm_lock_update"):
        from torchspmd.verify.plugin.fixtures import written

        for line in written(config):
            terminalreporter.write_line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the ranks, if this run started any."""
    ranks = sys.modules.get("torchspmd.verify.plugin.ranks")
    if ranks is not None:
        ranks.close_pools(config)


def _is_rank(config: pytest.Config) -> bool:
    return config.pluginmanager.has_plugin(RANK_PLUGIN)
