"""The order in which a reduction adds the ranks' values, and so its last bits.

Floating-point sums depend on their order. Three orders are modelled: one rank after the
other, pairs of pairs, and a ring, where an element's order depends on its place in the
buffer. The ring is the one of gloo, chunk edges included.
"""

from collections.abc import Callable, Sequence
from functools import reduce

import torch

from torchspmd.errors import UsageError
from torchspmd.step.graph.reports import ORDERS

_Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_COMBINE: dict[str, _Combine] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
REDUCE_OPS = tuple(_COMBINE)

_MAX_SEGMENT_BYTES = 1024 * 1024  # gloo's


def reduce_values(values: Sequence[torch.Tensor], op: str, order: str) -> torch.Tensor:
    """One tensor from each rank's, added up in a given order, in the tensors' own dtype.

    Args:
        values: The ranks' tensors, of one shape and dtype, in rank order.
        op: ``sum``, ``avg``, ``product``, ``max``, ``min``, ``band``, ``bor``, ``bxor``.
        order: ``rank``, ``ring`` or ``tree``.

    Example:
        >>> big = torch.tensor([2.0**24]), torch.tensor([-(2.0**24)])
        >>> one = torch.ones(1)
        >>> [
        ...     reduce_values([big[0], one, big[1], one], "sum", order).item()
        ...     for order in ("rank", "tree")
        ... ]
        [1.0, 1.0]
        >>> reduce_values([big[0], big[1], one, one], "sum", "rank").item()
        2.0
    """
    combine = _COMBINE.get(op.lower())
    if combine is None:
        raise UsageError(
            f"virtual ranks: reduction {op!r} is not known; there are "
            f"{', '.join(REDUCE_OPS)}."
        )
    flat = [value.reshape(-1) for value in values]
    match order:
        case "rank":
            total = reduce(combine, flat)
        case "tree":
            total = _tree(flat, combine)
        case "ring":
            total = _ring(flat, combine)
        case _:
            raise UsageError(
                f"virtual ranks: reduction order {order!r} is not known; there are "
                f"{', '.join(ORDERS)}."
            )
    # One rank alone must not get its own tensor back: an all-reduce makes a new one.
    total = total.clone() if len(values) == 1 else total
    if op.lower() == "avg":
        total.div_(len(values))
    return total.reshape(values[0].shape)


def _tree(values: list[torch.Tensor], combine: _Combine) -> torch.Tensor:
    """Neighbours first, then neighbouring pairs, and so on; an odd one waits a round."""
    while len(values) > 1:
        pairs = [
            combine(values[place], values[place + 1])
            for place in range(0, len(values) - 1, 2)
        ]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def _ring(values: list[torch.Tensor], combine: _Combine) -> torch.Tensor:
    """Chunk c starts at the rank before c, goes down the ring and ends at rank c."""
    size = len(values)
    chunks = ring_chunks(values[0].numel(), values[0].element_size(), size)
    pieces = []
    for chunk, (start, length) in enumerate(chunks):
        ranks = [(chunk - 1 - hop) % size for hop in range(size)]
        parts = [values[rank].narrow(0, start, length) for rank in ranks]
        pieces.append(reduce(lambda passed_on, own: combine(own, passed_on), parts))
    return torch.cat(pieces)


def ring_chunks(
    num_elements: int, element_size: int, size: int
) -> list[tuple[int, int]]:
    """Start and length of each rank's chunk of a flat buffer, in gloo's ring.

    A chunk is a whole number of segments, at least two, each of at most 1 MiB; so chunks
    are equal where the number of elements is a multiple of twice the number of ranks, and
    the last ones are shorter or empty elsewhere.

    >>> ring_chunks(16, 4, 4)
    [(0, 4), (4, 4), (8, 4), (12, 4)]
    >>> ring_chunks(12, 4, 4)
    [(0, 4), (4, 4), (8, 4), (12, 0)]
    """
    total = num_elements * element_size
    longest = element_size * max(1, _MAX_SEGMENT_BYTES // element_size)
    num_segments = max(_divide_up(total, longest), 2 * size)
    segments_each = _divide_up(num_segments, size)
    segment_bytes = _divide_up(total, segments_each * size)
    chunk = segments_each * _divide_up(segment_bytes, element_size)
    starts = [min(rank * chunk, num_elements) for rank in range(size)]
    return [(start, min(chunk, num_elements - start)) for start in starts]


def _divide_up(value: int, by: int) -> int:
    return -(-value // by)
