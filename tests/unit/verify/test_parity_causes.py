"""Each pattern of a difference, and the cause that is read from it."""

import dataclasses

import pytest
import torch

from torchspmd.verify.parity.causes import Evidence, find_cause
from torchspmd.verify.parity.match import measure
from torchspmd.verify.recording.files import Kind
from torchspmd.verify.recording.layouts import Grid, cut

TP = Grid(("tp",), (4,), (0, 1, 2, 3))
BOTH = Grid(("dp", "tp"), (2, 2), (0, 1, 2, 3))


def value(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.1


def cause(found, reference, layout=("R",), grid=TP, **facts):
    allowed = torch.tensor(1e-6, dtype=torch.float64)
    match = measure(found, reference, allowed, grid, layout)
    assert not match.agrees
    facts = {"kind": Kind.FORWARD, "data_axes": (), "closeness": 1e-5, **facts}
    evidence = Evidence(
        **dataclasses.asdict(match), reference=reference, grid=grid, **facts
    )
    return find_cause(evidence)


WHOLE = value(8, 6)
TERMS = [value(8, 6, seed=seed) for seed in range(1, 5)]
TOTAL = torch.stack(TERMS).sum(0)


def test_missing_sum():
    found = cause(TERMS, TOTAL)
    assert found.code == "missing-reduction"
    assert found.text == (
        "each rank holds a partial value, and their sum over 'tp' is right: a reduction "
        "(sum) over 'tp' is missing"
    )


def test_missing_sum_beside_a_bias():
    bias = value(6, seed=9)
    found = cause([term + bias for term in TERMS], TOTAL + bias)
    assert found.code == "missing-reduction"


def test_missing_average_over_the_axis_that_lacks_it():
    first, second = TERMS[:2]
    found = cause(
        [first, first, second, second], (first + second) / 2, ("R", "R"), BOTH
    )
    assert found.code == "missing-average"
    assert "over 'dp' is missing" in found.text


@pytest.mark.parametrize(
    ("factor", "code", "words"),
    [
        (4.0, "doubled-reduction", "4 times too large, the size of 'tp'"),
        (0.25, "divided", "4 times too small, the size of 'tp'"),
        (1.5, "factor", "a constant factor of 1.5"),
        (-1.0, "factor", "a constant factor of -1"),
    ],
)
def test_constant_factor(factor, code, words):
    found = cause([WHOLE * factor] * 4, WHOLE)
    assert found.code == code
    assert words in found.text


def test_factor_of_the_whole_mesh():
    found = cause([WHOLE * 4] * 4, WHOLE, ("R", "R"), BOTH)
    assert "the size of 'dp' and 'tp'" in found.text


def test_factor_that_differs_by_rank():
    found = cause([WHOLE * (1 + rank) for rank in range(4)], WHOLE)
    assert found.code == "factor-by-rank"


def test_swapped_shards():
    shards = [cut(WHOLE, TP, ("S(0)",), rank) for rank in (1, 0, 2, 3)]
    found = cause(shards, WHOLE, ("S(0)",))
    assert found.code == "swapped-shards"
    assert "rank 0 holds the part of rank 1" in found.text


def test_gathered_in_another_order():
    turned = torch.cat(WHOLE.chunk(4)[::-1])
    found = cause([turned] * 4, WHOLE)
    assert found.code == "permuted"
    assert "the 4 blocks along dim 0" in found.text


def test_wrong_dim():
    square = value(8, 8)
    rows = [part.T for part in square.chunk(4, 0)]
    found = cause(rows, square, ("S(1)",))
    assert found.code == "wrong-dim"
    assert "cut on dim 0 over 'tp'" in found.text


def test_bias_added_by_every_rank():
    found = cause([WHOLE + 3 * value(6, seed=9)] * 4, WHOLE)
    assert found.code == "offset"
    assert "a bias that is added more than once" in found.text


def test_stale_activation_and_lost_update():
    old = value(8, 6, seed=5)
    assert cause([old] * 4, WHOLE, before=old).text.endswith("stale weights")
    found = cause([old] * 4, WHOLE, before=old, kind=Kind.PARAMETER)
    assert found.text.endswith("the update is lost")


def test_update_of_another_size():
    old = value(8, 6, seed=5)
    new = old + 2 * (WHOLE - old)
    found = cause([new] * 4, WHOLE, before=old, kind=Kind.PARAMETER)
    assert found.code == "update-factor"
    assert "2 times as large" in found.text


def test_dropout_mask():
    mask = torch.rand(4, 8, 6, generator=torch.Generator().manual_seed(1)) > 0.3
    found = cause([WHOLE * mask[rank] for rank in range(4)], WHOLE * mask[0])
    assert found.code == "random-mask"


def test_one_rank_alone():
    shards = [cut(WHOLE, TP, ("S(0)",), rank).clone() for rank in range(4)]
    shards[3][0] += 0.5
    found = cause(shards, WHOLE, ("S(0)",))
    assert found.code == "some-ranks"
    assert "only rank 3 of 4 differ" in found.text


def test_zeros_and_values_that_are_not_finite():
    assert cause([WHOLE * 0] * 4, WHOLE).code == "zero"
    assert cause([WHOLE / 0] * 4, WHOLE).code == "not-finite"


def test_low_precision():
    assert cause([WHOLE.bfloat16().float()] * 4, WHOLE).code == "precision"


def test_a_few_places():
    spoiled = WHOLE.clone()
    spoiled[::4] = value(2, 6, seed=7)
    found = cause([spoiled] * 4, WHOLE)
    assert found.code == "some-places"
    assert "25 % of the elements" in found.text


def test_statistics_of_local_rows():
    shards = [value(4, 6, seed=rank) for rank in (7, 7, 8, 8)]
    found = cause(shards, WHOLE, ("S(0)", "R"), BOTH, data_axes=("dp",))
    assert found.code == "local-rows"


def test_ranks_that_differ_without_a_pattern():
    assert cause(TERMS, WHOLE).code == "ranks-differ"


def test_no_pattern():
    found = cause([TERMS[0]] * 4, WHOLE)
    assert (found.code, found.text) == (
        "unknown",
        "no known pattern; the ranks agree with each other",
    )
