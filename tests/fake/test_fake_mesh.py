"""fake_mesh: any world in one process, and nothing left of it afterwards."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from torchspmd import CommDebugMode
from torchspmd.errors import UsageError, WorldError
from torchspmd.testing import fake_mesh, fake_world


@pytest.mark.parametrize(
    ("shape", "sizes"), [(4, (4,)), ((2, 4), (2, 4)), ([1024], (1024,)), (1, (1,))]
)
def test_sizes(shape, sizes):
    with fake_mesh(shape) as mesh:
        assert mesh.mesh.shape == sizes
        assert mesh.mesh_dim_names is None
        assert dist.get_world_size() == mesh.size()
    assert not dist.is_initialized()


@pytest.mark.parametrize("names", [("dp", "tp"), ["dp", "tp"]])
def test_names(names):
    with fake_mesh((2, 4), names) as mesh:
        assert mesh.mesh_dim_names == ("dp", "tp")
        assert mesh["tp"].size() == 4


@pytest.mark.parametrize(("rank", "place"), [(0, (0, 0)), (5, (1, 1)), (7, (1, 3))])
def test_rank(rank, place):
    with fake_mesh((2, 4), ("dp", "tp"), rank=rank) as mesh:
        assert dist.get_rank() == rank
        assert tuple(mesh.get_coordinate()) == place


def test_as_a_decorator_each_call_gets_a_world():
    @fake_mesh(4, ("tp",))
    def world_size(factor):
        return factor * dist.get_world_size()

    assert [world_size(1), world_size(2)] == [4, 8]
    assert not dist.is_initialized()


def test_shards_have_the_shapes_of_a_real_run():
    with fake_mesh((2, 4), ("dp", "tp"), rank=7) as mesh:
        tensor = distribute_tensor(torch.zeros(8, 6), mesh["tp"], [Shard(0)])
        assert isinstance(tensor, DTensor)
        assert tensor.to_local().shape == (2, 6)
        assert tensor.full_tensor().shape == (8, 6)


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (((),), {}, "fake_mesh: shape (): every axis needs at least one rank."),
        (((2, 0),), {}, "fake_mesh: shape (2, 0): every axis needs at least one rank."),
        ((-1,), {}, "fake_mesh: shape (-1,): every axis needs at least one rank."),
        ((4,), {"rank": 4}, "fake_mesh: rank 4: the ranks of this mesh are 0 to 3."),
        ((4,), {"rank": -1}, "fake_mesh: rank -1: the ranks of this mesh are 0 to 3."),
        ((4, "tp"), {}, "fake_mesh: names 'tp': pass a tuple of names, ('tp',)."),
        (((2, 4), ("tp",)), {}, "fake_mesh: names ('tp',): the mesh has 2 axes."),
        (
            ((2, 2), ("a", "b", "c")),
            {"rank": 9},
            "fake_mesh: rank 9: the ranks of this mesh are 0 to 3; "
            "names ('a', 'b', 'c'): the mesh has 2 axes.",
        ),
    ],
)
def test_bad_arguments(arguments, options, text):
    with pytest.raises(UsageError) as caught, fake_mesh(*arguments, **options):
        pass
    assert str(caught.value) == text
    assert not dist.is_initialized()


def test_what_torch_refuses_leaves_no_world():
    with pytest.raises(RuntimeError, match="unique"), fake_mesh((2, 2), ("tp", "tp")):
        pass
    assert not dist.is_initialized()


def test_refuses_a_second_world_and_leaves_the_first():
    with fake_mesh(2, ("tp",)):
        with pytest.raises(WorldError) as caught, fake_mesh(4, ("tp",)):
            pass
        assert dist.get_world_size() == 2
    assert str(caught.value) == (
        "a fake world of 4 ranks cannot start: this process already has a default "
        "process group of 2 ranks. Call torch.distributed.destroy_process_group() "
        "first."
    )
    assert isinstance(caught.value, RuntimeError)


def test_an_exception_passes_through_and_the_world_is_gone():
    with pytest.raises(KeyError, match="mine"), fake_mesh((2, 2), ("dp", "tp")):
        raise KeyError("mine")
    assert not dist.is_initialized()
    with fake_mesh(8) as mesh:
        assert mesh.size() == 8


def test_a_world_that_the_test_destroyed_itself():
    with fake_mesh(2):
        dist.destroy_process_group()
    assert not dist.is_initialized()


def test_collectives_return_at_once():
    with fake_mesh((2, 512), ("dp", "tp")) as mesh:
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=mesh.get_group("tp"))
        gathered = [torch.empty(3) for _ in range(512)]
        dist.all_gather(gathered, tensor, group=mesh.get_group("tp"))
        dist.barrier()
        assert tensor.shape == (3,)


def _train_step(model):
    model(torch.ones(4, 8)).sum().backward()
    return [parameter.grad.shape for parameter in model.parameters()]


def test_ddp_runs_forward_and_backward():
    with fake_mesh(4, ("dp",)):
        model = DistributedDataParallel(nn.Linear(8, 2))
        with CommDebugMode() as mode:
            shapes = [_train_step(model), _train_step(model)]
        assert shapes == [[(2, 8), (2,)]] * 2
        found = mode.ledger.total(kind="all_reduce", phase="backward")
        assert found.count == 2
        assert found.payload_bytes == 2 * 4 * (16 + 2)


def test_ddp_keeps_a_hook_of_the_users_own():
    seen = []

    def hook(state, bucket):
        seen.append(bucket.buffer().numel())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    with fake_mesh(4, ("dp",)):
        model = DistributedDataParallel(nn.Linear(8, 2))
        model.register_comm_hook(None, hook)
        _train_step(model)
    assert seen == [18]


@pytest.mark.parametrize("fails", [False, True])
def test_ddp_is_as_before_afterwards(fails):
    before = dict(vars(DistributedDataParallel))
    try:
        with fake_mesh(2, ("dp",)):
            assert vars(DistributedDataParallel) != before
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert dict(vars(DistributedDataParallel)) == before


def test_fake_world_has_no_mesh_but_a_group():
    with fake_world(16, rank=3):
        assert (dist.get_rank(), dist.get_world_size()) == (3, 16)
    assert not dist.is_initialized()
