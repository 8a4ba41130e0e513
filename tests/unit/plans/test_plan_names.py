"""Matching, folding, and what a mesh description becomes."""

import pytest
from plan_models import GPT

from torchspmd.parallel.axis import describe_mesh_axis
from torchspmd.parallel.plan.names import fold, fold_texts, match, module_tree


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("", [""]),
        ("head", ["head"]),
        ("layers.*.mlp.up", ["layers.0.mlp.up", "layers.1.mlp.up"]),
        ("layers.1.*.[qk]", ["layers.1.attention.q", "layers.1.attention.k"]),
        ("layers.?.norm", ["layers.0.norm", "layers.1.norm"]),
        ("*", ["embed", "layers", "head"]),
        ("layers*up", []),  # a star stays within one part of a path
    ],
)
def test_each_part_of_a_pattern_stands_for_one_part_of_a_path(pattern, paths):
    assert match(module_tree(GPT()), pattern) == paths


@pytest.mark.parametrize(
    ("paths", "folded"),
    [
        ([f"l.{i}.w" for i in range(32)], ["l.[0-31].w"]),
        (["l.0.w", "l.2.w", "l.3.w"], ["l.[0,2-3].w"]),
        ([f"l.{i}.e.{j}" for i in (0, 1) for j in (0, 1)], ["l.[0-1].e.[0-1]"]),
        # Not every combination is there, so ranges would claim too much.
        (["l.0.e.0", "l.1.e.1"], ["l.0.e.0", "l.1.e.1"]),
        (["fc1", "fc2"], ["fc1", "fc2"]),
    ],
)
def test_layers_fold_only_when_the_range_is_true(paths, folded):
    assert fold(paths) == folded


def test_texts_fold_over_all_paths_in_them():
    texts = [f"'l.{i}.a' feeds 'l.{i}.b', 2 heads" for i in range(3)]
    assert fold_texts([*texts, "'x' is odd"]) == [
        "'l.[0-2].a' feeds 'l.[0-2].b', 2 heads",
        "'x' is odd",
    ]


def test_what_is_said_of_several_paths_is_said_once():
    texts = [f"'l.{i}.{name}': 2 heads" for name in "qk" for i in range(2)]
    assert fold_texts([*texts, "'o': 3 heads", "'a' is odd", "'b' is odd", "odd"]) == [
        "'l.[0-1].q', 'l.[0-1].k' each: 2 heads",
        "'o': 3 heads",
        "'a' is odd",
        "'b' is odd",
        "odd",
    ]


def test_a_mesh_is_described_by_numbers():
    mesh = describe_mesh_axis({"dp": 128, "tp": 8})
    assert (mesh.axis, mesh.size, mesh.num_ranks) == ("tp", 8, 1024)
    assert describe_mesh_axis({"dp": 128, "tp": 8}, "dp").size == 128
    assert describe_mesh_axis({"model": 3}).axis == "model"
