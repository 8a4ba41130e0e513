"""Tests marked ``spmd``, seen from the pytest that the user started."""

import inspect
import os
import pickle
import re
import sys
import tempfile
import unittest
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from torchspmd.comm.folding import ranges
from torchspmd.errors import RankError, SpmdError
from torchspmd.testing import Ranks
from torchspmd.verify.lock.lockfile import Lock
from torchspmd.verify.plugin.rank import RankResult, RankTask, run_test, warm_up

# Made once for a whole run of pytest, and ended by the plugin.
POOLS: pytest.StashKey[dict[tuple[int, str], Ranks]] = pytest.StashKey()
MARK: pytest.StashKey["SpmdMark"] = pytest.StashKey()
LOCK: pytest.StashKey[Lock | None] = pytest.StashKey()

_START_SECONDS = 120.0
_ADDRESS = re.compile(r"0x[0-9a-f]+")

# Plugins that start processes or write reports of their own.
_NOT_ON_RANKS = ("xdist", "xdist.looponfail", "pytest_cov", "html", "metadata")


@dataclass(frozen=True, slots=True)
class SpmdMark:
    """The mark's arguments."""

    world_size: int
    timeout: float = 60.0
    seed: int = 0
    backend: str = "gloo"


def prepare(item: pytest.Item) -> None:
    """Read the mark, and keep pytest from making here what the ranks will make."""
    if not isinstance(item, pytest.Function) or _is_unittest(item):
        _refuse(item, "marks plain test functions and methods only")
    item.stash[MARK] = _read_mark(item)
    for name in item.fixturenames:
        if name != "tmp_path":
            item.funcargs.setdefault(name, None)


def run_on_ranks(item: pytest.Function) -> None:
    """Run the test on every rank; fail or skip here as it did there."""
    __tracebackhide__ = True
    mark = item.stash[MARK]
    with tempfile.TemporaryDirectory(prefix="torchspmd-test-") as name:
        folder, death, refusal = Path(name), None, None
        task = _task(item, folder)
        try:
            pool = _pool(item.config, mark)
            pool.run(run_test, task, timeout=mark.timeout, seed=mark.seed)
        except RankError as error:
            death = str(error)
        except SpmdError as error:
            refusal = str(error).rstrip(".")
        results = _read(folder, mark.world_size)
    if refusal is not None:
        _refuse(item, f"cannot run: {refusal}")
    _pass_on(item, results)
    _judge(results, death, mark.world_size)
    item.stash[LOCK] = results[0].lock if results else None


def _is_unittest(item: pytest.Function) -> bool:
    return isinstance(item.cls, type) and issubclass(item.cls, unittest.TestCase)


def _read_mark(item: pytest.Function) -> SpmdMark:
    found = item.get_closest_marker("spmd")
    assert found is not None, item
    wrong = _wrong_arguments(found)
    if wrong is not None:
        _refuse(item, f"takes world_size, timeout, seed and backend ({wrong})")
    mark = SpmdMark(*found.args, **found.kwargs)
    size, most = mark.world_size, _most_ranks(item.config)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        _refuse(item, f"needs a whole world_size from 1 on, not {size!r}")
    if size > most:
        _refuse(
            item,
            f"asks for {size} real ranks, and this machine is taken for {most} "
            f"({os.cpu_count()} cores; the ini option spmd_max_ranks changes it): take "
            "fewer, or leave the mark out for a simulated world of any size",
        )
    return mark


def _wrong_arguments(found: pytest.Mark) -> str | None:
    try:
        inspect.signature(SpmdMark).bind(*found.args, **found.kwargs)
    except TypeError as error:
        return str(error)
    return None


def _most_ranks(config: pytest.Config) -> int:
    text = str(config.getini("spmd_max_ranks"))
    if not text:
        return max(8, 4 * (os.cpu_count() or 1))
    if not text.isdecimal() or not int(text):
        raise pytest.UsageError(
            f"spmd_max_ranks = {text}: give a whole number from 1 on."
        )
    return int(text)


def _refuse(item: pytest.Item, why: str) -> NoReturn:
    __tracebackhide__ = True
    pytest.fail(f"{item.name}: the mark spmd {why}.", pytrace=False)


def _pool(config: pytest.Config, mark: SpmdMark) -> Ranks:
    pools = config.stash.setdefault(POOLS, {})
    key = (mark.world_size, mark.backend)
    if key not in pools:
        pools[key] = Ranks(mark.world_size, backend=mark.backend)
    # New ranks import what they need now, not in the time that the test has.
    pools[key].run(warm_up, tuple(_plugins(config)), timeout=_START_SECONDS)
    return pools[key]


