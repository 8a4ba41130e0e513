"""The three orders of a reduction."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchspmd.errors import UsageError
from torchspmd.step.graph.reduction_order import reduce_values, ring_chunks
from torchspmd.step.graph.reports import ORDERS

pytestmark = pytest.mark.unit


def values(num_ranks, shape, dtype=torch.float32):
    return [
        torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)
        for rank in range(num_ranks)
    ]


def test_the_orders_of_four_ranks():
    a, b, c, d = (value[0] for value in values(4, (8,)))
    assert reduce_values(values(4, (8,)), "sum", "rank")[0] == ((a + b) + c) + d
    assert reduce_values(values(4, (8,)), "sum", "tree")[0] == (a + b) + (c + d)
    ring = reduce_values(values(4, (8,)), "sum", "ring")
    assert ring[0] == a + (b + (c + d))  # chunk 0 comes down from rank 3 to rank 0
    a, b, c, d = (value[7] for value in values(4, (8,)))
    assert ring[7] == d + (a + (b + c))


def test_an_odd_rank_waits_a_round_in_a_tree():
    a, b, c, d, e = values(5, (3,))
    total = reduce_values([a, b, c, d, e], "sum", "tree")
    assert torch.equal(total, ((a + b) + (c + d)) + e)


def test_two_ranks_show_no_order_and_four_do():
    def totals(num_ranks):
        return [
            reduce_values(values(num_ranks, (1000,)), "sum", order) for order in ORDERS
        ]

    two, four = totals(2), totals(4)
    assert all(torch.equal(two[0], other) for other in two)
    assert not torch.equal(four[0], four[1])
    assert not torch.equal(four[0], four[2])
    assert not torch.equal(four[1], four[2])


@pytest.mark.parametrize("order", ORDERS)
def test_small_floats_are_added_in_their_own_dtype(order):
    one, tiny = torch.ones(4, dtype=torch.bfloat16), torch.full((4,), 2**-9).bfloat16()
    total = reduce_values([one, tiny, tiny, tiny, tiny, tiny], "sum", "rank")
    assert total.dtype == torch.bfloat16
    assert bool((total == 1).all())  # in float32 they would have added up
    found = reduce_values(values(4, (5,), torch.float16), "sum", order)
    assert found.dtype == torch.float16 and found.shape == (5,)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 9), st.integers(0, 70), st.sampled_from(["sum", "max", "product"])
)
def test_exact_numbers_have_one_result(num_ranks, size, op):
    whole = [
        torch.randint(-3, 4, (size,), generator=torch.Generator().manual_seed(rank))
        for rank in range(num_ranks)
    ]
    found = [reduce_values(whole, op, order) for order in ORDERS]
    assert all(torch.equal(found[0], other) for other in found)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5_000_000), st.sampled_from([1, 2, 4, 8]), st.integers(1, 17))
def test_chunks_cover_a_buffer_once(num_elements, element_size, num_ranks):
    chunks = ring_chunks(num_elements, element_size, num_ranks)
    assert len(chunks) == num_ranks
    end = 0
    for start, length in chunks:
        assert start == end and length >= 0
        end = start + length
    assert end == num_elements


def test_one_rank_gets_a_tensor_of_its_own():
    value = torch.ones(2)
    for order in ORDERS:
        for op in ("sum", "avg"):
            assert reduce_values([value], op, order) is not value
    assert value.tolist() == [1, 1]


def test_unknown_words():
    with pytest.raises(
        UsageError, match="reduction 'premul' is not known; there are sum"
    ):
        reduce_values(values(2, (1,)), "premul", "rank")
    with pytest.raises(
        UsageError, match="order 'star' is not known; there are rank, ring"
    ):
        reduce_values(values(2, (1,)), "sum", "star")
