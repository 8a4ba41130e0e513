"""Private torch names that passes need to add nodes; see tests/unit/test_torch_names.py."""

import operator

import pytest
import torch

from torchspmd import CommDebugMode, _torch

pytestmark = pytest.mark.unit


def test_operators():
    for op, name in (
        (_torch.ALL_REDUCE, "all_reduce"),
        (_torch.ALL_GATHER, "all_gather_into_tensor"),
        (_torch.REDUCE_SCATTER, "reduce_scatter_tensor"),
        (_torch.WAIT, "wait_tensor"),
    ):
        assert _torch.packet_name(op) == f"_c10d_functional::{name}"


@pytest.mark.parametrize("make", [_torch.FakeWorld().fake, lambda t: t.to("meta")])
def test_fake_result(make):
    whole, number = make(torch.ones(8, 3).bfloat16()), make(torch.ones(()))
    with CommDebugMode() as mode:
        for target, args, shape in (
            (_torch.ALL_REDUCE, (whole.t(), "sum", "0"), (3, 8)),
            (_torch.ALL_GATHER, (whole, 4, "0"), (32, 3)),
            (_torch.REDUCE_SCATTER, (whole, "sum", 4, "0"), (2, 3)),
            (_torch.WAIT, (whole,), (8, 3)),
            (torch.ops.aten.cat.default, ([whole, whole], 1), (8, 6)),
        ):
            made = _torch.fake_result(target, args)
            assert made.shape == shape and made.dtype == torch.bfloat16
            assert _torch.is_fake(made)
        assert mode.get_total_counts() == 0
    pieces = _torch.fake_result(torch.ops.aten.split.Tensor, (whole, 4))
    assert _torch.fake_result(operator.getitem, (pieces, 1)).shape == (4, 3)
    assert not _torch.fake_result(torch.ops.aten.neg.default, (number,)).requires_grad