def close_pools(config: pytest.Config) -> None:
    """End all ranks."""
    for pool in config.stash.get(POOLS, {}).values():
        pool.close()


# --- what is sent to the ranks --------------------------------------------------------


def _task(item: pytest.Function, folder: Path) -> RankTask:
    tmp_path = item.funcargs.get("tmp_path")
    assert tmp_path is None or isinstance(tmp_path, Path), tmp_path
    return RankTask(
        item.nodeid,
        tuple(_arguments(item)),
        _options(item.config),
        folder,
        tmp_path,
        item.config.pluginmanager.hasplugin("cacheprovider"),
    )


def _arguments(item: pytest.Function) -> list[str]:
    config, option = item.config, item.config.option
    test = "::".join([str(item.path), *item.nodeid.split("::", 1)[1:]])
    words = [test, f"--rootdir={config.rootpath}", f"--import-mode={option.importmode}"]
    words += ["-c", str(config.inipath or os.devnull), "-o", "addopts="]
    for override in option.override_ini or ():
        words += ["-o", override]
    for warning in option.pythonwarnings or ():
        words += ["-W", warning]
    words += ["--runxfail", "--capture=fd", "-p", "no:faulthandler"]
    for plugin in _plugins(config):
        words += ["-p", plugin]
    return words


def _plugins(config: pytest.Config) -> list[str]:
    manager = config.pluginmanager
    installed = [
        manager.get_name(plugin) for plugin, _ in manager.list_plugin_distinfo()
    ]
    asked = config.option.plugins or ()
    names = dict.fromkeys(("pytest_torchspmd", *filter(None, installed), *asked))
    return [name for name in names if name not in _NOT_ON_RANKS]


def _options(config: pytest.Config) -> dict[str, Any]:
    """The command line's values, as far as they can be sent."""
    values = {}
    for name, value in vars(config.option).items():
        try:
            pickle.dumps(value)
        except Exception:
            continue
        values[name] = value
    return values


# --- what they answer -----------------------------------------------------------------


def _read(folder: Path, world_size: int) -> dict[int, RankResult]:
    return {
        rank: pickle.loads((folder / f"rank{rank}").read_bytes())
        for rank in range(world_size)
        if (folder / f"rank{rank}").exists()
    }


def _pass_on(item: pytest.Function, results: dict[int, RankResult]) -> None:
    """What ranks printed and warned of belongs to this test's own report."""
    for rank, result in results.items():
        for line in result.output.splitlines():
            sys.stdout.write(f"[rank {rank}] {line}\n")
    texts = {text for result in results.values() for text in result.warnings}
    for text in sorted(texts):
        item.warn(pytest.PytestWarning(f"on a rank: {text}"))


def _judge(results: dict[int, RankResult], death: str | None, world_size: int) -> None:
    __tracebackhide__ = True
    failed = {rank: "\n".join(r.failures) for rank, r in results.items() if r.failures}
    if failed or death is not None:
        pytest.fail(_failure(failed, death, world_size), pytrace=False)
    skipped = {rank: r.skipped for rank, r in results.items() if r.skipped is not None}
    if len(skipped) == world_size:
        pytest.skip(next(iter(skipped.values())))
    if skipped:
        pytest.fail(
            f"{_ranks(skipped)} of {world_size} skipped the test "
            f"({next(iter(skipped.values()))}) and the others ran it.",
            pytrace=False,
        )


def _failure(failed: dict[int, str], death: str | None, world_size: int) -> str:
    """Each rank's own words; equal ones once."""
    if not failed:
        return f"on {world_size} ranks: {_without_keepers(death or '')}"
    alike: dict[str, list[int]] = {}
    for rank, text in failed.items():
        alike.setdefault(_ADDRESS.sub("0x...", text), []).append(rank)
    parts = [f"failed on {_ranks(failed)} of {world_size}"]
    for ranks in alike.values():
        parts.append(f"{f' {_ranks(ranks)} ':-^80}\n{failed[ranks[0]]}")
    return "\n\n".join(parts)


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"


def _without_keepers(text: str) -> str:
    """Stacks of ranks, less the frames that brought the test there."""
    lines: list[str] = []
    inside = False
    for line in text.removeprefix("run_test: ").splitlines():
        # What pytest itself was doing stays when the test had not begun.
        begun = bool(lines) and lines[-1].startswith("  File")
        inside = bool(line) and (inside or (begun and "_pytest" in line))
        if not inside:
            lines.append(line)
    return "\n".join(lines)
