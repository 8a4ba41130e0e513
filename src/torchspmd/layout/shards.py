"""How a dimension is cut into shards, as ``torch.chunk`` and DTensor cut it.

Every shard has ``ceil(size / ranks)`` elements until they run out, so the last shards may
be smaller or empty.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch


def full_shard_size(size: int, num_ranks: int) -> int:
    """How many elements the first ranks hold.

    >>> full_shard_size(5, 4)
    2
    """
    return -(-size // num_ranks)


def shard_size(size: int, num_ranks: int, rank: int) -> int:
    """How many elements of a dimension one rank holds.

    >>> [shard_size(5, 4, rank) for rank in range(4)]
    [2, 2, 1, 0]
    """
    full = full_shard_size(size, num_ranks)
    return max(0, min(full, size - full * rank))


def shard_bounds(size: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """First and last element (excluded) of a dimension that one rank holds.

    >>> [shard_bounds(5, 4, rank) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    full = full_shard_size(size, num_ranks)
    return min(rank * full, size), min((rank + 1) * full, size)


class Cut(NamedTuple):
    """One mesh axis that shards a dimension, as one rank of it sees it.

    ``num_blocks`` is the split factor of a strided shard: the dimension is taken as so
    many blocks, and the axis cuts each of them.
    """

    num_ranks: int
    rank: int
    num_blocks: int = 1


def shard_positions(size: int, cuts: Iterable[Cut]) -> torch.Tensor:
    """Which elements of a dimension a rank holds when several axes cut it in turn.

    >>> shard_positions(8, [Cut(2, 0), Cut(2, 1)])
    tensor([2, 3])
    >>> shard_positions(8, [Cut(2, 1, num_blocks=2), Cut(2, 0)])
    tensor([2, 3])
    """
    positions = torch.arange(size)
    for cut in cuts:
        positions = torch.cat(
            [
                block[slice(*shard_bounds(len(block), cut.num_ranks, cut.rank))]
                for block in positions.chunk(cut.num_blocks)
            ]
        )
    return positions
