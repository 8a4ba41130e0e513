"""Cutting and joining by DTensor's rules, without a process group."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchspmd.verify.parity.match import find_match, possible_layouts
from torchspmd.verify.recording.layouts import Grid, cut, describe_layout, join, sketch

pytestmark = pytest.mark.unit

GRID = Grid(("dp", "tp"), (2, 2), (0, 1, 2, 3))
PLACEMENTS = ("R", "S(0)", "S(1)", "_S(0, 2)", "_S(1, 3)")


def parts(whole, grid, layout):
    return {rank: cut(whole, grid, layout, rank) for rank in grid.ranks}


@st.composite
def laid_out(draw):
    shape = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    layout = tuple(draw(st.sampled_from(PLACEMENTS)) for _ in sizes)
    ranks = tuple(range(sizes[0] * (sizes[1] if len(sizes) > 1 else 1)))
    grid = Grid(("a", "b")[: len(sizes)], tuple(sizes), ranks)
    return torch.randn(shape, dtype=torch.float64), grid, layout


@settings(max_examples=150, deadline=None)
@given(laid_out())
def test_joining_the_parts_gives_the_whole(case):
    whole, grid, layout = case
    joined = join(parts(whole, grid, layout), grid, layout, tuple(whole.shape))
    assert joined is not None
    for rank in grid.ranks:
        assert torch.equal(joined[rank], whole)


@settings(max_examples=50, deadline=None)
@given(laid_out())
def test_sketches_of_parts_add_up_to_that_of_the_whole(case):
    whole, grid, layout = case
    found = [
        sketch(part, tuple(whole.shape), grid, layout, rank)
        for rank, part in parts(whole, grid, layout).items()
    ]
    copies = 1
    for size, text in zip(grid.shape, layout, strict=True):
        copies *= size if text == "R" else 1
    torch.testing.assert_close(
        torch.stack(found).sum(0) / copies, sketch(whole, tuple(whole.shape))
    )


def test_the_norm_of_a_sketch_is_close_to_that_of_the_tensor():
    value = torch.randn(300, 100, generator=torch.Generator().manual_seed(0))
    assert sketch(value, (300, 100)).norm().item() == pytest.approx(
        value.norm().item(), rel=0.05
    )


def test_terms_of_a_sum_are_added():
    whole = torch.arange(4.0)
    terms = {0: whole * 0.25, 1: whole * 0.75}
    grid = Grid(("tp",), (2,), (0, 1))
    for text, factor in (("P(sum)", 1.0), ("P(avg)", 0.5)):
        joined = join(terms, grid, (text,), (4,))
        assert torch.equal(joined[0], whole * factor)
    assert join(terms, grid, ("P(max)",), (4,)) is None


def test_replicas_that_differ_stay_different():
    grid = Grid(("tp",), (2,), (0, 1))
    joined = join({0: torch.zeros(2), 1: torch.ones(2)}, grid, ("R",), (2,))
    assert joined[0].sum() == 0
    assert joined[1].sum() == 2


def test_parts_of_the_wrong_shape_make_no_whole():
    grid = Grid(("tp",), (2,), (0, 1))
    halves = {0: torch.zeros(2), 1: torch.zeros(2)}
    assert join(halves, grid, ("S(0)",), (5,)) is None


def test_layouts_are_told_from_shapes():
    shapes = ((2, 3),) * 4
    assert possible_layouts(shapes, (4, 6), GRID)[:2] == (
        ("S(0)", "S(1)"),
        ("S(1)", "S(0)"),
    )
    assert possible_layouts(shapes, (2, 3), GRID) == (("R", "R"),)
    assert possible_layouts(shapes, (7, 3), GRID) == ()
    assert possible_layouts(shapes, (2, 3, 1), GRID) == ()


def test_of_two_possible_layouts_the_right_one_is_taken():
    whole = torch.randn(4, 6)
    layout = ("S(1)", "S(0)")
    values = [cut(whole, GRID, layout, rank) for rank in range(4)]
    match = find_match(values, whole, torch.tensor(1e-6), GRID)
    assert match is not None and match.agrees
    assert match.layout == layout
    assert describe_layout(GRID, layout) == "dp: Shard(1), tp: Shard(0)"


def test_fused_features_lie_in_blocks():
    whole = torch.randn(2, 12)
    grid = Grid(("tp",), (2,), (0, 1))
    values = [cut(whole, grid, ("_S(1, 3)",), rank) for rank in range(2)]
    match = find_match(values, whole, torch.tensor(0.0), grid)
    assert match is not None and match.agrees
    assert describe_layout(grid, match.layout) == "tp: Shard(1) in 3 blocks"
