"""``optim.step(closure)``: backward runs inside of the optimizer's step."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchspmd.errors import CaptureError
from torchspmd.step import DataParallel, compile


class Twice(torch.optim.SGD):
    """Moves against the gradient, asks again there, and then makes its step."""

    def step(self, closure):
        self.move(-0.05)
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        return super().step() or loss

    @torch.no_grad()
    def move(self, by):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=by)


class Inner(torch.optim.SGD):
    """Runs backward in its step, without a closure."""

    def step(self):
        with torch.enable_grad():
            self.loss().backward()
        super().step()


def plain_step(model, optim, x):
    def closure():
        optim.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return optim.step(closure)


def step_with_gradients(model, optim, x):
    def closure():
        loss = model(x).square().mean()
        loss.backward()
        return loss

    closure()
    loss = optim.step(closure=closure)
    optim.zero_grad()
    return loss


STEPS = [
    (plain_step, torch.optim.SGD),
    (plain_step, torch.optim.Adam),
    (step_with_gradients, Twice),
]


def train(step, optimizer, wrap, rows):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optim = optimizer(model.parameters(), lr=0.1)
    wrapped = wrap(step)
    for _ in range(3):
        wrapped(model, optim, torch.randn(4, 4)[rows])
    return [
        p.full_tensor() if hasattr(p, "full_tensor") else p
        for p in (each.detach() for each in model.parameters())
    ]


def far_from_one_device(mode):
    rows = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    found = []
    for step, optimizer in STEPS:
        whole = train(step, optimizer, lambda step: step, slice(0, 4))
        wrap = compile(parallel_mode=mode and DataParallel(mode))
        ours = train(step, optimizer, wrap, rows)
        if not all(map(torch.allclose, ours, whole)):
            found.append((step.__name__, optimizer.__name__))
    return found


@pytest.mark.parametrize("mode", [None, "replicate", "fully_shard"])
def test_gradients_of_the_closure_are_used(ranks2, mode):
    assert ranks2.run(far_from_one_device, mode) == [[], []]


def refusal_of_backward_in_a_step():
    def step(model, optim, x):
        optim.loss = lambda: model(x).square().mean()
        optim.step()

    model = nn.Linear(4, 3)
    optim = Inner(model.parameters(), lr=0.1)
    with pytest.raises(CaptureError) as caught:
        compile(step)(model, optim, torch.ones(2, 4))
    return str(caught.value)


def test_backward_in_a_step_without_a_closure_is_refused(ranks2):
    for text in ranks2.run(refusal_of_backward_in_a_step):
        assert (
            "step() runs backward itself, after it was handed the gradient of" in text
        )
        assert "test_step_closure.py:" in text
        assert "pass step() a closure that does" in text
