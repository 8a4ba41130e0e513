"""One test on one rank: a pytest of its own runs it, fixtures and all."""

import contextlib
import gc
import io
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from torchspmd.verify.lock.lockfile import Lock

# The parent decides these for the whole run; on a rank they would end or narrow it.
_NOT_FOR_RANKS = frozenset(
    "basetemp capture collectonly color confcutdir continue_on_collection_errors debug "
    "deselect durations failedfirst file_or_dir ignore ignore_glob importmode inifilename "
    "keyword last_failed_no_failures lf markexpr maxfail newfirst no_header no_summary "
    "override_ini plugins pythonwarnings quiet reportchars rootdir runxfail setuponly "
    "setupplan setupshow stepwise stepwise_reset stepwise_skip trace usepdb usepdb_cls "
    "verbose xmlpath".split()
)


@dataclass(frozen=True, slots=True)
class RankTask:
    """What a rank is to do.

    Attributes:
        nodeid: The test.
        arguments: For the rank's pytest.
        options: Values of the parent's command line that tests may read.
        folder: Where each rank leaves its result.
        tmp_path: The folder that all ranks share; None where the test names none.
        cache: Whether pytest's cache is on; without it nothing knows ``cache_dir``.
    """

    nodeid: str
    arguments: tuple[str, ...]
    options: Mapping[str, Any]
    folder: Path
    tmp_path: Path | None
    cache: bool


@dataclass(frozen=True, slots=True)
class RankResult:
    """How the test went on one rank: texts by what failed, was skipped, was printed."""

    failures: tuple[str, ...]
    skipped: str | None
    output: str
    warnings: tuple[str, ...]
    lock: Lock | None


class RankFailedError(Exception):
    """Tells the other ranks' keeper that this one gave up; the result has the reason."""


def warm_up(plugins: tuple[str, ...]) -> None:
    """Import what every test on this rank needs; nothing to do for a rank that has run."""
    if "pytest_torchspmd" not in sys.modules:
        words = [word for name in plugins for word in ("-p", name)]
        _run_pytest(["--version", *words], [])
        gc.freeze()  # pytest collects garbage several times a run, and torch is large


def _run_pytest(arguments: Sequence[str], plugins: list[object]) -> str:
    """Run pytest and give what it printed."""
    said = io.StringIO()
    # One pytest inside another: options of the outer one must not reach this one.
    quiet = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, quiet))
        stack.enter_context(contextlib.redirect_stdout(said))
        stack.enter_context(contextlib.redirect_stderr(said))
        pytest.main([*arguments], plugins=plugins)
    return said.getvalue()


def run_test(task: RankTask) -> None:
    """Run the test on this rank and leave the result in the task's folder."""
    rank = dist.get_rank()
    plugin = RankPlugin(task)
    own = ("-o", f"cache_dir={task.folder / f'cache{rank}'}") if task.cache else ()
    result = plugin.result(_run_pytest([*task.arguments, *own], [plugin]))
    (task.folder / f"rank{rank}").write_bytes(pickle.dumps(result))
    if result.failures:
        raise RankFailedError


class RankPlugin:
    """Listens to the rank's pytest."""

    # pytest takes it as the plugin's name, by which it knows that it is on a rank.
    __name__ = "torchspmd-rank"

    def __init__(self, task: RankTask) -> None:
        self.lock: Lock | None = None
        self._task = task
        self._failures: list[str] = []
        self._skipped: str | None = None
        self._output: list[str] = []
        self._warnings: list[str] = []
        self._ran = False

    def result(self, said: str) -> RankResult:
        """How it went; ``said`` is what pytest itself printed."""
        if not self._ran and not self._failures:
            self._failures.append(f"pytest did not run the test here:\n{said.strip()}")
        return RankResult(
            tuple(self._failures),
            self._skipped,
            "".join(self._output),
            tuple(self._warnings),
            self.lock,
        )

    @pytest.fixture
    def tmp_path(self) -> Path:
        """One folder for all ranks."""
        if self._task.tmp_path is not None:
            return self._task.tmp_path
        shared = self._task.folder / "tmp"  # asked for while the test runs
        shared.mkdir(exist_ok=True)
        return shared

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        """Let tests read the options of the command line."""
        known = vars(session.config.option)
        for name, value in self._task.options.items():
            if name in known and name not in _NOT_FOR_RANKS:
                known[name] = value

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the one test."""
        items[:] = [item for item in items if item.nodeid == self._task.nodeid][:1]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep what went wrong before the test was found."""
        if report.failed:
            self._failures.append(str(report.longreprtext))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep how setup, call or teardown went."""
        self._ran = True
        if report.failed:
            where = "" if report.when == "call" else f"in {report.when}:\n"
            self._failures.append(f"{where}{_indented(report.longreprtext)}")
        elif report.skipped and isinstance(report.longrepr, tuple):
            self._skipped = str(report.longrepr[2]).removeprefix("Skipped: ")
        if report.when == "teardown":
            self._output += [text for _, text in report.sections]

    def pytest_warning_recorded(self, warning_message: Any) -> None:
        """Keep a warning."""
        kind = warning_message.category.__name__
        self._warnings.append(f"{kind}: {warning_message.message}")


def _indented(text: str) -> str:
    """Put back what pytest strips off the first line of a function's source."""
    return f"    {text}" if text.startswith(("@", "def ")) else text
