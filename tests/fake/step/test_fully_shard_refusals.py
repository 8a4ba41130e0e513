"""What a fully sharded step refuses, and that a refusal changes nothing."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from training import train_sum as step

from torchspmd.errors import CaptureError, UsageError
from torchspmd.parallel import ColwiseParallel, parallelize_module
from torchspmd.step import DataParallel, compile
from torchspmd.testing import fake_mesh

MODE = DataParallel("fully_shard")


def mlp():
    return nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))


def refusal(model, function=step, *, optim=None, rank=0):
    """The text of the refusal; the user's objects are as before."""
    with fake_mesh(4, ("dp",), rank=rank) as mesh:
        model = model(mesh) if not isinstance(model, nn.Module) else model
        optim = optim or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        tables = [dict(module._parameters) for module in model.modules()]
        groups = [list(group["params"]) for group in optim.param_groups]
        with pytest.raises(CaptureError) as caught:
            compile(parallel_mode=MODE, mesh=mesh)(function)(
                model, optim, torch.randn(3, 8)
            )
        now = [module._parameters for module in model.modules()]
        assert all(type(table) is dict for table in now)
        for before, after in zip(tables, now, strict=True):
            assert {k: id(v) for k, v in before.items()} == {
                k: id(v) for k, v in after.items()
            }
        for before, group in zip(groups, optim.param_groups, strict=True):
            assert list(map(id, before)) == list(map(id, group["params"]))
        assert not optim.state
    return str(caught.value)


def test_a_failed_capture_leaves_the_model_plain():
    def reads(model, optim, batch):
        loss = model(batch).sum()
        loss.backward()
        return loss.item()

    model = mlp()
    assert "needs a tensor's value" in refusal(model, reads)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    with fake_mesh(4, ("dp",)) as mesh:  # and it can be trained
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        compile(parallel_mode=MODE, mesh=mesh)(step)(model, optim, torch.randn(3, 8))
    assert all(isinstance(p, DTensor) for p in model.parameters())


def test_fully_shard_of_torch():
    def wrapped(mesh):
        model = mlp()
        fully_shard(model[0], mesh=mesh)
        return model

    text = refusal(wrapped)
    assert "Sequential.0 is wrapped already (FSDPLinear)" in text
    assert "build the model without fully_shard()" in text


def test_every_problem_at_once():
    model = mlp()
    model[0].weight.register_hook(lambda gradient: gradient)
    model[0].bias = nn.Parameter(torch.empty(5, device="meta"))
    loose = nn.Parameter(torch.ones(3))
    optim = torch.optim.SGD([*model.parameters(), loose], lr=0.1)
    text = refusal(model, optim=optim)
    assert "Sequential.0.weight has a gradient hook" in text
    assert "Sequential.0.bias is on the meta device" in text
    assert "SGD.group0.params[4] is in no module that the step takes" in text


@pytest.mark.parametrize(
    "write",
    [lambda weight: weight.clamp_(-1, 1), lambda w: torch.clamp(w, -1, 1, out=w)],
    ids=["in place", "by name"],
)
def test_a_write_inside_of_forward(write):
    class Clamped(nn.Linear):
        def forward(self, x):
            write(self.weight.data)
            return super().forward(x)

    text = refusal(nn.Sequential(Clamped(8, 4)))
    assert "Sequential.0 writes into Sequential.0.weight inside of forward" in text
    assert "under torch.no_grad()" in text


def test_sparse_gradients():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(7, 4, sparse=True)

        def forward(self, x):
            return self.table(x.long() % 7)

    assert "Rows.table makes a sparse gradient" in refusal(Rows())


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.new_ones(weight.shape)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_gradients_that_pass_the_gathering_by():
    def applies(model, optim, batch):
        Double.apply(model[0].weight).sum().backward()

    text = refusal(mlp(), applies)
    assert "a gradient reaches Sequential.0.weight without being reduced" in text
    assert "Call it inside of one, where parameters are whole" in text

    def sets(model, optim, batch):
        model(batch).sum().backward()
        model[0].weight.grad = torch.ones(5, 8)
        optim.step()

    assert "sets the grad of a DTensor parameter to a plain tensor" in refusal(
        mlp(), sets
    )


def test_a_shard_with_a_plain_tensor():
    def mixes(model, optim, batch):
        with torch.no_grad():
            model[0].weight.add_(batch.mean(0))

    text = refusal(mlp(), mixes)
    assert "the step mixes a DTensor with a plain tensor" in text
    assert "whole inside of a module's forward" in text


def test_a_parameter_of_a_type_of_its_own():
    class Marked(nn.Parameter):
        pass

    model = mlp()
    model[0].bias = Marked(torch.zeros(5))
    text = refusal(model)
    assert "0.bias is a Marked, and shards would lose this type" in text


def test_a_norm_of_nothing():
    def clips(model, optim, batch):
        model(batch).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf"))
        optim.step()

    text = refusal(nn.Linear(8, 3), clips, rank=3)
    assert "the norm of a shard without elements" in text
    assert "torchspmd.clip_grad_norm_" in text


def test_whole_parameters_are_not_used_by_mistake():
    model = mlp()
    elsewhere = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model[0].weight
    with fake_mesh(4, ("dp",)) as mesh:
        compiled = compile(parallel_mode=MODE, mesh=mesh)(
            lambda model, batch: model(batch).sum().backward()
        )
        compiled(model, torch.randn(3, 8))
        with pytest.raises(UsageError, match=r"Sequential.0.weight: this is the whole"):
            F.linear(torch.ones(8), weight)
        with pytest.raises(UsageError, match=r"pass every optimizer"):
            elsewhere.step()
    assert repr(weight) == "<Sequential.0.weight: replaced by its shard>"


def test_axes_of_a_mesh():
    """Two with names, for shards and their replicas; other meshes are refused."""
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        model = mlp()
        call = model, torch.optim.SGD(model.parameters()), torch.randn(3, 8)
        with pytest.raises(UsageError, match="Only 'fully_shard' takes two, the first"):
            compile(step, parallel="replicate", mesh=mesh)(*call)
        unnamed = DeviceMesh("cpu", mesh.mesh)
        with pytest.raises(UsageError, match="the axes of the mesh have no names"):
            compile(step, parallel="fully_shard", mesh=unnamed)(*call)
        parallelize_module(
            model, mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate())}
        )
        call = model, torch.optim.SGD(model.parameters()), torch.randn(3, 8)
        with pytest.raises(CaptureError, match="with replicas of shards") as caught:
            compile(step, parallel="fully_shard", mesh=mesh)(*call)
        assert "pass one data axis, mesh=mesh['dp']" in str(caught.value)
