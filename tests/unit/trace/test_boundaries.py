"""Which module created an autograd node, and what is forgotten."""

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchspmd import CommDebugMode
from torchspmd.testing import fake_mesh
from torchspmd.trace import modules as module
from torchspmd.trace.modules import Boundaries


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 9)), max_size=60))
def test_find_agrees_with_a_search(steps):
    boundaries, marks, start = Boundaries(), [], 0
    for advance, path in steps:
        start += advance
        boundaries.begin(start, path)
        marks.append((start, path))
    for sequence in range(start + 2):
        before = [path for begin, path in marks if begin <= sequence]
        assert boundaries.find(sequence) == (before[-1] if before else -1)


def test_old_ones_are_forgotten_and_memory_is_bounded():
    boundaries = Boundaries()
    for start in range(200_000):
        boundaries.begin(start, start % 7)
    assert boundaries.find(199_999) == 199_999 % 7
    assert boundaries.find(0) is None
    assert len(boundaries._starts) == module._MAX_BOUNDARIES


def test_a_forgotten_forward_is_a_line_in_the_ledger(monkeypatch):
    monkeypatch.setattr(module, "_FIRST_BOUNDARIES", 4)
    monkeypatch.setattr(module, "_MAX_BOUNDARIES", 4)
    model = nn.Linear(2, 2)
    with fake_mesh(2, ("dp",)), CommDebugMode() as mode:
        output = model(torch.ones(2))
        output.register_hook(dist.all_reduce)
        for _ in range(8):
            model(torch.ones(2))
        output.sum().backward()
    assert [event.module for event in mode.ledger.events] == ["(forward too long ago)"]
    assert list(mode.ledger.notes) == [
        "backward ran for modules whose forward was too many calls ago to know their "
        "names; they are shown as (forward too long ago)"
    ]
