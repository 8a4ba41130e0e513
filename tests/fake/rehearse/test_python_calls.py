"""What Python and reads of values a rehearsal writes down for the host."""

import gc
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchspmd.rehearse.recording import Node, Op, Phase, Synchronize


class Talkative(nn.Module):
    """Calls Python functions between two operators."""

    def __init__(self, calls):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls = calls

    def forward(self, x):
        x = self.first(x)
        for _ in range(self.calls):
            _nothing()
        return self.second(x)


def _nothing():
    return sum(each for each in range(3))  # a generator is no call


def counted(rehearse, calls, *, recompute=False):
    with rehearse() as recording:
        model = Talkative(calls).cuda()
        x = torch.ones(2, 4, device="cuda")
        for _ in range(2):
            y = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
            y.sum().backward()
    return [event for event in recording.events if isinstance(event, Op)]


def test_what_the_garbage_collector_calls_does_not_count(rehearse, monkeypatch):
    monkeypatch.setitem(globals(), "_nothing", gc.collect)

    def calls():
        return [op.calls for op in counted(rehearse, 1)]

    before, others = calls(), list(gc.callbacks)
    callback = [lambda phase, info: [_generated() for _ in range(50)]]
    try:
        gc.callbacks[:] = [*callback, *others, *callback]
        assert calls() == before
        assert gc.callbacks == [*callback, *others, *callback]
    finally:
        gc.callbacks[:] = others


def _generated():
    return 0


def test_calls_beside_operators_are_counted(rehearse):
    few, many = (counted(rehearse, calls) for calls in (0, 50))
    assert len(few) == len(many)
    more = [many[at].calls - few[at].calls for at in range(len(few))]
    assert sorted(more)[-2:] == [50, 50]  # before the second product, in two steps
    assert sum(more) == 100
    # A module's call is three, and reading its two parameters two.
    assert 5 <= max(op.calls for op in few[len(few) // 2 :]) <= 20


def test_distributions_are_python_over_operators(rehearse):
    with rehearse() as recording:
        model = nn.Linear(4, 4).cuda()
        logits = model(torch.ones(2, 4, device="cuda"))
        torch.distributions.Categorical(logits=logits, validate_args=False).entropy()
    ops = [event for event in recording.events if isinstance(event, Op)]
    assert sum(op.calls for op in ops if op.site.phase is Phase.OTHER) > 3


def test_operators_of_backward_tell_where_nodes_of_autograd_begin(rehearse):
    with rehearse() as recording:
        model = nn.Linear(4, 4).cuda()
        x = torch.ones(2, 4, device="cuda", requires_grad=True)
        for _ in range(2):  # the second time, gradients are added to the first
            model(x).sum().backward()
    ops = [event for event in recording.events if isinstance(event, Op)]
    nodes = [
        (op.name.split(".")[1], op.node)
        for op in ops
        if op.site.phase is Phase.BACKWARD
    ]
    assert [op.node for op in ops if op.site.phase is Phase.FORWARD] == [""] * 4
    products = [node for name, node in nodes if name in ("t", "mm")]
    # Of the product: three views and two products; of the transposed weight: one view.
    of_a_layer = [Node.OPERATOR, *[Node.NONE] * 4, Node.OPERATOR]
    assert products == 2 * of_a_layer
    handed = [name for name, node in nodes if node is Node.GRADIENT]
    assert handed == ["detach"] * 3 + ["add_"] * 3


def test_calls_of_recomputation_are_counted(rehearse):
    few, many = (counted(rehearse, calls, recompute=True) for calls in (0, 50))
    more = [many[at].calls - few[at].calls for at in range(len(few))]
    again = [
        count
        for count, op in zip(more, few, strict=True)
        if count and op.site.phase is Phase.RECOMPUTE
    ]
    assert again == [50, 50]
    assert sum(more) == 200


def test_counts_are_equal_on_every_run(rehearse):
    one, other = ([op.calls for op in counted(rehearse, 3)] for _ in range(2))
    assert one == other
    assert sys.getprofile() is None


def test_another_profiler_is_left_alone_and_told(rehearse):
    def profiler(*event):
        pass

    sys.setprofile(profiler)
    try:
        with rehearse() as recording:
            nn.Linear(2, 2).cuda()(torch.ones(2, device="cuda"))
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    (note,) = [note for note in recording.notes if "profiler" in note]
    assert "Python calls of the script are not counted" in note
    assert not any(op.calls for op in recording.events if isinstance(op, Op))


@pytest.mark.parametrize("read", [bool, torch.Tensor.tolist, torch.Tensor.item])
def test_the_host_waits_for_a_value_that_it_reads(rehearse, read):
    with rehearse() as recording:
        on_device = torch.ones(4, dtype=torch.int64, device="cuda").sum()
        read(on_device)
        read(torch.ones(()))
    waits = [event for event in recording.events if isinstance(event, Synchronize)]
    assert len(waits) == 1
