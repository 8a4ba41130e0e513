"""Each private torch name that needs a process group; see test_torch_names.py."""

import gc
import sys

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch._dynamo.source import ConstantSource
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.nn.parallel import DistributedDataParallel

from torchspmd import _torch
from torchspmd._torch import Landmark, NodeKind
from torchspmd.testing import fake_mesh


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


def test_described_axis(mesh):
    assert _torch.described_axis(mesh.get_group("tp")) == "tp"
    assert _torch.described_axis(dist.group.WORLD) is None
    for text in ("mesh_default", "mesh_dim_0", "", "a mesh_tp"):
        group = dist.new_group([0], group_desc=text)
        assert _torch.described_axis(group) is None


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


def test_gathers_of_any_shape(mesh):
    size = dist.get_world_size()
    names = [n for n in _GATHERS if hasattr(dist.ProcessGroup, n)]
    assert names
    for name in names:
        gathered = torch.zeros(1, 2 * size)  # as SyncBatchNorm has it
        with _torch.gathers_of_any_shape():
            getattr(dist.group.WORLD, name)(gathered, torch.ones(2)).wait()
        assert gathered.min() == 1


_GATHERS = ("_allgather_base", "all_gather_single")


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


def test_gather_now(group):
    assert _torch.gather_now(torch.ones(2, 3), 4, group).shape == (8, 3)


def test_start_reduce_scatter(group):
    started = _torch.start_reduce_scatter(torch.ones(8, 3), 4, group)
    assert _torch.wait(started).shape == (2, 3)


def test_start_all_to_all(group):
    send, receive = [1, 2, 3, 2], [4, 0, 1, 0]
    started = _torch.start_all_to_all(torch.ones(8, 3), receive, send, group)
    assert _torch.wait(started).shape == (5, 3)


def test_wait(group):
    tensor = torch.ones(4, requires_grad=True)
    done = _torch.wait(_torch.start_reduce_scatter(tensor, 4, group))
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


# ----------------------------------------------------------------------------
# Private torch names about tensors on two axes; see test_torch_names.py.


def test_sister_axis():
    with fake_mesh((2, 2, 2), ("pp", "dp", "tp"), rank=5) as mesh:
        dp, tp = mesh["dp"], mesh["tp"]
        assert _torch.sister_axis(dp, tp) == tp
        assert _torch.sister_axis(dp, dp) is None
        assert _torch.sister_axis(dp, mesh["dp", "tp"]["tp"]) == tp
    with fake_mesh(4, ("all",)) as other:
        assert _torch.sister_axis(other, tp) is None


def test_join_axes():
    with fake_mesh((2, 2, 2), ("pp", "dp", "tp"), rank=5) as mesh:
        joined = _torch.join_axes(mesh["dp"], mesh["tp"])
        assert joined == mesh["dp", "tp"]
        assert joined.get_coordinate() == (0, 1)
        assert joined.get_group("tp") is mesh.get_group("tp")


def test_flatten_mesh():
    with fake_mesh((2, 2), ("replicate", "shard"), rank=3) as mesh:
        flat = _torch.flatten_mesh(mesh)
        assert (flat.ndim, flat.size(), flat.get_local_rank()) == (1, 4, 3)
        assert _torch.flatten_mesh(flat) is flat
        assert _torch.root_ranks(flat) == [0, 1, 2, 3]


def test_strided_shard():
    with fake_mesh((2, 2), ("dp", "tp"), rank=1) as mesh:
        placements = [_torch.strided_shard(0, 2), Shard(0)]
        rows = distribute_tensor(torch.arange(8), mesh, placements, src_data_rank=None)
        # The second half belongs to tp rank 1, and the first half of that to dp rank 0.
        assert rows.to_local().tolist() == [4, 5]


def test_free_shard():
    with fake_mesh(2, ("dp",)) as mesh:
        tensor = DTensor.from_local(torch.ones(4, 3), mesh, [Shard(0)])
        _torch.free_shard(tensor)
        assert tensor.to_local().numel() == 0


