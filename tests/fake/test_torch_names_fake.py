"""Each private torch name that needs a process group; see test_torch_names.py."""

import gc
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn.parallel import DistributedDataParallel

from torchspmd import _torch
from torchspmd._torch import Landmark, NodeKind
from torchspmd.testing import fake_mesh

pytestmark = pytest.mark.fake


@pytest.fixture
def mesh():
    with fake_mesh((2, 4), ("dp", "tp")) as mesh:
        yield mesh


@pytest.fixture
def tp(mesh):
    return mesh["tp"]


@pytest.fixture
def group(tp):
    return tp.get_group().group_name


def _at_landmark(meaning, read, run):
    """What `read` finds in the local names of each call of a landmark's function."""
    found = []

    def profile(frame, event, argument):
        if event == "return" and _torch.landmark(frame.f_code) == meaning:
            found.append(read(frame.f_locals))

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    assert found
    return found


# Groups and meshes.


def test_resolve_group(tp):
    group = tp.get_group()
    for value in (group, group.group_name, group.boxed()):
        assert _torch.resolve_group(value) is group
    assert _torch.resolve_group(None) is None


def test_live_meshes(mesh, tp):
    assert any(found is mesh for found in _torch.live_meshes())
    assert any(found is tp for found in _torch.live_meshes())
    count = len(_torch.live_meshes())
    extra = mesh["dp"]
    assert len(_torch.live_meshes()) == count + 1
    del extra
    gc.collect()
    assert len(_torch.live_meshes()) <= count


def test_owned_axis(mesh, tp):
    group = mesh.get_group("tp")
    assert _torch.owned_axis(mesh, group) == "tp"
    assert _torch.owned_axis(tp, group) == "tp"
    assert _torch.owned_axis(mesh["dp"], group) is None
    assert _torch.owned_axis(mesh, dist.group.WORLD) is None


def test_root_ranks(mesh, tp):
    everyone = list(range(dist.get_world_size()))
    assert _torch.root_ranks(tp) == _torch.root_ranks(mesh) == everyone


def test_uses_gloo(tp, group):
    assert not _torch.uses_gloo(group, torch.device("cpu"))


def test_default_store(mesh):
    assert isinstance(_torch.default_store(), dist.Store)
    assert _torch.default_store() is _torch.default_store()


def test_ddp_on_fake_groups(mesh):
    with _torch.ddp_on_fake_groups():
        model = DistributedDataParallel(nn.Linear(4, 2))
        model(torch.ones(3, 4)).sum().backward()
    assert model.module.weight.grad.shape == (2, 4)


def test_current_mesh(mesh):
    assert _torch.current_mesh() is None
    with mesh:
        assert _torch.current_mesh() is mesh
    assert _torch.current_mesh() is None


# DTensor from the inside.


@pytest.fixture
def sharded(tp):
    return distribute_tensor(torch.arange(16.0).reshape(8, 2), tp, [Shard(0)])


def test_local_tensor(sharded):
    local = _torch.local_tensor(sharded)
    assert type(local) is torch.Tensor
    assert local is _torch.local_tensor(sharded)
    assert local.shape == (2, 2)


def test_spec(sharded, tp):
    found = _torch.spec(sharded)
    assert found.mesh == tp
    assert found.placements == (Shard(0),)
    assert found.shape == (8, 2)


def test_build_spec(sharded, tp):
    built = _torch.build_spec(tp, (Shard(0),), (8, 2), torch.float32)
    assert built == _torch.spec(sharded)
    empty = _torch.build_spec(tp, (Shard(0),), (3, 0, 2), torch.float32)
    assert empty.tensor_meta.stride == torch.empty(3, 0, 2).stride()


def test_strided_spec(tp):
    spec = _torch.strided_spec(tp, (Replicate(),), (8, 2), (1, 8), torch.int64)
    assert spec.tensor_meta == (torch.Size((8, 2)), (1, 8), torch.int64)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_wrap_local(sharded, requires_grad):
    local = torch.zeros(2, 2)
    wrapped = _torch.wrap_local(local, _torch.spec(sharded), requires_grad)
    assert isinstance(wrapped, DTensor)
    assert wrapped.requires_grad is requires_grad
    assert (wrapped.shape, wrapped.placements) == ((8, 2), (Shard(0),))
    assert torch.equal(wrapped.to_local(), local)


def test_dtensor_slots(tp, sharded):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].weight = nn.Parameter(sharded)
    model[1].running_mean = sharded
    slots = _torch.dtensor_slots(model)
    assert [name for name, _, _ in slots] == ["0.weight", "1.running_mean"]
    assert slots[0][1:] == (model[0]._parameters, "weight")
    assert _torch.dtensor_slots(model[0])[0][0] == "weight"
    assert _torch.dtensor_slots(nn.Linear(2, 2)) == []


def test_apply_torch_style(tp):
    style = ColwiseParallel()
    before = dict(vars(style))
    module = _torch.apply_torch_style(style, nn.Linear(4, 8), tp, None)
    assert module.weight.placements == (Shard(0),)
    assert dict(vars(style)) == before


