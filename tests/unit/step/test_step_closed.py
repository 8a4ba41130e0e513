"""A step that was closed: what can still be read, what is let go of, what is refused."""

import gc
import weakref

import pytest
import torch
from torch import nn
from training import train

from torchspmd.errors import UsageError
from torchspmd.step import DataParallel, GraphModuleTransformation, compile, run_virtual
from torchspmd.testing import fake_world


def call():
    model = nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 4)


def closed_step():
    with compile(train) as step:
        step(*call())
    return step


def test_certificate_ledger_and_reports_stay():
    transformation = GraphModuleTransformation(
        enable_graph_optimization=True, overlap_iterations=True
    )
    mode = DataParallel("replicate")
    with fake_world(2):
        step = compile(gm_transformation=transformation, parallel_mode=mode)(train)
        given = call()
        with step:
            for _ in range(3):
                step(*given)
            (open_program,) = step.programs
            before = step.explain().splitlines()
    (program,) = step.programs
    assert str(program.certificate).startswith("Certificate of train, program 0")
    assert program.certificate.passes
    for name in ("ledger", "peak_memory", "in_place", "reason", "notes", "number"):
        assert getattr(program, name) is getattr(open_program, name), name
    assert len(program.ledger) > 0 and len(program.step_seconds) == 2
    assert repr(program) == f"Closed{open_program!r}"
    after = step.explain().splitlines()
    assert after == [f"{before[0]}, closed by the end of `with`", *before[1:]]


def test_graphs_and_tensors_are_let_go_of():
    given = call()
    with compile(train) as step:
        step(*given)
        (program,) = step.programs
        watched = [
            weakref.ref(each) for each in (program.graph, program.graph.graph, *given)
        ]
        del program
    del given
    gc.collect()
    assert [each() for each in watched] == [None] * 5
    assert len(step.programs) == 1


def test_the_graph_of_a_closed_program_is_refused():
    (program,) = closed_step().programs
    with pytest.raises(
        UsageError, match=r"programs\[0\]\.graph before that; what stays"
    ):
        _ = program.graph
    with pytest.raises(
        UsageError, match=r"program 0: its step was closed, by close\(\)"
    ):
        _ = program.code
    with pytest.raises(UsageError, match="program 0: its step was closed"):
        run_virtual(program)


def test_a_closed_step_says_by_what_and_the_way_out():
    step = closed_step()
    for use in (step.__enter__, lambda: step(*call()), lambda: step.exposure(*call())):
        with pytest.raises(UsageError) as caught:
            use()
        assert str(caught.value) == (
            "train: this compiled step was closed by the end of `with`, and cannot be "
            "called any more. Compile its function again (of a decorated one, it is "
            "__wrapped__). Between epochs call flush() instead, with one `with` around "
            "all of them."
        )
    assert compile(step.__wrapped__)(*call()).ndim == 0


def test_close_may_be_called_twice():
    step = compile(train)
    step(*call())
    step.close()
    kept = step.programs
    step.close()
    step.flush()
    assert step.programs == kept and len(kept) == 1
    with pytest.raises(UsageError, match=r"train: .* was closed by close\(\), and"):
        step(*call())
