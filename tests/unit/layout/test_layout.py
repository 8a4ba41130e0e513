"""Shards of a dimension: even, uneven, empty, by two axes, strided."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from torchspmd.layout.names import inner_module, parameter_names, plain_name, unwrapped
from torchspmd.layout.shards import (
    Cut,
    full_shard_size,
    shard_bounds,
    shard_positions,
    shard_size,
)


@pytest.mark.parametrize(
    ("size", "num_ranks", "bounds"),
    [
        (8, 2, [(0, 4), (4, 8)]),
        (7, 3, [(0, 3), (3, 6), (6, 7)]),
        (5, 4, [(0, 2), (2, 4), (4, 5), (5, 5)]),
        (2, 4, [(0, 1), (1, 2), (2, 2), (2, 2)]),
        (0, 2, [(0, 0), (0, 0)]),
        (3, 1, [(0, 3)]),
    ],
)
def test_bounds(size: int, num_ranks: int, bounds: list[tuple[int, int]]) -> None:
    ranks = range(num_ranks)
    assert [shard_bounds(size, num_ranks, rank) for rank in ranks] == bounds
    assert [shard_size(size, num_ranks, rank) for rank in ranks] == [
        last - first for first, last in bounds
    ]


@given(size=st.integers(0, 200), num_ranks=st.integers(1, 40))
def test_shards_are_those_of_chunk(size: int, num_ranks: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(num_ranks)]
    chunks += [[]] * (num_ranks - len(chunks))
    assert full_shard_size(size, num_ranks) == len(chunks[0])
    for rank, chunk in enumerate(chunks):
        assert shard_size(size, num_ranks, rank) == len(chunk)
        assert chunk == list(range(*shard_bounds(size, num_ranks, rank)))
        assert shard_positions(size, [Cut(num_ranks, rank)]).tolist() == chunk


@pytest.mark.parametrize("size", (8, 7, 5, 3, 1))
@pytest.mark.parametrize("is_strided", (False, True))
def test_two_axes_as_torch_counts_them(size: int, is_strided: bool) -> None:
    first = _StridedShard(0, split_factor=2) if is_strided else Shard(0)
    held: list[int] = []
    for rank in range(4):
        place = divmod(rank, 2)
        cuts = [Cut(2, place[0], num_blocks=2 if is_strided else 1), Cut(2, place[1])]
        positions = shard_positions(size, cuts).tolist()
        shape, offset = _compute_local_shape_and_global_offset(
            (size,), (2, 2), list(place), (first, Shard(0))
        )
        assert shape == (len(positions),)
        if positions:
            assert offset == (positions[0],)
        held += positions
    assert sorted(held) == list(range(size))


# ----------------------------------------------------------------------------
# Names without the parts that wrappers add.


def test_wrappers_inside_of_each_other() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    inner = model[0]
    model[0] = checkpoint_wrapper(torch.compile(checkpoint_wrapper(inner)))
    assert inner_module(model[0]) is inner
    assert unwrapped(torch.compile(model)) is model
    assert list(parameter_names(model)) == ["0.weight", "0.bias"]


def test_a_users_own_attribute_called_module_stays() -> None:
    assert plain_name("module._fsdp_wrapped_module.weight") == "module.weight"