# Collectives on plain tensors.


def test_start_all_reduce(group):
    tensor = torch.ones(3)
    started = _torch.start_all_reduce(tensor, "sum", group)
    assert _torch.wait(started).data_ptr() == tensor.data_ptr()


def test_start_all_gather(group):
    started = _torch.start_all_gather(torch.ones(2, 3), 4, group)
    assert _torch.wait(started).shape == (8, 3)


def test_start_reduce_scatter(group):
    started = _torch.start_reduce_scatter(torch.ones(8, 3), 4, group)
    assert _torch.wait(started).shape == (2, 3)


def test_start_all_to_all(group):
    send, receive = [1, 2, 3, 2], [4, 0, 1, 0]
    started = _torch.start_all_to_all(torch.ones(8, 3), receive, send, group)
    assert _torch.wait(started).shape == (5, 3)


def test_wait(group):
    tensor = torch.ones(3, requires_grad=True)
    done = _torch.wait(_torch.start_all_gather(tensor, 4, group))
    assert done.grad_fn is None  # below autograd: the caller gives its own backward
    assert type(done) is torch.Tensor


def test_finished(tp):
    running = functional.all_reduce(torch.ones(3), "sum", tp)
    assert type(running) is functional.AsyncCollectiveTensor
    done = _torch.finished(running)
    assert type(done) is torch.Tensor
    assert _torch.finished(done) is done


# What autograd communicates.


class _Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def _nodes(output):
    node = output.grad_fn
    while node is not None:
        yield node
        node = next((parent for parent, _ in node.next_functions), None)


_differentiable = torch.ops._c10d_functional_autograd


def _skip_where_opaque(group):
    started = _differentiable.all_gather_into_tensor(
        torch.ones(8, requires_grad=True), 4, group
    )
    names = [_torch.node_name(node) for node in _nodes(functional.wait_tensor(started))]
    if any("CppNode<" in name for name in names):
        pytest.skip("collectives with a backward do not tell their group in this torch")


def test_node_kind(tp, group):
    _skip_where_opaque(group)
    tensor = torch.ones(8, requires_grad=True)
    started = {
        NodeKind.MAKES_EQUAL: _differentiable.all_gather_into_tensor(tensor, 4, group),
        NodeKind.EXCHANGES: _differentiable.reduce_scatter_tensor(
            tensor, "sum", 4, group
        ),
        NodeKind.OPAQUE: _Custom.apply(tensor),
        NodeKind.LOCAL: tensor * 2,
    }
    for expected, output in started.items():
        nodes = list(_nodes(functional.wait_tensor(output)))
        assert {_torch.node_kind(node) for node in nodes} == {expected, NodeKind.LOCAL}


def test_node_group(tp, group):
    _skip_where_opaque(group)
    tensor = torch.ones(8, requires_grad=True)
    started = _differentiable.all_gather_into_tensor(tensor, 4, group)
    nodes = list(_nodes(functional.wait_tensor(started)))
    (node,) = [n for n in nodes if _torch.node_kind(n) is NodeKind.MAKES_EQUAL]
    assert _torch.node_group(node) is tp.get_group()


# What torch's frames hold.


def test_redistribution(sharded):
    found = _at_landmark(
        Landmark.REDISTRIBUTE,
        _torch.redistribution,
        lambda: sharded.redistribute(placements=[Replicate()]),
    )
    assert found == ["Shard(0) -> Replicate"]
    assert _torch.redistribution({}) is None


def test_implicit_redistribution(tp, sharded):
    other = distribute_tensor(torch.ones(8, 2), tp, [Shard(1)])
    found = _at_landmark(
        Landmark.DISPATCH,
        _torch.implicit_redistribution,
        lambda: torch.add(sharded, other),
    )
    operator, change = found[0]
    assert operator == "aten.add.Tensor"
    assert change in ("Shard(0) -> Shard(1)", "Shard(1) -> Shard(0)")


def test_fsdp_module(tp):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[1], mesh=tp)
    found = _at_landmark(
        Landmark.FSDP, _torch.fsdp_module, lambda: model(torch.ones(2, 4))
    )
    assert any(module is model[1] for module in found)
    assert all(module is None or module is model[1] for module in found)


def test_hooked_module():
    model = nn.Linear(4, 4)
    model.register_full_backward_hook(lambda module, grads, outputs: None)
    output = model(torch.ones(2, 4, requires_grad=True))
    found = _at_landmark(
        Landmark.MODULE_HOOK, _torch.hooked_module, lambda: output.sum().backward()
    )
    assert all(module is model for module in found)


def test_num_unwaited(tp, group):
    before = _torch.num_unwaited()
    started = functional.all_reduce(torch.ones(4), "sum", group)
    assert _torch.num_unwaited() == before + 1
    functional.wait_tensor(started)
    assert _torch.num_unwaited() == before


def test_node_name(tp, group):
    x = torch.ones(8, requires_grad=True)
    assert _torch.node_name((x * 2).grad_fn) == "MulBackward0"
    assert _torch.node_name(_Custom.apply(x).grad_fn) == "_CustomBackward"
