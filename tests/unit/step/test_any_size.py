"""Batches of any size in one program: equal to eager, and one for each size elsewhere."""

import pytest
import torch
from step_models import build, difference
from torch import nn

from torchspmd.errors import CaptureError
from torchspmd.step import CostModel, compile
from torchspmd.step.runtime import Runtime


def train(model, optim, x, loss):
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach(), x.shape[0]


def plain(model, optim, x):
    return train(model, optim, x, model(x).square().mean())


def by_number(model, optim, x):
    return train(model, optim, x, model(x).sum() / x.shape[0] ** 0.5)


def in_pieces(model, optim, x):
    return train(model, optim, x, sum(model(row).square().sum() for row in x.unbind()))


def by_text(model, optim, x):
    return train(model, optim, x, model(x).mean() * len(f"{x.shape[0]}"))


def in_a_table(model, optim, x):
    return train(model, optim, x, model(x).mean() * {3: 2.0}.get(x.shape[0], 1.0))


def is_a_number(model, optim, x):
    scale = 1.0 if isinstance(x.shape[0], int) else 5.0
    return train(model, optim, x, model(x).mean() * scale)


def above(model, optim, x):
    scale = 1.0 if x.shape[0] > 4 else 5.0
    return train(model, optim, x, model(x).mean() * scale)


def square(model, optim, x):
    return train(model, optim, x, (x @ x.T).diagonal().mean() + model(x).mean())


def padded(model, optim, x):
    rows = nn.functional.pad(x, (0, 0, 0, 1), value=2.0)
    return train(model, optim, x, model(rows[1:]).square().mean())


SIZES = (5, 3, 7, 2, 8, 3, 6, 1)
STEPS = {  # how many programs; the last size, 1, is always one of its own
    plain: 3,
    by_number: 3,
    is_a_number: 3,
    square: 3,
    padded: 3,
    above: 4,
    in_pieces: 7,
    by_text: 7,
    in_a_table: 7,
}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_sizes(step):
    pairs = build("mlp", "sgd")
    compiled = compile(step)
    for size in SIZES:
        x = torch.randn(size, 8)
        for _ in range(2):  # the second on the fast path
            (a, n), (b, m) = (
                call(*pair, x)
                for call, pair in zip((step, compiled), pairs, strict=True)
            )
            assert a == b
            assert (n, type(n)) == (m, type(m))
    assert difference(*pairs) == 0.0
    assert len(compiled.programs) == STEPS[step], compiled.explain()


def test_a_program_that_takes_one_size_says_so():
    (model, optim), _ = build("mlp", "sgd")
    compiled = compile(in_pieces)
    for size in (5, 3, 4):
        compiled(model, optim, torch.randn(size, 8))
    text = compiled.explain()
    assert "one program for each size, since sizes cannot be symbols here" in text
    assert "the step needs args[2].shape[0] as a number" in text
    assert "one program for each size: they could not be symbols of a graph" in text


def test_two_arguments_that_have_one_size_together():
    def step(model, optim, x, y):
        return train(model, optim, x, (model(x) - y).square().mean())

    model = nn.Linear(8, 8)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = compile(step)
    for size in (5, 3, 4, 6):
        compiled(model, optim, torch.randn(size, 8), torch.randn(size, 8))
    assert len(compiled.programs) == 2
    # One row for all: broadcast, which is another program.
    loss, _ = compiled(model, optim, x := torch.randn(4, 8), torch.zeros(1, 8))
    assert loss.isfinite()
    assert len(compiled.programs) == 3
    assert x.shape == (4, 8)


def test_columns_in_another_order_are_another_program():
    pairs = build("mlp", "sgd")
    compiled = compile(plain)
    for x in (torch.randn(5, 8), torch.randn(3, 8), torch.randn(8, 6).T):
        for call, pair in zip((plain, compiled), pairs, strict=True):
            call(*pair, x)
    assert difference(*pairs) == 0.0
    assert len(compiled.programs) == 3


def test_a_program_that_is_built_anew_for_one_size_is_measured_once(monkeypatch):
    """Ranks measure together: one that did so again would do so alone."""
    measured = []

    def measure(*_, **__):
        measured.append(CostModel())
        return measured[-1], ()

    def refuse(*_):
        raise CaptureError("of this test")

    monkeypatch.setattr(Runtime, "measure", measure)
    monkeypatch.setattr("torchspmd.step.build.check_sizes", refuse)
    (model, optim), _ = build("mlp", "sgd")
    compiled = compile(plain, passes=True, cost="measure")
    for size in (5, 3):
        compiled(model, optim, torch.randn(size, 8))
    assert "sizes cannot be symbols here: of this test" in compiled.explain()
    assert len(measured) == len(compiled.programs) == 2
