"""Compiled steps communicate where a schedule put it, and update states once."""

import re

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import train_silently

from torchspmd.step import DataParallel, GraphModuleTransformation, compile
from torchspmd.step.deferral.module import IterGraphModule
from torchspmd.step.deferral.state import Event
from torchspmd.testing import fake_world

WORDS = {"all_reduce": "S", "wait_tensor": "w", "mm": "m"}


def letters(calls):
    """Starts, waits and matrix products, in order."""
    found = (next((v for k, v in WORDS.items() if k in call), "") for call in calls)
    return "".join(found)


class Calls(TorchDispatchMode):
    """Writes down which operators run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class FailureError(Exception):
    """What a test raises."""


class Overlapped:
    """Three steps and three more, by small buckets.

    Before each of the last steps, one step may fail in a pending update: in the one whose
    number among those that are made ``fail_at`` gives.
    """

    def __init__(self, backend, fail_at=(None,) * 3):
        self.step = compile(
            train_silently,
            backend=backend,
            parallel_mode=DataParallel("replicate"),
            gm_transformation=GraphModuleTransformation(
                enable_graph_optimization=True,
                overlap_iterations=True,
                bucket_size_mb=0.02,
            ),
        )
        with fake_world(2):
            torch.manual_seed(0)
            layers = [(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64)) for _ in "123"]
            parts = (part for layer in layers for part in layer)
            self.model = nn.Sequential(*parts).double()
            optim = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
            args = self.model, optim, torch.randn(32, 64, dtype=torch.float64)
            for rate in (0.01, 0.3, 0.02):  # a schedule must take effect
                optim.param_groups[0]["lr"] = rate
                self.step(*args)
            for number in fail_at:
                if number is not None:
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr(IterGraphModule, "_advance", failing(number))
                        with pytest.raises(FailureError):
                            self.step(*args)
                self.step(*args)
            with Calls() as self.calls:
                self.step(*args)
            self.step.flush()


def failing(number):
    """Fails where an update begins, before it is noted."""
    advance, events = IterGraphModule._advance, []

    def run(self, event, **changes):
        events.append(event)
        if event is Event.BEGIN_UPDATE and events.count(event) == number + 1:
            raise FailureError
        advance(self, event, **changes)

    return run


@pytest.fixture(scope="module")
def compiled():
    return Overlapped("inductor", fail_at=(0, 1, 2))


def test_starts_and_waits_stay_among_the_products(compiled):
    steady = compiled.step.programs[-1].run.forms["steady"].graph
    expected = letters(str(n.target) for n in steady.nodes if n.op == "call_function")
    # Products stand between waits and between starts, so an order could be lost.
    assert re.search("wm+w", expected) and re.search("Sm+S", expected)
    assert letters(compiled.calls.names) == expected


def test_pending_updates_write_the_states_once(compiled):
    """Also after an exception in compiled code, no update is made twice."""
    assert (
        "4 of 4 pending updates are made in place" in compiled.step.programs[-1].notes
    )
    expected = Overlapped("graph").model.parameters()
    for left, right in zip(compiled.model.parameters(), expected, strict=True):
        torch.testing.assert_close(left, right)


def test_what_was_compiled_is_told(compiled):
    """The steady form has the pieces of the first step, and more calls around them."""
    first, steady = (n for n in compiled.step.programs[-1].notes if "pieces" in n)
    pattern = (
        r"Inductor: (.+); (\d+) pieces, (\d+) of them different, (\d+) of them new"
    )
    _, count, different, new = re.match(pattern, first).groups()
    assert int(count) > int(different) == int(new)
    assert re.match(pattern, steady).groups() == (
        "nothing to compile",
        count,
        different,
        "0",
    )
