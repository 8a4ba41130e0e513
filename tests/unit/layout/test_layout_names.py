"""Names without the parts that wrappers add."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)

from torchspmd.layout.names import inner_module, parameter_names, plain_name, unwrapped

pytestmark = pytest.mark.unit


def test_wrappers_inside_of_each_other() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    inner = model[0]
    model[0] = checkpoint_wrapper(torch.compile(checkpoint_wrapper(inner)))
    assert inner_module(model[0]) is inner
    assert unwrapped(torch.compile(model)) is model
    assert list(parameter_names(model)) == ["0.weight", "0.bias"]


def test_a_users_own_attribute_called_module_stays() -> None:
    assert plain_name("module._fsdp_wrapped_module.weight") == "module.weight"
