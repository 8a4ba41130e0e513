"""Tensors in objects that are arguments: dataclasses, and batches of libraries."""

import copy
from collections import UserDict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from torchspmd.errors import CaptureError
from torchspmd.step import compile


@dataclass
class Batch:
    rows: torch.Tensor
    weight: Any = 1.0
    more: Any = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Frozen:
    rows: torch.Tensor
    weight: Any = 1.0
    more: Any = field(default_factory=dict)


class Encoding(UserDict):
    @property
    def rows(self):
        return self["rows"]

    weight, more = 1.0, {}


def step(model, optim, batch):
    loss = (model(batch.rows) * batch.weight).square().mean()
    for each in batch.more.get("rows", ()):
        loss = loss + model(each.rows).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def build():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def rows(call):
    return torch.linspace(-1, 1, 12).view(3, 4) * (1 + call)


MAKE = {
    "dataclass": lambda call: Batch(rows(call)),
    "frozen": lambda call: Frozen(rows(call)),
    "namespace": lambda call: SimpleNamespace(rows=rows(call), weight=1.0, more={}),
    "mapping": lambda call: Encoding(rows=rows(call)),
    "two tensors": lambda call: Batch(rows(call), torch.full((1,), 1.0 + call)),
    "inside": lambda call: Batch(
        rows(call), more={"rows": [Frozen(rows(2)), Batch(rows(call))]}
    ),
}


@pytest.mark.parametrize("kind", MAKE)
def test_tensors_of_an_object_are_inputs(kind):
    ours, theirs = build(), build()
    compiled = compile(step, shadow=2)
    for call in range(4):
        given = MAKE[kind](call)
        before = copy.deepcopy(given)
        assert torch.equal(compiled(*ours, given), step(*theirs, before))
        assert torch.equal(given.rows, before.rows)
        assert type(given.rows) is torch.Tensor
    assert len(compiled.programs) == 1
    assert "2 calls were also made eagerly" in compiled.explain()


def test_an_object_that_stays_and_gets_other_tensors():
    ours, theirs = build(), build()
    compiled = compile(step, shadow=0)
    given = Batch(rows(0))
    for call in range(4):
        if call != 2:
            given.rows = rows(call)
        assert torch.equal(compiled(*ours, given), step(*theirs, given))
    given.rows = given.rows[:2]
    assert torch.equal(compiled(*ours, given), step(*theirs, given))
    assert len(compiled.programs) == 2
    assert "args[2].rows: " in compiled.explain()


def test_a_write_into_a_tensor_of_an_object():
    def writes(model, optim, batch):
        batch.rows.add_(1)
        return step(model, optim, batch)

    ours, theirs = build(), build()
    compiled = compile(writes, shadow=2)
    mine, other = Batch(rows(0)), Batch(rows(0))
    for _ in range(4):
        assert torch.equal(compiled(*ours, mine), writes(*theirs, other))
        assert torch.equal(mine.rows, other.rows)


def test_another_tensor_in_an_object():
    def replaces(model, optim, batch):
        batch.rows = batch.rows + 1
        return step(model, optim, batch)

    ours, theirs = build(), build()
    compiled = compile(replaces, shadow=3)
    mine, other = Batch(first := rows(0)), Batch(rows(0))
    for _ in range(4):
        assert torch.equal(compiled(*ours, mine), replaces(*theirs, other))
        assert torch.equal(mine.rows, other.rows)
    assert torch.equal(first, rows(0))


def test_a_tensor_that_two_arguments_share_for_one_call():
    def both(model, optim, batch, more):
        return step(model, optim, batch) + more.mean()

    ours, theirs = build(), build()
    compiled = compile(both, shadow=0)
    shared = rows(0)
    for given, more in ((Batch(shared), shared), (Batch(rows(1)), rows(2))):
        assert torch.equal(compiled(*ours, given, more), both(*theirs, given, more))
    assert len(compiled.programs) == 2


def test_a_passed_tensor_that_the_step_reaches_otherwise_is_no_input():
    """What holds it now may hold another one in the next call."""
    held = SimpleNamespace(last=None)

    def reaches(model, optim, batch):
        return step(model, optim, batch) + held.last.mean()

    given = Batch(rows(0))
    held.last = given.rows
    with pytest.raises(CaptureError, match="a tensor that is in no argument"):
        compile(reaches)(*build(), given)


def test_an_object_that_both_an_argument_and_the_step_hold():
    held = SimpleNamespace(last=None)

    def reaches(model, optim, batch):
        return step(model, optim, batch) + held.last.rows.mean()

    ours, theirs = build(), build()
    compiled = compile(reaches, shadow=0)
    given = held.last = Batch(rows(0))
    assert torch.equal(compiled(*ours, given), reaches(*theirs, given))
    for number in (1, 2):  # another one is an input of its own
        given = Batch(rows(number))
        assert torch.equal(compiled(*ours, given), reaches(*theirs, given))
    held.last = Batch(rows(3))
    assert torch.equal(compiled(*ours, given), reaches(*theirs, given))
    assert len(compiled.programs) == 2
