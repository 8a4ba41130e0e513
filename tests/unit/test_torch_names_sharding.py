"""Private torch names that sharded parameters need; see tests/unit/test_torch_names.py."""

import pytest
import torch
from torch import nn

from torchspmd import _torch

pytestmark = pytest.mark.unit


def test_version_of():
    tensor = torch.zeros(2)
    before = _torch.version_of(tensor)
    tensor.detach().add_(1)
    assert _torch.version_of(tensor) == before + 1


def test_has_gradient_hooks():
    parameter = nn.Parameter(torch.zeros(2))
    assert not _torch.has_gradient_hooks(parameter)
    hook = parameter.register_hook(lambda gradient: gradient)
    assert _torch.has_gradient_hooks(parameter)
    hook.remove()
    assert not _torch.has_gradient_hooks(parameter)
    parameter.register_post_accumulate_grad_hook(lambda tensor: None)
    assert _torch.has_gradient_hooks(parameter)


def test_is_view():
    aten = torch.ops.aten
    assert _torch.is_view(aten.t.default)
    assert _torch.is_view(aten.slice.Tensor)
    assert not _torch.is_view(aten.mm.default)
    assert not _torch.is_view(len)
