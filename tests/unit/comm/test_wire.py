"""Wire bytes against closed formulas, written down a second time here."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchspmd.comm.kinds import Kind
from torchspmd.comm.measure import wire_bytes

# All bytes that cross the network, over all ranks, for S payload bytes and n ranks.
_TRAFFIC = {
    Kind.ALL_REDUCE: lambda s, n: 2 * (n - 1) * s,
    Kind.ALL_GATHER: lambda s, n: (n - 1) * s,
    Kind.REDUCE_SCATTER: lambda s, n: (n - 1) * s,
    Kind.ALL_TO_ALL: lambda s, n: (n - 1) * s,
    Kind.BROADCAST: lambda s, n: (n - 1) * s,
    Kind.REDUCE: lambda s, n: (n - 1) * s,
    Kind.GATHER: lambda s, n: Fraction((n - 1) * s, n),
    Kind.SCATTER: lambda s, n: Fraction((n - 1) * s, n),
    Kind.RECV: lambda s, n: 0,
    Kind.BARRIER: lambda s, n: 0,
    Kind.UNKNOWN: lambda s, n: 0,
}
_COLLECTIVES = sorted(_TRAFFIC)


def test_every_kind_has_a_formula():
    # A send sends all it is given; a batch is measured from its sending half.
    assert set(_TRAFFIC) | {Kind.SEND, Kind.SEND_RECV} == set(Kind)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Kind.ALL_REDUCE, 1536),
        (Kind.ALL_GATHER, 768),
        (Kind.REDUCE_SCATTER, 768),
        (Kind.ALL_TO_ALL, 768),
        (Kind.BROADCAST, 768),
        (Kind.REDUCE, 768),
        (Kind.GATHER, 192),
        (Kind.SCATTER, 192),
        (Kind.SEND, 1024),
        (Kind.RECV, 0),
        (Kind.BARRIER, 0),
        (Kind.UNKNOWN, 0),
    ],
)
def test_one_kilobyte_on_four_ranks(kind, expected):
    assert wire_bytes(kind, payload_bytes=1024, group_size=4) == expected


@pytest.mark.parametrize("kind", sorted(set(Kind) - {Kind.SEND}))
@pytest.mark.parametrize("size", [0, 1])
def test_alone_or_in_an_unknown_group_nothing_is_sent(kind, size):
    assert wire_bytes(kind, 1024, size) == 0


@pytest.mark.parametrize("size", [0, 1, 2, 7])
def test_send_does_not_depend_on_the_group(size):
    assert wire_bytes(Kind.SEND, 1000, size) == 1000


@pytest.mark.parametrize("kind", _COLLECTIVES)
@given(payload=st.integers(0, 2**60), size=st.integers(2, 4096))
def test_wire_is_the_share_of_the_traffic_rounded_up(kind, payload, size):
    """No other whole number is within these bounds."""
    traffic, wire = _TRAFFIC[kind](payload, size), wire_bytes(kind, payload, size)
    assert isinstance(wire, int)
    assert traffic <= size * wire < traffic + size