# ----------------------------------------------------------------------------
# Private torch names that the ledger needs; see tests/unit/test_torch_names.py.


def test_find_group():
    with fake_mesh((2, 4), ("dp", "tp")) as mesh:
        assert _torch.find_group("", [0, 1, 2, 3]) is mesh.get_group("tp")
        assert _torch.find_group("", list(range(8))) is dist.group.WORLD
        assert _torch.find_group("", [0, 7]) is None


def test_size_hint():
    shape_env = ShapeEnv()
    symbol = shape_env.create_symbol(
        7, source=ConstantSource("s"), dynamic_dim=DimDynamic.DYNAMIC
    )
    size = shape_env.create_symintnode(symbol, hint=7)
    assert isinstance(size, torch.SymInt)
    assert _torch.size_hint(size * 3) == 21
    assert type(_torch.size_hint(size)) is int
    assert not shape_env.guards
    assert _torch.size_hint(5) == 5


# ----------------------------------------------------------------------------
# Private torch names that compiled steps need; see tests/unit/test_torch_names.py.


def test_fake_world():
    world = _torch.FakeWorld()
    fake = world.fake(torch.ones(2, 3, requires_grad=True))
    assert fake.shape == (2, 3)
    assert not fake.requires_grad
    assert _torch.is_fake(fake)
    number = world.number("lr", 0.5)
    assert isinstance(number, torch.SymFloat)
    assert isinstance(world.number("step", 3), torch.SymInt)
    scalar, vector = world.fake(torch.ones(())), world.fake(torch.ones(3))
    with world.mode:
        with pytest.raises(_torch.data_dependence_errors()):
            scalar.item()
        with world.reading_values():
            assert isinstance(scalar.item(), torch.SymFloat)
        with pytest.raises(_torch.data_dependence_errors()):
            vector.nonzero()


def test_number_hint():
    world = _torch.FakeWorld()
    assert _torch.number_hint(world.number("lr", 0.5)) == 0.5
    assert _torch.number_hint(world.number("step", 3)) == 3
    assert world.assumptions() == ()
    assert _torch.number_hint(0.25) == 0.25


def test_symbol_of():
    world = _torch.FakeWorld()
    number = world.number("lr", 0.5)
    assert number != 0  # an assumption
    (assumption,) = world.assumptions()
    assert assumption.free_symbols == {_torch.symbol_of(number)}
    assert _torch.symbol_of(torch.ones(())) is None


def test_holds():
    world = _torch.FakeWorld()
    number = world.number("lr", 0.5)
    assert bool(number > 0.1)
    (assumption,) = world.assumptions()
    symbol = _torch.symbol_of(number)
    assert _torch.holds(assumption, {symbol: 0.2})
    assert not _torch.holds(assumption, {symbol: 0.05})
    assert _torch.holds(assumption, {})


def traced(function, *inputs):
    world = _torch.FakeWorld()
    fakes = [world.fake(each) for each in inputs]
    with world.mode:
        return _torch.trace(function, fakes)


def names(graph):
    return [node.name for node in graph.graph.nodes if node.op == "call_function"]


def test_trace():
    assert names(traced(lambda x: x.sin().cos(), torch.ones(2))) == ["sin", "cos"]

    def counts():
        counter = torch.ones(())
        counter *= 2  # a constant, but not to be computed now
        return counter

    assert "mul_" in "".join(names(traced(counts)))
    norm = torch.nn.BatchNorm1d(3)
    graph = traced(
        lambda x, m, v: torch.native_batch_norm(x, None, None, m, v, True, 0.1, 1e-5)[
            0
        ],
        torch.ones(4, 3),
        norm.running_mean,
        norm.running_var,
    )
    assert "_native_batch_norm_legit" in names(graph)


def test_functional():
    def writes(x):
        y = x.clone()
        y.add_(1)
        return y

    assert names(traced(_torch.functional(writes), torch.ones(2))) == ["clone", "add"]


