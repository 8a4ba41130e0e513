"""Tests marked ``spmd``: a pytest on each real rank, told as one test."""

import re

import pytest

from torchspmd.verify.plugin import fixtures, ranks  # noqa: F401

pytest_plugins = "pytester"

CONFTEST = """
    import pytest

    def pytest_addoption(parser):
        parser.addoption("--flavour", default="plain")

    @pytest.fixture(autouse=True)
    def environment(monkeypatch):
        monkeypatch.setenv("MADE_ON", "the rank")

    @pytest.fixture
    def doubled():
        return lambda value: 2 * value  # does not pickle: it is made on each rank
"""

TESTS = """
    import os
    import pytest
    import torch
    import torch.distributed as dist
    from torch import nn
    from torchspmd.verify import expect

    pytestmark = pytest.mark.spmd(world_size=2)

    def test_numbers_and_fixtures(request, doubled, spmd_mesh):
        total = torch.full((1,), 1.0 + dist.get_rank())
        dist.all_reduce(total)
        assert total.item() == 3 and doubled(4) == 8
        assert spmd_mesh(tp=2) is spmd_mesh(tp=2)
        assert os.environ["MADE_ON"] == "the rank"
        assert request.config.getoption("flavour") == "sour"

    @pytest.mark.parametrize("name", ["one", "two words"])
    class TestMethods:
        def test_folder_is_shared(self, tmp_path, name):
            (tmp_path / f"{dist.get_rank()}").write_text(name)
            dist.barrier()
            assert len(list(tmp_path.iterdir())) == 2

    @pytest.mark.spmd(world_size=1, seed=7)
    def test_closest_mark():
        assert dist.get_world_size() == 1
        assert torch.initial_seed() == 7

    def test_skipped():
        pytest.skip("not today")

    def test_ledger(spmd_mesh, comm_ledger):
        mesh = spmd_mesh(tp=2)
        dist.all_reduce(torch.ones(4))
        expect(comm_ledger, mesh=mesh).count(all_reduce=1, axis="tp").nothing_else()

    @pytest.mark.comm_lock
    @pytest.mark.parametrize("times", [1, 2])
    def test_lock(spmd_mesh, comm_ledger, times):
        mesh = spmd_mesh(tp=2)
        for _ in range(times):
            dist.all_reduce(torch.ones(4))

    def test_wrong_mesh_is_refused(spmd_mesh):
        with pytest.raises(RuntimeError, match="needs 4 ranks, and this test has 2"):
            spmd_mesh(tp=4)
        with pytest.raises(ValueError, match="real ranks are all there"):
            spmd_mesh(tp=2, rank=1)

    def test_one_rank_fails():
        print("a line of rank", dist.get_rank())
        if dist.get_rank() == 1:
            assert [1, 2, 3] == [1, 2, 4]
        dist.all_reduce(torch.ones(1))

    @pytest.mark.spmd(world_size=2, timeout=5)
    def test_a_rank_hangs():
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))

    @pytest.mark.spmd(world_size=1)
    @pytest.mark.xfail(strict=True)
    def test_expected_failure():
        assert dist.get_rank() == 5

    @pytest.mark.spmd(world_size=1)
    def test_a_rank_dies():
        os._exit(3)
"""

LOCK = """\
torchspmd-lock 1
test test_all.py::test_lock[{times}]
torch 2.13.0

forward Global all_reduce tp float32 1 16
"""


@pytest.fixture
def run(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # ours is enough
    pytester.makeini("[pytest]\naddopts = --strict-markers\nfilterwarnings = error\n")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_all=TESTS)
    locks = pytester.mkdir("comm_locks")
    for times in (1, 2):
        text = LOCK.format(times=times)
        (locks / f"test_all.test_lock-{times}-.lock").write_text(text)
    return pytester.runpytest_inprocess


def test_everything_at_once(run):
    """One run for all of it: starting ranks is what takes time."""
    result = run("-p", "pytest_torchspmd", "--flavour", "sour", "-rs")
    result.assert_outcomes(passed=7, failed=4, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines(["SKIPPED * not today"])
    parts = re.split(r"\n_{3,} (test_[^ ]+) _{3,}\n", result.stdout.str())
    failures = dict(zip(parts[1::2], parts[2::2], strict=True))
    _check_lock(failures["test_lock[2]"])
    _check_failing_rank(failures["test_one_rank_fails"])
    _check_hanging_rank(failures["test_a_rank_hangs"])
    assert failures["test_a_rank_dies"].startswith(
        "on 1 ranks: rank 0 died (exit code 3)."
    )


def test_without_the_cache_of_pytest(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.spmd(world_size=1)
        def test_it(request):
            assert not request.config.pluginmanager.hasplugin("cacheprovider")
        """
    )
    words = ("-p", "pytest_torchspmd", "-p", "no:cacheprovider", "-W", "error")
    pytester.runpytest_inprocess(*words).assert_outcomes(passed=1)


def _check_lock(text):
    assert text.startswith(
        "test_all.py::test_lock[2] does not communicate what its lock says:\n"
        "  +1 all_reduce of float32 over tp, 16 B, forward of Global: at "
    )


def _check_failing_rank(text):
    """Its own lines, values and output; nothing of the rank that waited for it."""
    assert text.startswith("failed on rank 1 of 2\n\n-----")
    assert ">           assert [1, 2, 3] == [1, 2, 4]\n" in text
    assert "At index 2 diff: 3 != 4" in text
    assert "[rank 1] a line of rank 1" in text
    assert "all_reduce" not in text.partition("\nE ")[2]
    assert "Traceback" not in text and "plugin/rank" not in text


def _check_hanging_rank(text):
    assert text.startswith("on 2 ranks: no answer from rank 0 after 5 s. A collective")
    assert "in test_a_rank_hangs" in text
    assert "_pytest" not in text and "pluggy" not in text
