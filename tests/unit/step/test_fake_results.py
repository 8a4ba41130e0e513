"""What list operators give on tensors without values, found item by item."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchspmd import _torch

_ATEN = torch.ops.aten


def _lists(mode):
    with mode:
        first = [torch.empty(3, 2), torch.empty(4, 5).t(), torch.empty(3, 2)]
        second = [torch.empty(3, 2), torch.empty(5, 4), torch.empty(2, 3).t()]
    return first, second


def _forms(tensors):
    return [(each.shape, each.stride(), each.dtype) for each in tensors]


@pytest.mark.parametrize(
    ("operator", "rest"),
    [
        (_ATEN._foreach_sqrt.default, ()),
        (_ATEN._foreach_mul.Scalar, (0.5,)),
        (_ATEN._foreach_add.ScalarList, ([1.0, 2.0, 3.0],)),
    ],
)
def test_as_the_whole_list(operator, rest):
    mode = FakeTensorMode()
    first, second = _lists(mode)
    with mode:
        whole = [operator(each, *rest) for each in (first, second)]
    found = [_torch.fake_result(operator, (each, *rest)) for each in (first, second)]
    assert list(map(_forms, found)) == list(map(_forms, whole))


def test_two_lists():
    mode = FakeTensorMode()
    first, second = _lists(mode)
    with mode:
        whole = _ATEN._foreach_lerp.Scalar(first, second, 0.1)
    found = _torch.fake_result(_ATEN._foreach_lerp.Scalar, (first, second, 0.1))
    assert _forms(found) == _forms(whole)


def test_an_item_that_cannot_run():
    mode = FakeTensorMode()
    first, _ = _lists(mode)
    with mode:
        wrong = [*first[:2], torch.empty(7)]
    with pytest.raises(RuntimeError):
        _torch.fake_result(_ATEN._foreach_add.List, (first, wrong))