def test_current_graph():
    assert _torch.current_graph() is None
    seen = []
    traced(lambda x: seen.append(_torch.current_graph()) or x, torch.ones(2))
    assert isinstance(seen[0], fx.Graph)


def test_data_dependence_errors():
    assert all(issubclass(each, Exception) for each in _torch.data_dependence_errors())


def test_copy_all():
    targets = [torch.zeros(2), torch.zeros(3, dtype=torch.float64)]
    _torch.copy_all(targets, [torch.ones(2), torch.ones(3, dtype=torch.float64)])
    assert all(bool((each == 1).all()) for each in targets)


def test_compile_with_inductor():
    graph = traced(lambda x: [x.sin() + 1], torch.ones(2))
    run, told = _torch.compile_with_inductor(graph, [torch.ones(2)])
    assert "cache" in told
    given = [torch.ones(2)]
    torch.testing.assert_close(run(given)[0], torch.ones(2).sin() + 1)
    assert not given  # its memory can be used again


def test_compile_with_inductor_of_a_view_of_an_input():
    """Which code without torch's wrapper would give as something else."""
    graph = traced(lambda x: [x.view(4), x.sin() + 1], torch.ones(2, 2))
    run, _ = _torch.compile_with_inductor(graph, [torch.ones(2, 2)])
    given = torch.ones(2, 2)
    view, _ = run([given])
    assert view.shape == (4,) and view.data_ptr() == given.data_ptr()


def test_has_symbols():
    assert not _torch.has_symbols(traced(lambda x: x + 1, torch.ones(2)))
    world = _torch.FakeWorld()
    with world.mode:
        graph = _torch.trace(lambda n: n * 2, [world.number("n", 0.5)])
    assert _torch.has_symbols(graph)


def test_plain_tensor():
    with fake_mesh(2) as mesh:
        local = torch.ones(2)
        wrapped = DTensor.from_local(local, mesh, [Replicate()])
        assert type(_torch.plain_tensor(wrapped)) is torch.Tensor
        assert _torch.plain_tensor(local) is local


def test_layout_of():
    with fake_mesh(2) as mesh:
        wrapped = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
        assert _torch.layout_of(wrapped).placements == (Replicate(),)
        assert _torch.layout_of(torch.ones(2)) is None


def test_autocast_state():
    assert _torch.autocast_state() == ()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _torch.autocast_state() == (("cpu", torch.bfloat16),)


def test_sum_over():
    with fake_mesh(2):
        graph = traced(lambda x: _torch.sum_over(x, dist.group.WORLD), torch.ones(2))
        assert names(graph) == ["all_reduce", "wait_tensor"]


def test_collectives_with_a_backward():
    namespace = "_c10d_functional"
    assert not _torch.has_backward(f"{namespace}::broadcast")
    assert not _torch.has_backward(f"{namespace}::all_reduce_")


def test_tensors_of_shapes_only():
    with _torch.shape_mode():
        made = torch.empty(2, 3) @ torch.ones(3, 4)
    assert made.shape == (2, 4) and _torch.is_fake(made)


def test_share_memory_of_shards():
    _torch.share_memory_of_shards()
    with fake_mesh(2, ("tp",)) as mesh:
        tensor = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        assert not tensor.is_shared()
        assert tensor.share_memory_() is tensor
        assert tensor.is_shared() and tensor.to_local().is_shared()


def test_attention_of_sharded_heads_on_cpu():
    _torch.register_attention_on_cpu()
    with fake_mesh(2, ("tp",)) as mesh:
        heads = [
            DTensor.from_local(
                torch.ones(2, 1, 3, 4), mesh, [Shard(1)]
            ).requires_grad_()
            for _ in range(3)
        ]
        made = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        assert made.shape == (2, 2, 3, 4) and made.placements == (Shard(1),)
        made.sum().backward()
        assert heads[0].grad.placements == (Shard(1),)
