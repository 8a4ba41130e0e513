"""What a compiled region leaves out of memory."""

import torch
from torch import nn

from torchspmd.rehearse.recording import Alloc, Free, Op, Phase

ROWS, WIDTH = 256, 512
LARGE = 4 * ROWS * WIDTH  # one activation, float32


def chain(x):
    return (x.relu() * 2 + 1).sigmoid().sum()


def allocated(recording, phase):
    makers = {e.number: e.name for e in recording.events if isinstance(e, Op)}
    return [
        makers[event.op]
        for event in recording.events
        if isinstance(event, Alloc)
        and event.nbytes == LARGE
        and event.site.phase is phase
        and event.op in makers
    ]


def run(rehearse, function, compiled):
    with rehearse() as recording:
        x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
        module = Wrapped(function).cuda()
        if compiled:
            module = torch.compile(module)
        module(x).backward()
        held = x.grad
    assert held is not None
    return recording


class Wrapped(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.function(self.up(x))


def test_elementwise_chains_are_not_in_memory(rehearse):
    eager = run(rehearse, chain, compiled=False)
    assert len(allocated(eager, Phase.FORWARD)) == 5  # the product, and each result
    fused = run(rehearse, chain, compiled=True)
    assert allocated(fused, Phase.FORWARD) == ["aten.addmm.default"]


def test_what_a_product_of_backward_reads_is_kept(rehearse):
    down = nn.Linear(WIDTH, WIDTH)

    def mlp(x):
        return down.to(x.device)(nn.functional.gelu(x)).sum()

    fused = run(rehearse, mlp, compiled=True)
    assert allocated(fused, Phase.FORWARD) == [
        "aten.addmm.default",
        "aten.gelu.default",
        "aten.addmm.default",
    ]


def test_every_allocation_is_freed_once(rehearse):
    recording = run(rehearse, chain, compiled=True)
    live = set()
    for event in recording.events:
        if isinstance(event, Alloc):
            assert event.storage not in live
            live.add(event.storage)
        elif isinstance(event, Free):
            assert event.storage in live
            live.remove(event.storage)


def test_fused_sums_take_no_buffers_of_kernels(rehearse):
    def workspaces(compiled):
        with rehearse() as recording:
            function = lambda x: x.sum(0)  # noqa: E731
            if compiled:
                function = torch.compile(function)
            function(torch.randn(8192, 768, device="cuda"))
        return [e for e in recording.events if isinstance(e, Alloc) and e.workspace]

    assert workspaces(compiled=False)
    assert not workspaces(compiled=True)
