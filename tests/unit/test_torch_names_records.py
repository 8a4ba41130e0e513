"""Private torch names for dataclasses in trees and for what optimizers note."""

from dataclasses import dataclass

import pytest
import torch

from torchspmd import _torch

pytestmark = pytest.mark.unit


@dataclass(frozen=True)
class Pair:
    one: int
    two: int


def test_record_fields():
    assert list(_torch.record_fields(Pair(1, 2))) == [("one", 1), ("two", 2)]


def test_record():
    pair = Pair(1, 2)
    leaves, structure = _torch.flatten_tree([_torch.Record(pair, [1, [2, 3]])])
    assert leaves == [1, 2, 3]
    (made,) = _torch.unflatten_tree([4, 5, 6], structure)
    assert made == Pair(4, [5, 6])
    assert _torch.flatten_tree(pair)[0] == [pair]  # the user's class stays a leaf


def test_bookkeeping():
    parameter = torch.nn.Parameter(torch.ones(2))
    optim = torch.optim.SGD([parameter], fused=True)
    torch.optim.lr_scheduler.StepLR(optim, 1)
    before = dict(vars(optim))
    parameter.grad = torch.ones(2)
    optim.step()
    changed = {
        key for key, value in vars(optim).items() if before.get(key) is not value
    }
    assert {"_opt_called", "_need_device_dtype_check_for_fused"} <= changed
    assert changed <= {*_torch.OPTIMIZER_BOOKKEEPING, "state"}
