"""Private torch names that sharded parameters need; see tests/unit/test_torch_names.py."""

import pytest
import torch

from torchspmd import _torch

pytestmark = pytest.mark.unit


def test_version_of():
    tensor = torch.zeros(2)
    before = _torch.version_of(tensor)
    tensor.detach().add_(1)
    assert _torch.version_of(tensor) == before + 1


def test_is_view():
    aten = torch.ops.aten
    assert _torch.is_view(aten.t.default)
    assert _torch.is_view(aten.slice.Tensor)
    assert not _torch.is_view(aten.mm.default)
    assert not _torch.is_view(len)
