"""The pytest plugin without ranks: fixtures, locks of tests, and what it costs."""

import gc
import subprocess
import sys

import pytest
import torch
from torch import nn

from torchspmd import parallelize_module
from torchspmd.parallel import ColwiseParallel
from torchspmd.verify.plugin import fixtures, ranks  # noqa: F401
from torchspmd.verify.plugin.fixtures import MeshMaker, recording

pytest_plugins = "pytester"

MODEL = """
    import pytest
    import torch
    from torch import nn
    from torchspmd import parallelize_module
    from torchspmd.parallel import ColwiseParallel, RowwiseParallel
    from torchspmd.verify import expect

    def train(mesh, layers=2):
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(layers)]
        plan = {"*.0": ColwiseParallel(), "*.1": RowwiseParallel()}
        model = parallelize_module(nn.Sequential(*blocks), mesh, plan)
        model(torch.ones(2, 8, requires_grad=True)).sum().backward()
"""


@pytest.fixture(scope="module")
def warm():
    """Import all that torch imports late.

    A pytest inside this one forgets what it imported, and torch registers things once.
    It also collects garbage several times: all that there is now need not be looked at.
    """
    with recording(), MeshMaker(on_real_ranks=False) as maker:
        model = nn.Sequential(nn.Linear(8, 8))
        parallelize_module(model, maker(tp=2), {"0": ColwiseParallel()})
        model(torch.ones(2, 8, requires_grad=True)).sum().backward()
    gc.freeze()


