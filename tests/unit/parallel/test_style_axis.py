"""How dimensions are cut, as DTensor cuts them."""

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from torchspmd.layout.placements import positive_dim
from torchspmd.parallel.axis import global_shape, gradient_layout
from torchspmd.parallel.redistribute import is_same

LAYOUTS = (Replicate(), Partial(), Shard(0), Shard(1), Shard(-1))


@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("second", LAYOUTS)
def test_the_quick_comparison_is_the_placements_own(
    first: object, second: object
) -> None:
    assert is_same(first, second) == (first == second)


def test_layouts_of_gradients_and_shapes() -> None:
    assert gradient_layout(Partial()) == Replicate()
    assert gradient_layout(Shard(1)) == Shard(1)
    assert positive_dim(Shard(-1), 3) == Shard(2)
    assert positive_dim(Replicate(), 3) == Replicate()
    assert global_shape((2, 3), Shard(0), 4) == (8, 3)
    assert global_shape((2, 3), Partial(), 4) == (2, 3)
