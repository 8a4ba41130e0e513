"""run_ranks: real processes, whose failures are told and never hang."""

import ctypes
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
import torch
import torch.distributed as dist

from torchspmd.errors import RankError, UsageError
from torchspmd.testing import Ranks, run_ranks


@pytest.fixture(scope="module")
def pool():
    with Ranks(2) as ranks:
        yield ranks


def _all_reduced(value, *, factor=1):
    tensor = torch.full((2,), float(value + dist.get_rank()))
    dist.all_reduce(tensor)
    return dist.get_rank(), tensor * factor


def _environment():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    return [os.environ[name] for name in names], torch.get_num_threads()


def _draw():
    return torch.rand(3).tolist()


def _pid():
    return os.getpid()


def _fail_on(rank):
    if dist.get_rank() == rank:
        raise KeyError(f"own mistake of {rank}")
    dist.all_reduce(torch.ones(1))


def _skip_on(rank):
    if dist.get_rank() != rank:
        dist.all_reduce(torch.ones(1))


def _exit_on(rank, code):
    if dist.get_rank() == rank:
        os._exit(code)
    dist.all_reduce(torch.ones(1))


def _exit_program():
    raise SystemExit(4)


def _unpicklable():
    return threading.Lock()


class _Unloadable:
    def __reduce__(self):
        return int, ("not a number",)


def _unloadable():
    return _Unloadable()


def _large(size):
    return torch.ones(size)


def _error_text(call, *args, **kwargs):
    with pytest.raises(RankError) as caught:
        call(*args, **kwargs)
    assert isinstance(caught.value, RuntimeError)
    return str(caught.value)


def test_results_come_by_rank(pool):
    results = pool.run(_all_reduced, 10, factor=2)
    assert [rank for rank, _ in results] == [0, 1]
    assert all(torch.equal(t, torch.full((2,), 42.0)) for _, t in results)


def test_each_rank_knows_its_place(pool):
    assert pool.run(_environment) == [(["0", "0", "2"], 1), (["1", "1", "2"], 1)]


def test_a_pool_keeps_its_processes(pool):
    first = pool.run(_pid)
    assert len({*first, os.getpid()}) == 3
    assert pool.run(_pid) == first


def test_all_ranks_have_the_same_seed(pool):
    one, other = pool.run(_draw)
    assert one == other
    assert pool.run(_draw) == [one, one]  # seeded for each run
    assert pool.run(_draw, seed=7) == [torch.rand(3, generator=_seeded(7)).tolist()] * 2


def _seeded(seed):
    return torch.Generator().manual_seed(seed)


def test_large_arguments_and_results(pool):
    size = 1_000_000
    results = pool.run(_large, size)
    assert [result.numel() for result in results] == [size, size]
    moved = pool.run(torch.sum, torch.ones(size))
    assert [int(total) for total in moved] == [size, size]


def test_partial_functions_are_sent(pool):
    assert pool.run(functools.partial(max, 3), 5) == [5, 5]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_has_its_rank_and_traceback(pool, rank):
    text = _error_text(pool.run, _fail_on, rank)
    assert text.startswith(f"_fail_on: rank {rank} failed:\n\nTraceback")
    assert f"KeyError: 'own mistake of {rank}'" in text
    assert 'raise KeyError(f"own mistake of {rank}")' in text
    assert text.count("  File ") == 1 and "in _fail_on" in text  # none of our own
    assert pool.run(dist.get_rank) == [0, 1]  # serves again


def test_an_exit_is_a_failure_not_a_death(pool):
    text = _error_text(pool.run, _exit_program)
    assert text.endswith("SystemExit: 4\n")


def test_a_hanging_rank_shows_its_stack_in_time():
    before = set(multiprocessing.active_children())
    with Ranks(2) as ranks:
        ranks.run(dist.get_rank)
        started = time.monotonic()
        text = _error_text(ranks.run, _skip_on, 1, timeout=1.0)
        assert time.monotonic() - started < 6
        assert set(multiprocessing.active_children()) <= before
    first, _, stack = text.partition("\n\n")
    assert first == (
        "_skip_on: no answer from rank 0 after 1 s. A collective that not all ranks "
        "call, or that they call in another order, waits like this."
    )
    assert stack.startswith("rank 0:\n")
    assert "in all_reduce" in stack
    assert "in _skip_on" in stack


