"""Private torch names that the ledger needs; see tests/unit/test_torch_names.py."""

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from torchspmd import _torch
from torchspmd.testing import fake_mesh

pytestmark = pytest.mark.fake


def test_find_group():
    with fake_mesh((2, 4), ("dp", "tp")) as mesh:
        assert _torch.find_group("", [0, 1, 2, 3]) is mesh.get_group("tp")
        assert _torch.find_group("", list(range(8))) is dist.group.WORLD
        assert _torch.find_group("", [0, 7]) is None


def test_size_hint():
    shape_env = ShapeEnv()
    symbol = shape_env.create_symbol(
        7, source=ConstantSource("s"), dynamic_dim=DimDynamic.DYNAMIC
    )
    size = shape_env.create_symintnode(symbol, hint=7)
    assert isinstance(size, torch.SymInt)
    assert _torch.size_hint(size * 3) == 21
    assert type(_torch.size_hint(size)) is int
    assert not shape_env.guards
    assert _torch.size_hint(5) == 5
