"""The private name of torch behind the memory figures of a lock."""

import pytest
import torch

from torchspmd import _torch

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_storage_key(device):
    tensor, other = torch.empty(4, device=device), torch.empty(4, device=device)
    assert _torch.storage_key(tensor) == _torch.storage_key(tensor[1:].detach())
    assert _torch.storage_key(tensor) != _torch.storage_key(other)
