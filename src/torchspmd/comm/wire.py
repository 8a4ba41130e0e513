"""Bytes on the wire, per rank, in the ring convention.

``wire_bytes`` is what one rank sends, averaged over the group, so that the sum over all
ranks is the traffic that crossed the network. With S payload bytes and n ranks:

| kind                                    | one rank sends       |
|-----------------------------------------|----------------------|
| all_reduce                              | 2 (n-1)/n S          |
| all_gather, reduce_scatter, all_to_all  | (n-1)/n S            |
| broadcast, reduce                       | (n-1)/n S            |
| gather, scatter                         | (n-1)/n S/n          |
| send                                    | S (its recv sends 0) |
| send_recv (a batch)                     | what it sends        |
| barrier, unknown                        | 0                    |

S is the whole logical buffer: the output of an all-gather, the input of a
reduce-scatter or all-to-all. Fractions of a byte are rounded up.
"""

from torchspmd.comm.kinds import Kind

_ROUNDS = {
    Kind.ALL_REDUCE: 2,
    Kind.ALL_GATHER: 1,
    Kind.REDUCE_SCATTER: 1,
    Kind.ALL_TO_ALL: 1,
    Kind.BROADCAST: 1,
    Kind.REDUCE: 1,
}


def wire_bytes(kind: Kind, payload_bytes: int, group_size: int) -> int:
    """What one rank of the group sends for one communication.

    >>> wire_bytes(Kind.ALL_REDUCE, payload_bytes=1024, group_size=4)
    1536
    >>> wire_bytes(Kind.ALL_GATHER, payload_bytes=1024, group_size=4)
    768
    """
    if kind is Kind.SEND:
        return payload_bytes
    if group_size < 2:
        return 0
    others = group_size - 1
    if kind in (Kind.GATHER, Kind.SCATTER):
        return _ceil_div(others * payload_bytes, group_size * group_size)
    return _ceil_div(_ROUNDS.get(kind, 0) * others * payload_bytes, group_size)


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
