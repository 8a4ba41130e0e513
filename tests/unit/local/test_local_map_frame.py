"""Whole sizes from local ones."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from torchspmd.local.frame import (
    Grid,
    Source,
    UnknownSizeError,
    list_sources,
    shape_here,
    whole_shape,
    whole_size,
    whole_stride,
)

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


@given(
    st.integers(1, 40), st.integers(1, 6), st.integers(1, 3), st.booleans(), st.data()
)
def test_a_kept_dim_gets_its_size_back(
    size: int, outer: int, inner: int, both: bool, data: st.DataObject
) -> None:
    place = (data.draw(st.integers(0, outer - 1)), data.draw(st.integers(0, inner - 1)))
    grid = Grid((outer, inner), place)
    layout = (S0, S0) if both else (S0, R)
    here = shape_here((size, 3), layout, grid)
    assert whole_shape(here, layout, list_sources((size, 3), layout), grid) == (size, 3)


def test_even_sizes_are_multiplied() -> None:
    grid = Grid((4,), (1,))
    assert whole_size(6, (0,), [Source(8, (0,)), Source(5, ())], grid) == 24
    assert whole_size(6, (0,), [], grid) == 24


def test_uneven_sizes_are_recognised_or_refused() -> None:
    first, last = Grid((3,), (0,)), Grid((3,), (2,))
    uneven = Source(7, (0,))
    assert whole_size(3, (0,), [uneven], first) == 7
    assert whole_size(1, (0,), [uneven], last) == 7
    with pytest.raises(UnknownSizeError, match="6 here, while a dim of 7 is split"):
        whole_size(6, (0,), [uneven], first)
    with pytest.raises(UnknownSizeError, match="it may be any of 7 or 9"):
        whole_size(3, (0,), [uneven, Source(9, (0,))], first)
    # A whole dim of 7 may have been cut by the function.
    with pytest.raises(UnknownSizeError, match="a dim of 7 is split unevenly"):
        whole_size(3, (0,), [Source(7, ())], first)
    assert whole_size(2, (0,), [Source(7, ())], first) == 6


def test_what_one_rank_cannot_tell_is_refused_on_all() -> None:
    """A rank that raises alone leaves the others in their next collective."""
    whole, sharded = Source(3, ()), [Source(5, (0,)), Source(6, (0,))]
    for rank in range(2):
        with pytest.raises(UnknownSizeError, match="a dim of 3 is split unevenly"):
            whole_size(1, (0,), [whole], Grid((2,), (rank,)))
        with pytest.raises(UnknownSizeError, match="it may be any of 5 or 6"):
            whole_size(3, (0,), sharded, Grid((2,), (rank,)))


def test_a_rank_that_holds_nothing() -> None:
    assert whole_size(0, (0,), [Source(2, (0,))], Grid((3,), (2,))) == 2


@given(st.permutations(range(3)))
def test_strides_keep_their_order(order: list[int]) -> None:
    whole, part = (
        torch.empty(4, 6, 2).permute(order),
        torch.empty(2, 6, 2).permute(order),
    )
    assert whole_stride(whole.shape, part.stride()) == whole.stride()
