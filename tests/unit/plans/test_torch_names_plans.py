"""The private names of torch that plans use, on the installed torch."""

import pytest
from torch import nn

from torchspmd import _torch

pytestmark = pytest.mark.unit


def test_has_forward_hooks():
    module = nn.Linear(2, 2)
    assert not _torch.has_forward_hooks(module)
    handle = module.register_forward_hook(lambda *_: None)
    assert _torch.has_forward_hooks(module)
    handle.remove()
    module.register_forward_pre_hook(lambda *_: None)
    assert _torch.has_forward_hooks(module)
