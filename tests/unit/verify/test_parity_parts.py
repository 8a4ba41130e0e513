"""Parameters that parallel layers keep in parts, cut along any dimension."""

import pytest
import torch

from torchspmd.verify.parity.wholes import find_parts, join_parts
from torchspmd.verify.recording.files import Key, Kind, Piece


def held(kind, values):
    return {
        Key(kind, name): Piece(value, tuple(value.shape), "float32")
        for name, value in values.items()
    }


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_the_dimension_of_the_cut_is_read_from_the_values(dim):
    whole = torch.arange(4 * 4 * 6.0).view(4, 4, 6)
    first, second = whole.split([3, whole.shape[dim] - 3], dim)
    rank = held(Kind.PARAMETER, {"up.w_parts.0": first, "up.w_parts.1": second})
    parts = find_parts({Key(Kind.PARAMETER, "up.w"): whole}, [rank])
    assert parts == {"up.w": (dim, ("up.w_parts.0", "up.w_parts.1"))}
    for kind, rest in ((Kind.GRADIENT, ""), (Kind.STATE, ".exp_avg")):
        names = [f"up.w_parts.{place}{rest}" for place in (0, 1)]
        values = held(kind, dict(zip(names, (2 * first, 2 * second), strict=True)))
        (joined,) = join_parts(Key(kind, f"up.w{rest}"), parts, [values])
        assert torch.equal(joined, 2 * whole)


def test_other_values_are_no_parts():
    whole = torch.arange(12.0).view(3, 4)
    rank = held(Kind.PARAMETER, {"up.w_parts.0": whole[:2], "up.w_parts.1": whole[:1]})
    assert not find_parts({Key(Kind.PARAMETER, "up.w"): whole}, [rank])
