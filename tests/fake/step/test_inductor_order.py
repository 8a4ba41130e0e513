"""Compiled code keeps the order in which a schedule put collectives."""

import re

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

from torchspmd import _torch
from torchspmd.step import DataParallel, GraphModuleTransformation, compile
from torchspmd.testing import fake_world

pytestmark = pytest.mark.fake

WORDS = {"all_reduce": "S", "wait_tensor": "w", "mm": "m"}


def letters(calls):
    """Starts, waits and matrix products, in order."""
    found = (next((v for k, v in WORDS.items() if k in call), "") for call in calls)
    return "".join(found)


def in_code(code):
    call = re.compile(
        r"extern_kernels\.mm|all_reduce_?\.default\(|wait_tensor\.default\("
    )
    return letters(m.group() for m in call.finditer(code.split("def call")[-1]))


def test_starts_and_waits_stay_among_the_products():
    @compile(
        backend="inductor",
        parallel_mode=DataParallel("replicate"),
        gm_transformation=GraphModuleTransformation(
            enable_graph_optimization=True,
            overlap_iterations=True,
            bucket_size_mb=0.01,
        ),
    )
    def step(model, optim, batch):
        model(batch).square().mean().backward()
        optim.step()
        optim.zero_grad()

    with fake_world(2):
        layers = [nn.Linear(64, 64, bias=False) for _ in range(4)]
        model = nn.Sequential(*(part for each in layers for part in (each, nn.ReLU())))
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.randn(32, 64)
        _, codes = run_and_get_code(lambda: step(model, optim, batch))
        steady = step.programs[-1].run.forms["steady"].graph
        step.flush()
    expected = letters(str(n.target) for n in steady.nodes if n.op == "call_function")
    # Products stand between waits and between starts, so an order could be lost.
    assert re.search("wm+w", expected) and re.search("Sm+S", expected)
    assert expected in map(in_code, codes)


class FailureError(Exception):
    """What a test raises."""


def overlapped(backend, fail_at=()):
    """Train three steps and three more, by bucket of two updates.

    Before each of the last steps, one step may fail in the pending update that
    ``fail_at`` names.
    """
    updates = _torch.compilation._UPDATES

    def train(model, optim, batch):
        model(batch).square().mean().backward()
        optim.step()
        optim.zero_grad()

    step = compile(
        backend=backend,
        parallel_mode=DataParallel("replicate"),
        gm_transformation=GraphModuleTransformation(
            enable_graph_optimization=True, overlap_iterations=True, bucket_size_mb=0.02
        ),
    )(train)
    with fake_world(2):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
        optim = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        batch = torch.randn(32, 64)

        def train_on(rate):
            optim.param_groups[0]["lr"] = rate  # a schedule must take effect
            return step(model, optim, batch)

        codes = run_and_get_code(lambda: [train_on(lr) for lr in (0.01, 0.3, 0.02)])[1]
        for number in fail_at or [None] * 3:
            if number is not None:
                with pytest.MonkeyPatch.context() as patch, pytest.raises(FailureError):
                    for name, update in [*updates.items()]:
                        patch.setitem(updates, name, failing(update, number))
                    step(model, optim, batch)
            step(model, optim, batch)
        step.flush()
    return [p.detach() for p in model.parameters()], codes, step


def failing(update, fail_at):
    def run(number, written, read):
        if number == fail_at:
            raise FailureError
        update(number, written, read)

    return run


def test_pending_updates_are_calls_that_write_the_states_once():
    """Also after an exception in compiled code, no update is made twice."""
    found, codes, step = overlapped("inductor", fail_at=(0, 1, 2))
    expected, _, _ = overlapped("graph")
    assert "3 of 3 pending updates are made in place" in step.programs[-1].notes
    steady = max(codes, key=lambda code: code.count("torchspmd.update.default("))
    assert steady.count("torchspmd.update.default(") == 3
    assert "_fused_adamw" not in steady and "copy_" not in steady
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right)
