"""Parts of what is drawn for a whole batch."""

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from torchspmd.step.modes.global_batch_ops import local_part, run_random_op
from torchspmd.testing import fake_mesh


@pytest.fixture
def sharded():
    with fake_mesh(2) as mesh:
        yield lambda rows: distribute_tensor(torch.zeros(rows, 2), mesh, [Shard(0)])


def test_a_rank_keeps_its_rows(sharded):
    whole = torch.arange(8.0).view(4, 2)
    assert torch.equal(local_part(whole, sharded(4)).to_local(), whole[:2])


def test_uneven_rows_are_refused(sharded):
    text = r"DTensor of \(3, 2\) that is sharded unevenly over 2 ranks"
    with pytest.raises(NotImplementedError, match=text):
        local_part(torch.zeros(3, 2), sharded(3))


def test_several_drawn_tensors_are_refused(sharded):
    operator = torch.ops.aten.rrelu_with_noise_functional.default
    with pytest.raises(NotImplementedError, match="draws several tensors"):
        run_random_op(operator, (sharded(4), sharded(4), 0.1, 0.3, True), {})
