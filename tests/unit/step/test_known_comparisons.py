"""Choices by a random number: captured where every number gives the same answer."""

import pytest
import torch
from torch import nn

from torchspmd.errors import CaptureError
from torchspmd.step import compile


class Layers(nn.Module):
    def __init__(self, bound, change=None):
        super().__init__()
        self.layer, self.bound, self.change = nn.Linear(4, 4), bound, change

    def forward(self, x):
        draw = torch.rand([])
        if self.change is not None:
            self.change(draw)
        skip = draw < self.bound
        return nn.functional.dropout(x if skip else self.layer(x), 0.5)


def forward(model, x):
    return model(x)


@pytest.mark.parametrize("bound", [0.0, -1])
def test_a_bound_that_no_number_is_below(bound):
    model, x = Layers(bound), torch.randn(3, 4)
    torch.manual_seed(0)
    expected = forward(model, x)
    torch.manual_seed(0)
    assert torch.equal(compile(forward)(model, x), expected)  # the number is drawn


@pytest.mark.parametrize(
    ("bound", "change"), [(0.1, None), (1.0, None), (0.0, lambda draw: draw.sub_(0.5))]
)
def test_other_choices_are_refused(bound, change):
    with pytest.raises(CaptureError, match="needs a tensor's value"):
        compile(forward)(Layers(bound, change), torch.randn(3, 4))


def test_a_bound_that_changes():
    model, step = Layers(0.0), compile(forward)
    step(model, torch.randn(3, 4))
    model.bound = 0.5
    with pytest.raises(CaptureError, match="needs a tensor's value"):
        step(model, torch.randn(3, 4))
