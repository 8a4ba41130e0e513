"""Operators that a graph cannot run as eager does: refused, with the way out."""

import pytest
import torch
from torch import nn

from torchspmd.errors import CaptureError
from torchspmd.step import compile


class Noise(nn.Module):
    def __init__(self, width, step):
        super().__init__()
        self.width, self.step = width, step

    def forward(self, x):
        noise = torch.zeros(4, self.width)
        noise[:, :: self.step].normal_()
        return x + noise.sum()


def drawn(model, x):
    return model(x)


def test_normal_numbers_drawn_into_gaps():
    with pytest.raises(CaptureError, match="aten::normal_ on a tensor with gaps") as e:
        compile(drawn)(Noise(8, 2), torch.ones(()))
    text = str(e.value)
    assert f"{__file__}:" in text
    assert "in Noise (forward)" in text
    assert "part.copy_(torch.randn_like(part))" in text


@pytest.mark.parametrize("form", [(6, 2), (8, 1)])  # a few numbers, no gaps
def test_numbers_that_are_drawn_as_in_eager(form):
    model, x = Noise(*form), torch.ones(())
    torch.manual_seed(0)
    expected = drawn(model, x)
    torch.manual_seed(0)
    assert torch.equal(compile(drawn)(model, x), expected)


def test_a_scripted_function():
    with pytest.warns(DeprecationWarning):
        scripted = torch.jit.script(_root)
    with pytest.raises(CaptureError, match=r"a function of torch\.jit\.script") as e:
        compile(drawn)(scripted, torch.ones(4, 4))
    assert "PYTORCH_JIT=0" in str(e.value)


def _root(x: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float)) * x


class Experts(nn.Module):
    """What the experts of a model of transformers do by default."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 8, 8))

    def forward(self, x):
        ends = torch.arange(2, dtype=torch.int32) * 4 + 4
        return torch.nn.functional.grouped_mm(x, self.weight, offs=ends)


@pytest.mark.skipif(
    not hasattr(torch.nn.functional, "grouped_mm"), reason="newer versions of torch"
)
def test_experts_in_a_dtype_without_a_form(caplog):
    with pytest.raises(CaptureError, match="a grouped product of experts") as e:
        compile(drawn)(Experts(), torch.ones(8, 8))
    assert "experts_implementation='batched_mm'" in str(e.value)
    assert "failed while attempting" not in caplog.text


@pytest.mark.parametrize("weight", ("fweights", "aweights"))
def test_weights_of_a_covariance(weight):
    def step(model, x):
        return torch.cov(model(x), **{weight: torch.ones(4, dtype=torch.int64)})

    with pytest.raises(CaptureError, match=r"torch\.cov with weights") as e:
        compile(step)(nn.Linear(4, 4), torch.ones(4, 4))
    assert "Multiply by the weights in the step itself" in str(e.value)