def test_a_dying_rank_gives_its_exit_code(pool):
    text = _error_text(pool.run, _exit_on, 1, 3)
    # Rank 0 then loses its connection: that is the consequence, not the cause.
    assert text.startswith("_exit_on: rank 1 died (exit code 3).")
    assert pool.run(dist.get_world_size) == [2, 2]


def test_a_rank_that_died_between_two_runs_is_told():
    before = set(multiprocessing.active_children())
    with Ranks(1) as ranks:
        (victim,) = ranks.run(_pid)
        os.kill(victim, signal.SIGKILL)
        for child in set(multiprocessing.active_children()) - before:
            child.join(5)
        text = _error_text(ranks.run, dist.get_rank)
        assert text == "get_rank: rank 0 died (exit code -9)."
        assert ranks.run(dist.get_rank) == [0]


def test_a_local_function_cannot_be_sent(pool):
    with pytest.raises(UsageError) as caught:
        pool.run(lambda: 1)
    text = str(caught.value)
    assert text.startswith(
        "run_ranks: test_a_local_function_cannot_be_sent.<locals>.<lambda> or its "
        "arguments cannot be sent to the ranks ("
    )
    assert text.endswith(
        "). Define the function at module level, not inside another function, and pass "
        "arguments that pickle."
    )


def test_an_argument_that_does_not_pickle(pool):
    with pytest.raises(UsageError, match=r"cannot pickle .* object"):
        pool.run(print, threading.Lock())


def test_a_function_that_the_rank_cannot_import(pool, monkeypatch):
    ghost = types.ModuleType("torchspmd_test_ghost")
    exec("def function(): pass", vars(ghost))
    monkeypatch.setitem(sys.modules, ghost.__name__, ghost)
    text = _error_text(pool.run, ghost.function)
    assert "the rank could not import what it was sent:" in text
    assert "No module named 'torchspmd_test_ghost'" in text


def test_a_result_that_does_not_pickle(pool):
    text = _error_text(pool.run, _unpicklable)
    assert text.startswith("_unpicklable: rank ")
    assert "cannot pickle '_thread.lock' object" in text


def test_a_result_that_cannot_be_loaded_names_the_rank(pool):
    text = _error_text(pool.run, _unloadable)
    assert text.startswith("_unloadable: rank ")
    assert "invalid literal for int()" in text


@pytest.mark.parametrize("size", [0, -2])
def test_at_least_one_rank(size):
    with pytest.raises(UsageError) as caught:
        run_ranks(_pid, size)
    assert str(caught.value) == f"Ranks({size}): at least one rank is needed."


def test_run_ranks_leaves_no_process():
    before = set(multiprocessing.active_children())
    assert run_ranks(dist.get_world_size, 3) == [3, 3, 3]
    assert set(multiprocessing.active_children()) <= before


def test_closing_twice_and_running_after_closing():
    with Ranks(1) as ranks:
        assert ranks.run(dist.get_world_size) == [1]
        ranks.close()
        ranks.close()
        assert ranks.run(dist.get_world_size) == [1]


def _print_to(path):
    sys.stdout = path.open("w")  # buffered, as the output of a script in a pipe is
    print("a line from a rank")


def test_what_a_rank_prints_is_not_lost(tmp_path):
    run_ranks(_print_to, 1, tmp_path / "output")
    assert (tmp_path / "output").read_text() == "a line from a rank\n"


LOCKING = """
import multiprocessing, time
from torchspmd.errors import RankError
from torchspmd.testing import Ranks

kept = []

def lock(seconds):
    kept.append(multiprocessing.Lock())  # as tqdm does when it is imported
    time.sleep(seconds)

def lock_with_a_name():
    kept.append(multiprocessing.get_context("spawn").Lock())

if __name__ == "__main__":
    with Ranks(1) as ranks:
        ranks.run(lock, 0)
        ranks.run(lock_with_a_name)
        ranks.close()
        try:
            ranks.run(lock, 60, timeout=0.2)
        except RankError:
            print("killed")
"""


def test_locks_of_ranks_are_not_leaked(tmp_path):
    """Told in a process of Python's own, which is silent where warnings are errors."""
    script = tmp_path / "locking.py"
    script.write_text(LOCKING)
    command = [sys.executable, "-W", "always::ResourceWarning", script]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "killed\n", "")


def _crash():
    ctypes.string_at(0)


def test_a_rank_that_crashes_says_where():
    with pytest.raises(RankError) as error:
        run_ranks(_crash, 1)
    text = str(error.value)
    assert text.startswith("_crash: rank 0 died (exit code -11).\nFatal Python error")
    assert "in _crash" in text
