"""Layouts as users write them."""

from typing import Any

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from torchspmd.layout.placements import format_layout, positive_dims, shard_dim
from torchspmd.local.arguments import ArgumentSpec, Leaf, list_leaves, parameter_names
from torchspmd.local.specs import (
    SpecMismatchError,
    Written,
    find_written,
    is_layout,
    layout_problem,
    leftover_entries,
)

R, P, S0 = Replicate(), Partial(), Shard(0)


def test_what_is_a_layout() -> None:
    assert is_layout([R])
    assert is_layout((R, S0))
    for other in (None, [], (), "R", R, [[R]], [R, None]):
        assert not is_layout(other)


def test_the_first_layout_on_the_way_counts() -> None:
    spec = ({"k": [S0], "v": None}, [R])
    assert find_written(spec, (0, "k"), "s") == Written((S0,), "s[0]['k']", True)
    assert find_written(spec, (0, "v", 3), "s") == Written(None, "s[0]['v']")
    assert find_written(spec, (1, "deep"), "s") == Written((R,), "s[1]", False)
    with pytest.raises(SpecMismatchError, match=r"s\[0\] has no entry for 'q'"):
        find_written(spec, (0, "q"), "s")
    with pytest.raises(SpecMismatchError, match="s has 2 entries, none for number 2"):
        find_written(spec, (2,), "s")
    with pytest.raises(
        SpecMismatchError, match="a layout is a list with one placement"
    ):
        find_written((R, [R]), (0, "k"), "s")


def test_entries_that_nothing_used() -> None:
    spec = ({"k": [S0], "w": [R]}, [R])
    assert leftover_entries(spec, [(0, "k"), (1,)], "s") == [
        "s[0]['w'] = [Replicate()]: there is nothing at that place"
    ]
    assert leftover_entries([R], [], "s") != []
    assert leftover_entries(None, [], "s") == []


def test_layouts_that_cannot_be() -> None:
    assert layout_problem((R,), 1, 2) is None
    assert layout_problem((R,), 2, 2) == "[Replicate()] has 1 entry for 2 axes"
    assert (
        layout_problem((R, R), 1, 2)
        == "[Replicate(), Replicate()] has 2 entries for 1 axis"
    )
    assert layout_problem((Shard(-3),), 1, 2) is not None
    assert layout_problem((Shard(-2),), 1, 2) is None


def test_small_things() -> None:
    assert positive_dims((Shard(-1), R), 3) == (Shard(2), R)
    assert shard_dim(P) is None
    assert format_layout((P, Partial("max"))) == "[Partial(), Partial('max')]"


def leaves_of(*args: Any, **kwargs: Any) -> list[Leaf]:
    return list_leaves(args, kwargs, ("x", "y"))


def look_up(spec: Any, leaves: list[Leaf]) -> tuple[list[Any], list[str]]:
    found, problems = ArgumentSpec("s", spec, ("x", "y")).look_up(leaves)
    return [entry.layout for entry in found], [problem.text for problem in problems]


def test_names_of_leaves() -> None:
    names = [leaf.name for leaf in leaves_of({"a": 1}, 2, 3, mask=4)]
    assert names == ["args[0] 'x'['a']", "args[1] 'y'", "args[2]", "kwargs['mask']"]


def test_ways_to_write_arguments() -> None:
    leaves = leaves_of({"a": 1, "b": 2}, 3)
    assert look_up(None, leaves) == ([None] * 3, [])
    assert look_up([R], leaves) == ([(R,)] * 3, [])
    assert look_up(([R], [S0]), leaves) == ([(R,), (R,), (S0,)], [])
    assert look_up(({"a": [R], "b": None}, [S0]), leaves) == ([(R,), None, (S0,)], [])
    assert look_up(([R], [S0], None), leaves) == ([(R,), (S0,), None], [])  # by leaf
    assert look_up({"y": [S0]}, leaves) == ([None, None, (S0,)], [])
    # Parameters that a call leaves out keep their entry.
    assert look_up(([R], [S0]), leaves_of(1)) == ([(R,)], [])
    assert look_up(([R], [S0]), leaves_of(1, y=2)) == ([(R,), (S0,)], [])
    assert look_up({"z": [R]}, leaves)[1] != []
    assert look_up(([R],), leaves)[1] == ["s has 1 entry for 2 arguments (3 leaves)"]


def test_functions_without_a_signature() -> None:
    assert parameter_names(max) == ()
    assert parameter_names(lambda a, /, b, *c, d: 0) == ("a", "b")