@pytest.fixture
def run(pytester, warm, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # ours is enough
    # Our own settings: a plugin must live with the strictest.
    pytester.makeini("[pytest]\naddopts = --strict-markers\nfilterwarnings = error\n")

    def run(*words):
        return pytester.runpytest_inprocess("-p", "pytest_torchspmd", *words)

    return run


def test_a_simulated_mesh_of_any_size_and_its_ledger(pytester, run):
    pytester.makepyfile(
        MODEL
        + """
    def test_counts(spmd_mesh, comm_ledger):
        mesh = spmd_mesh(dp=64, tp=4)
        assert mesh["tp"].size() == 4 and mesh.get_rank() == 0
        train(mesh["tp"], layers=3)
        expect(comm_ledger, mesh=mesh).count(all_reduce=6, axis="tp").nothing_else()

    def test_another_world(spmd_mesh):
        assert spmd_mesh({"rank": 3}, rank=2).get_rank() == 2
        assert spmd_mesh(a=3, rank=2).size() == 3

    def test_nothing_is_left(comm_ledger):
        assert not torch.distributed.is_initialized()
        assert len(comm_ledger) == 0
        assert nn.Module.__call__ is not CALL

    CALL = nn.Module.__call__
    def test_no_recording():
        assert nn.Module.__call__ is CALL
    """
    )
    run().assert_outcomes(passed=4)


def test_set_up_is_left_out_and_said(pytester, run):
    pytester.makepyfile(
        MODEL
        + """
    def test_setup(spmd_mesh, comm_ledger):
        train(spmd_mesh(tp=4))
        assert comm_ledger.total(module="Global").count == 0
        (note,) = comm_ledger.notes
        assert note.startswith("what was sent before the first module call is left out: ")

    def test_without_modules(spmd_mesh, comm_ledger):
        mesh = spmd_mesh(tp=4)
        torch.distributed.all_reduce(torch.ones(4))
        assert comm_ledger.total(axis="tp").count == 1 and comm_ledger.notes == {}
    """
    )
    run().assert_outcomes(passed=2)


def test_wrong_use_of_the_mesh_is_one_sentence(pytester, run):
    pytester.makepyfile(
        """
        def test_none(spmd_mesh):
            spmd_mesh()

        def test_zero(spmd_mesh):
            spmd_mesh(tp=0)

        def test_rank(spmd_mesh):
            spmd_mesh(tp=2, rank=2)

        def test_two_worlds(spmd_mesh):
            spmd_mesh(tp=4, rank=1)
            spmd_mesh(tp=8)
        """
    )
    result = run()
    result.assert_outcomes(failed=4)
    result.stdout.fnmatch_lines(
        [
            "E * spmd_mesh(): give each axis a whole number of ranks from 1 on, as in *",
            "E * spmd_mesh(tp=0): give each axis a whole number of ranks from 1 on, *",
            "E * spmd_mesh(rank=2): the ranks of this mesh are 0 to 1.",
            "E * spmd_mesh(tp=8) asks for rank 0 of 8; this test already plays rank 1 of "
            "4. One test has one world.",
        ]
    )


LOCKED = """
    @pytest.mark.comm_lock
    @pytest.mark.parametrize("layers", [LAYERS])
    def test_step(spmd_mesh, comm_ledger, layers):
        train(spmd_mesh(tp=4), layers)
"""


def test_a_lock_is_written_compared_and_accepted(pytester, run):
    pytester.makepyfile(test_gpt=MODEL + LOCKED.replace("LAYERS", "2"))
    missing = run()
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(
        ["there is no lock *test_gpt.test_step-2-.lock: write it with pytest --comm-*"]
    )
    writing = run("--comm-lock-update")
    writing.assert_outcomes(passed=1)
    writing.stdout.fnmatch_lines(
        ["comm locks: wrote comm_locks/test_gpt.test_step-2-.lock"]
    )
    path = pytester.path / "comm_locks" / "test_gpt.test_step-2-.lock"
    text = path.read_text()
    assert "\ntest test_gpt.py::test_step[2]\n" in text
    assert "\nforward Sequential.[0-1].1 all_reduce tp float32 1 64\n" in text
    run().assert_outcomes(passed=1)
    again = run("--comm-lock-update")
    again.stdout.no_fnmatch_line("comm locks: *")

    pytester.makepyfile(
        test_gpt=MODEL + LOCKED.replace("LAYERS", "2").replace(", layers)\n", ", 3)\n")
    )
    changed = run()
    changed.assert_outcomes(failed=1)
    changed.stdout.fnmatch_lines(
        [
            "test_gpt.py::test_step[[]2] does not communicate what its lock says:",
            "  +1 all_reduce of float32 over tp, 64 B, forward of Sequential.2.1: at *",
            "  +1 all_reduce of float32 over tp, 64 B, backward of Sequential.2.0: at *",
            "To accept: pytest --comm-lock-update",
        ]
    )
    assert path.read_text() == text
    run("--comm-lock-update").assert_outcomes(passed=1)
    run().assert_outcomes(passed=1)


def test_wrong_use_of_a_lock(pytester, run):
    pytester.makepyfile(
        test_a="""
        import pytest

        @pytest.mark.comm_lock
        def test_without():
            pass

        @pytest.mark.comm_lock
        @pytest.mark.parametrize("name", ["a b", "a-b"])
        def test_same(comm_ledger, name):
            pass

        @pytest.mark.comm_lock
        def test_broken(comm_ledger):
            pass

        @pytest.mark.comm_lock
        def test_failing(comm_ledger):
            assert 0
        """
    )
    updated = run("--comm-lock-update")
    updated.assert_outcomes(passed=3, failed=1, errors=1)
    updated.stdout.fnmatch_lines(
        [
            "test_without: the mark comm_lock compares what comm_ledger records: let the "
            "test take that fixture."
        ]
    )
    folder = pytester.path / "comm_locks"
    assert not (folder / "test_a.test_failing.lock").exists()
    (folder / "test_a.test_broken.lock").write_text("nothing")
    result = run()
    result.assert_outcomes(passed=1, failed=3, errors=1)
    result.stdout.fnmatch_lines(
        [
            "*test_a.test_same-a-b-.lock is the lock of test_a.py::test_same[[]a-b], not "
            "of test_a.py::test_same[[]a b]: give one of the tests another name.",
            "*test_broken.lock is not a lock that * (pytest --comm-lock-update)",
        ]
    )


def test_wrong_marks_are_one_sentence(pytester, run):
    pytester.makepyfile(
        """
        import pytest, unittest

        @pytest.mark.spmd
        def test_no_size():
            pass

        @pytest.mark.spmd(world_size=0)
        def test_zero():
            pass

        @pytest.mark.spmd(world_size=2, ranks=3)
        def test_unknown():
            pass

        @pytest.mark.spmd(world_size=5)
        def test_too_large():
            pass

        @pytest.mark.spmd(world_size=2, backend="mpi")
        def test_backend():
            pass

        @pytest.mark.spmd(world_size=2)
        class TestCase(unittest.TestCase):
            def test_case(self):
                pass
        """
    )
    result = run("-o", "spmd_max_ranks=4")
    result.assert_outcomes(errors=5, failed=1)
    result.stdout.fnmatch_lines(
        [
            "test_no_size: the mark spmd takes world_size, timeout, seed and backend "
            "(missing a required argument: 'world_size').",
            "test_zero: the mark spmd needs a whole world_size from 1 on, not 0.",
            "test_unknown: the mark spmd takes world_size, timeout, seed and backend (got "
            "an unexpected keyword argument 'ranks').",
            "test_too_large: the mark spmd asks for 5 real ranks, and this machine is "
            "taken for 4 (* cores; the ini option spmd_max_ranks changes it): take fewer, "
            "or leave the mark out for a simulated world of any size.",
            "test_case: the mark spmd marks plain test functions and methods only.",
            "test_backend: the mark spmd cannot run: Ranks(backend='mpi'): choose 'gloo' "
            "or 'nccl'.",
        ]
    )


def test_options_and_marks_are_listed(run):
    run("--markers").stdout.fnmatch_lines(
        ["@pytest.mark.spmd(world_size, *", "@pytest.mark.comm_lock: *"]
    )
    run("--fixtures").stdout.fnmatch_lines_random(
        ["*spmd_mesh*", "    Makes meshes: *", "*comm_ledger*"]
    )
    run("--help").stdout.fnmatch_lines_random(["*--comm-lock-update*"])


def test_pytest_starts_without_torch(pytester):
    """Tests that use nothing of it pay nothing."""
    pytester.makepyfile(
        "import sys\ndef test_it(): assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "pytest_torchspmd"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_it_can_be_switched_off(pytester):
    pytester.makepyfile("def test_it(comm_ledger): pass\n")
    result = pytester.runpytest_inprocess("-p", "no:pytest_torchspmd")
    result.stdout.fnmatch_lines(["E * fixture 'comm_ledger' not found"])
