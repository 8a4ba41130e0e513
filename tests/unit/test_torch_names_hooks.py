"""Private torch names about hooks; see tests/unit/test_torch_names.py."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from torchspmd import _torch

pytestmark = pytest.mark.unit


def same(value):
    return None


def test_optimizer_hook_tables():
    optim = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    first, second = _torch.OPTIMIZER_HOOK_TABLES
    before = optim.register_step_pre_hook(print)
    after = optim.register_step_post_hook(print)
    assert list(_torch.hooks_of(optim, (first,))) == [(first, before.id, print)]
    assert list(_torch.hooks_of(optim, (second,))) == [(second, after.id, print)]


def test_gradient_hook_tables():
    parameter = nn.Parameter(torch.zeros(2))
    tables = _torch.GRADIENT_HOOK_TABLES
    assert list(_torch.hooks_of(parameter, tables)) == []
    before = parameter.register_hook(same)
    after = parameter.register_post_accumulate_grad_hook(same)
    assert list(_torch.hooks_of(parameter, tables)) == [
        (tables[0], before.id, same),
        (tables[1], after.id, same),
    ]


def test_gradient_hook_keys():
    tensors = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    assert _torch.gradient_hook_keys(tensors) == []
    before = tensors[1].register_hook(same)
    after = tensors[2].register_post_accumulate_grad_hook(same)
    keys = _torch.gradient_hook_keys(tensors)
    assert keys == [(1, (before.id,), ()), (2, (), (after.id,))]
    before.remove()
    after.remove()
    assert _torch.gradient_hook_keys(tensors) == []


def test_add_gradient_hook():
    one, other = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    seen = []
    one.register_hook(lambda gradient: seen.append("before"))
    one.register_post_accumulate_grad_hook(lambda tensor: seen.append("after"))
    for table, _, hook in _torch.hooks_of(one, _torch.GRADIENT_HOOK_TABLES):
        _torch.add_gradient_hook(other, table, hook)
    other.sum().backward()
    assert seen == ["before", "after"]


@pytest.mark.parametrize(("mode", "expected"), (("all", True), ("any", False)))
def test_waits_for_nodes(mode, expected):
    parameter = nn.Parameter(torch.zeros(2))
    register_multi_grad_hook([parameter], same, mode=mode)
    ((_, _, hook),) = _torch.hooks_of(parameter, _torch.GRADIENT_HOOK_TABLES)
    assert _torch.waits_for_nodes(hook) is expected
    assert not _torch.waits_for_nodes(same)
    assert not _torch.waits_for_nodes(_torch.LaysOutGradient())


def test_hooks_of():
    tensor = torch.ones(1, requires_grad=True)
    assert list(_torch.hooks_of(tensor, _torch.GRADIENT_HOOK_TABLES)) == []

    def hook(gradient):
        return None

    handle = tensor.register_hook(hook)
    ((table, key, found),) = _torch.hooks_of(tensor, _torch.GRADIENT_HOOK_TABLES)
    assert (table, key) == ("_backward_hooks", handle.id) and found is hook
