"""Private torch names about tensors on two axes; see test_torch_names.py."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchspmd import _torch
from torchspmd.testing import fake_mesh

pytestmark = pytest.mark.fake


def test_sister_axis():
    with fake_mesh((2, 2, 2), ("pp", "dp", "tp"), rank=5) as mesh:
        dp, tp = mesh["dp"], mesh["tp"]
        assert _torch.sister_axis(dp, tp) == tp
        assert _torch.sister_axis(dp, dp) is None
        assert _torch.sister_axis(dp, mesh["dp", "tp"]["tp"]) == tp
    with fake_mesh(4, ("all",)) as other:
        assert _torch.sister_axis(other, tp) is None


def test_join_axes():
    with fake_mesh((2, 2, 2), ("pp", "dp", "tp"), rank=5) as mesh:
        joined = _torch.join_axes(mesh["dp"], mesh["tp"])
        assert joined == mesh["dp", "tp"]
        assert joined.get_coordinate() == (0, 1)
        assert joined.get_group("tp") is mesh.get_group("tp")


def test_strided_shard():
    with fake_mesh((2, 2), ("dp", "tp"), rank=1) as mesh:
        placements = [_torch.strided_shard(0, 2), Shard(0)]
        rows = distribute_tensor(torch.arange(8), mesh, placements, src_data_rank=None)
        # The second half belongs to tp rank 1, and the first half of that to dp rank 0.
        assert rows.to_local().tolist() == [4, 5]


def test_free_shard():
    with fake_mesh(2, ("dp",)) as mesh:
        tensor = DTensor.from_local(torch.ones(4, 3), mesh, [Shard(0)])
        _torch.free_shard(tensor)
        assert tensor.to_local().numel() == 0
