"""From a process group to its ranks and the mesh axis that owns it."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from torchspmd import CommDebugMode
from torchspmd.comm import Group, Topology, describe_group
from torchspmd.testing import fake_mesh, fake_world


@pytest.fixture(autouse=True)
def _no_meshes_of_other_tests():
    gc.collect()


def _axes(mesh):
    return [describe_group(group).axis for group in mesh.get_all_groups()]


def test_one_axis_is_the_world(tp4):
    group = describe_group(tp4.get_group())
    assert (group.ranks, group.axis) == ((0, 1, 2, 3), "tp")
    assert describe_group(dist.group.WORLD) == group


@pytest.mark.parametrize(
    ("rank", "dp", "tp"), [(0, (0, 4), (0, 1, 2, 3)), (6, (2, 6), (4, 5, 6, 7))]
)
def test_two_axes(rank, dp, tp):
    with fake_mesh((2, 4), ("dp", "tp"), rank=rank) as mesh:
        groups = [describe_group(group) for group in mesh.get_all_groups()]
        assert [(g.ranks, g.axis) for g in groups] == [(dp, "dp"), (tp, "tp")]
        assert describe_group(dist.group.WORLD).axis is None
        assert describe_group(dist.group.WORLD).label == "ranks 0-7"


def test_a_sliced_mesh_has_the_axes_of_its_parent(dp2_tp4):
    assert _axes(dp2_tp4["tp"]) == ["tp"]
    assert _axes(dp2_tp4["dp", "tp"]) == ["dp", "tp"]


def test_a_flattened_axis_has_its_own_name():
    with fake_mesh((2, 2, 2), ("pp", "dp", "tp")) as mesh:
        flat = mesh["dp", "tp"]._flatten("dp_tp")
        group = describe_group(flat.get_group())
        assert (group.ranks, group.axis) == ((0, 1, 2, 3), "dp_tp")
        assert _axes(mesh) == ["pp", "dp", "tp"]


def test_an_unnamed_mesh_shows_ranks():
    with fake_mesh((2, 4)) as mesh:
        groups = [describe_group(group) for group in mesh.get_all_groups()]
        assert [g.axis for g in groups] == [None, None]
        assert [g.label for g in groups] == ["ranks 0,4", "ranks 0-3"]


def test_a_group_without_a_mesh_shows_ranks(dp2_tp4):
    group = describe_group(dist.new_group([0, 2, 4, 6]))
    assert (group.axis, group.label) == (None, "ranks 0-6 step 2")
    assert _axes(dp2_tp4) == ["dp", "tp"]


def test_a_mesh_made_from_groups_names_them():
    with fake_world(4):
        group = dist.new_group([0, 2])
        mesh = DeviceMesh.from_group(
            group, "cpu", mesh=torch.tensor([0, 2]), mesh_dim_names=("pair",)
        )
        assert _axes(mesh) == ["pair"]


def test_two_meshes_that_name_one_group_show_both_names():
    with fake_world(4):
        one = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        other = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
        assert one.get_group().group_name == other.get_group().group_name
        assert _axes(one) == ["ep|tp"]


def test_a_name_is_forgotten_with_its_mesh():
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        assert _axes(mesh) == ["tp"]
        del mesh
        gc.collect()
        assert describe_group(dist.group.WORLD).axis is None


@pytest.mark.parametrize(
    ("shape", "names"), [((4, 2), ("a", "b")), ((2, 4), ("a", "b")), ((8,), ("a",))]
)
@pytest.mark.parametrize("asked_before", [False, True])
def test_a_mesh_of_an_old_world_names_nothing_in_a_new_one(shape, names, asked_before):
    with fake_mesh((2, 4), ("dp", "tp")) as old:
        if asked_before:
            assert _axes(old) == ["dp", "tp"]
    with fake_mesh(shape, names) as mesh:
        assert _axes(mesh) == list(names)
        assert old.mesh_dim_names == ("dp", "tp")  # still alive


def test_an_old_mesh_does_not_name_a_new_world_without_meshes():
    with fake_mesh(4, ("tp",)) as old:
        pass
    with fake_world(8):
        assert describe_group(dist.group.WORLD).axis is None
        assert describe_group(dist.new_group([0, 5])).axis is None
    assert old.size() == 4


def test_topology_reads_names_boxes_and_groups(dp2_tp4):
    group = dp2_tp4.get_group("tp")
    expected = Group(group.group_name, (0, 1, 2, 3), "tp")
    topology = Topology()
    assert topology.group_of({"group_name": group.group_name}) == expected
    assert topology.group_of({"group_name": group}) == expected
    assert topology.group_of({"process_group": group.boxed()}) == expected


def test_topology_resolves_each_group_once(dp2_tp4):
    group = dp2_tp4.get_group("dp")
    topology = Topology()
    first = topology.group_of({"group_name": group.group_name})
    assert topology.group_of({"group_name": group.group_name}) is first
    assert topology.group_of({"process_group": group.boxed()}) is first


@pytest.mark.parametrize("arguments", [{}, {"tensor": 3}, {"process_group": None}])
def test_no_group_is_nobody(arguments):
    group = Topology().group_of(arguments)
    assert group == Group(name="", ranks=())


def test_a_legacy_operator_names_its_group_by_tag_and_ranks(dp2_tp4):
    arguments = {"tag": "", "ranks": [0, 1, 2, 3], "group_size": 4}
    assert Topology().group_of(arguments).axis == "tp"


@pytest.fixture
def frozen():
    """Freezes what is there when it is called: the garbage collector forgets all of it."""
    yield gc.freeze
    gc.unfreeze()


def test_a_frozen_mesh_of_two_axes_names_its_groups(frozen):
    with fake_mesh((2, 4), ("dp", "tp")) as mesh:
        frozen()
        assert _axes(mesh) == ["dp", "tp"]


@pytest.mark.parametrize("shards", ("parameters", "activations"))
def test_a_frozen_mesh_on_the_group_of_all_ranks_is_named(frozen, shards):
    with fake_mesh(4, ("x",)) as mesh:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        if shards == "parameters":
            fully_shard(model, mesh=mesh)
        else:
            parallelize_module(
                model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()}
            )
        del mesh
        frozen()
        with CommDebugMode() as mode:
            model(torch.ones(2, 8)).sum().backward()
        assert {event.group.axis for event in mode.ledger.events} == {"x"}
