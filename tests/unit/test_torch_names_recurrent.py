"""Private torch names around recurrent layers; see test_torch_names.py."""

import pytest
import torch
from torch import nn

from torchspmd import _torch

pytestmark = pytest.mark.unit


def test_rnn_layer():
    x, state = torch.randn(3, 5, 4), torch.zeros(5, 4)
    weights = (*torch.randn(2, 16, 4), *torch.randn(2, 16))
    options = (False, [], 2, 4, 1, True, False, False, True)
    with torch.no_grad():
        out, _, _, kept = _torch.rnn_layer(x, *weights, state, state, *options)
    assert out.shape == (3, 5, 4)
    assert not kept.requires_grad
    assert kept.numel() > 0  # the plain kernel keeps nothing here


def test_keep_flat_weights():
    layer = nn.LSTM(4, 4)
    model, own = nn.Sequential(layer), list(layer.parameters())
    with _torch.keep_flat_weights([model]):
        layer.weight_ih_l0 = nn.Parameter(torch.zeros(16, 4))
        assert layer._flat_weights[0] is not own[0]
    assert layer._flat_weights[0] is own[0]
    assert layer._flat_weight_refs[0]() is own[0]


def test_renew_flat_weights():
    layer, new = nn.LSTM(4, 4), nn.Parameter(torch.zeros(16, 4))
    layer._parameters["weight_ih_l0"] = new
    _torch.renew_flat_weights([nn.Sequential(layer)])
    assert layer._flat_weights[0] is new
    assert layer._flat_weight_refs[0]() is new
    assert not layer._weights_have_changed()
