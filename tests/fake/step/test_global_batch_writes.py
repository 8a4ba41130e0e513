"""Writes in place that one device can make and ranks cannot: refused, with the line."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchspmd.errors import CaptureError
from torchspmd.step import compile
from torchspmd.testing import fake_world


def run(change):
    def step(model, x, y):
        h = model(x)
        with torch.no_grad():
            changed = change(h.detach() * 1, y)
        return h.sum(), changed

    with fake_world(2):
        compile(step)(nn.Linear(4, 4), torch.ones(2, 4), torch.ones(2).long())


def first_row(h, y):
    h[0] = 0


LOST = {
    "row": first_row,
    "labels": lambda h, y: y[-1:].fill_(-100),
    "step": lambda h, y: h[::2].mul_(2),
    "split": lambda h, y: h.split(1)[0].zero_(),
    "diagonal": lambda h, y: (h @ h.T).diagonal().fill_(-9),
    "view before": lambda h, y: h.T[:, 0].zero_(),
    "view behind": lambda h, y: h[:1].view(-1)[:2].detach().zero_(),
    "list": lambda h, y: torch._foreach_mul_([h[0]], 2.0),
    "out": lambda h, y: torch.add(h[0], 1.0, out=h[1]),
}


@pytest.mark.parametrize("name", LOST)
def test_a_write_into_a_view_along_the_batch(name):
    with pytest.raises(CaptureError, match="writes into a view along the batch") as e:
        run(LOST[name])
    assert f"{__file__}:" in str(e.value)
    assert "torch.where" in str(e.value)
    assert "torch.cat" in str(e.value)


def used(h, y):
    row = h[0]
    h.mul_(2)
    return row + 1


def returned(h, y):
    row = h[0]
    h.mul_(2)
    return row


@pytest.mark.parametrize("change", [used, returned])
def test_a_view_that_is_older_than_a_write(change):
    with pytest.raises(CaptureError, match="after the tensor that it was taken") as e:
        run(change)
    assert "the write is at" in str(e.value)
    assert "clone()" in str(e.value)


def along_other_dims(h, y):
    h[:, 0] = 0
    h.T[1:].unsqueeze(0).mul_(2)
    row = h[0].clone()
    row.zero_()
    h.fill_(1)
    return row, h[0], h.sum(0).fill_(0), h.mean(0).fill_(2)


def test_other_writes_are_taken():
    run(along_other_dims)


ON_COUNTS = {
    "fill_": lambda h, y: (y > 0).sum().fill_(3),
    "copy_": lambda h, y: (y > 0).sum().copy_(torch.tensor(3)),
    "add_": lambda h, y: (y > 0).sum().add_(3),
    "clamp_": lambda h, y: (y > 0).sum().clamp_(max=2),
    "random_": lambda h, y: (y > 0).sum().random_(3),
}


@pytest.mark.parametrize("name", ON_COUNTS)
def test_a_value_written_into_terms_of_a_sum_of_integers(name):
    text = f"aten::{name} on a sum over the batch of integers"
    with pytest.raises(CaptureError, match=text) as e:
        run(ON_COUNTS[name])
    assert f"{__file__}:" in str(e.value)
    assert "    in Global (forward)\n" in str(e.value)
    assert "torch.full or full_like, torch.randint" in str(e.value)


def test_numbers_drawn_into_gaps():
    with pytest.raises(CaptureError, match="aten::normal_ on a tensor with gaps") as e:
        run(lambda h, y: h.repeat(4, 1)[:, 1:].normal_())
    assert f"{__file__}:" in str(e.value)
    assert "part.copy_(torch.randn_like(part))" in str(e.value)


def test_a_shape_that_depends_on_values():
    with pytest.raises(
        CaptureError, match=r"aten\.bincount\.default makes depends"
    ) as e:
        run(lambda h, y: torch.bincount(y, minlength=4))
    assert f"{__file__}:" in str(e.value)


def test_gradients_divided_by_counts():
    with pytest.raises(CaptureError, match="embedding with scale_grad_by_freq=True"):
        run(lambda h, y: F.embedding(y, h.T @ h, scale_grad_by_freq=True))


def test_a_write_by_indices_of_the_batch():
    def by_indices(h, y):
        h[torch.arange(2), y] = 1.0

    with pytest.raises(CaptureError, match="aten::index_put_ on the batch") as e:
        run(by_indices)
    assert f"{__file__}:" in str(e.value)
    assert "x[mask] = number" in str(e.value)
