"""Fully sharded steps that write between two uses, and the states that stay plain."""

import copy
import operator

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from training import train_keeping_gradients

from torchspmd.step import DataParallel, compile
from torchspmd.testing import fake_mesh

pytestmark = pytest.mark.fake


def forward_step_forward(model, optim, batch):
    before = model(batch).square().mean()
    optim.step()
    optim.zero_grad()
    after = model(batch).square().mean()
    after.backward()
    return before.detach(), after.detach()


@pytest.mark.parametrize("kind", [{"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_weights_are_gathered_again_after_an_update(optimizer, kind):
    torch.manual_seed(0)
    batch, model = torch.randn(4, 4), nn.Linear(4, 4)
    runs = []
    with fake_mesh(1, ("dp",)) as mesh:
        mode = DataParallel("fully_shard")
        compiled = compile(mesh=mesh, parallel_mode=mode)(forward_step_forward)
        for step in (forward_step_forward, compiled):
            ours = copy.deepcopy(model)
            ours(batch).square().mean().backward()
            optim = optimizer(ours.parameters(), lr=0.1, **kind)
            runs.append([step(ours, optim, batch) for _ in range(3)])
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=0)
    assert runs[0][0][0] != runs[0][0][1]


def test_lists_of_shards_are_gathered_again():
    def step(model, batch):
        before = model(batch).sum()
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), 2.0)
        return before.detach(), model(batch).sum().detach()

    with fake_mesh(1, ("dp",)) as mesh:
        mode = DataParallel("fully_shard")
        compiled = compile(mesh=mesh, parallel_mode=mode)(step)
        before, after = compiled(nn.Linear(4, 4), torch.randn(4, 4))
    torch.testing.assert_close(after, before * 2)


WRITES = {
    "/=": lambda x: operator.itruediv(x, 2),
    "+=": lambda x: operator.iadd(x, 2),
    "&=": lambda x: operator.iand(x, 2),
    "|=": lambda x: operator.ior(x, 2),
    "^=": lambda x: operator.ixor(x, 2),
    "<<=": lambda x: operator.ilshift(x, 2),
    ">>=": lambda x: operator.irshift(x, 2),
}


@pytest.mark.parametrize("kind", WRITES)
def test_a_frozen_weight_is_written_as_a_shard(kind):
    def step(model, batch):
        WRITES[kind](model.kept)
        return model(batch)

    model = nn.Linear(4, 4)
    numbers = torch.arange(4.0) if kind in ("/=", "+=") else torch.arange(4)
    model.kept = nn.Parameter(numbers, requires_grad=False)
    WRITES[kind](wanted := numbers.clone())
    with fake_mesh(1, ("dp",)) as mesh:
        mode = DataParallel("fully_shard")
        compile(mesh=mesh, parallel_mode=mode)(step)(model, torch.randn(3, 4))
        assert torch.equal(model.kept.to_local(), wanted)


class Doubled(torch.optim.Optimizer):
    """Doubles the gradients and lets another optimizer step."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__([p for g in inner.param_groups for p in g["params"]], {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = parameter.grad * 2
        self.inner.step()


@pytest.mark.parametrize("name", ["replicate", "fully_shard"])
def test_an_optimizer_gets_the_gradients_of_the_one_around_it(name):
    def step(model, outer, inner, batch):
        model(batch).sum().backward()
        outer.step()
        outer.zero_grad()

    torch.manual_seed(0)
    batch, eager = torch.randn(4, 4), nn.Linear(4, 4)
    model = copy.deepcopy(eager)
    with fake_mesh(1, ("dp",)) as mesh:
        compiled = compile(mesh=mesh, parallel_mode=DataParallel(name))(step)
        for function, each in ((step, eager), (compiled, model)):
            inner = torch.optim.SGD(each.parameters(), lr=0.1)
            function(each, Doubled(inner), inner, batch)
        got = model.weight
        got = got.to_local() if isinstance(got, DTensor) else got
        assert torch.equal(got, eager.weight)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.linear(x) * self.scale


COUNTERS = {torch.optim.NAdam: {"step", "mu_product"}}
COUNTERS[torch.optim.ASGD] = {"step", "eta", "mu"}


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("optimizer", COUNTERS)
def test_counters_of_a_single_number_stay_plain(optimizer, is_warm):
    batch = torch.randn(3, 4)
    with fake_mesh(2, ("dp",)) as mesh:
        model = Scaled()
        optim = optimizer(model.parameters(), lr=0.1)
        if is_warm:
            train_keeping_gradients(model, optim, batch)
        step = compile(mesh=mesh, parallel_mode=DataParallel("fully_shard"))(
            train_keeping_gradients
        )
        for _ in range(2):
            step(model, optim, batch)
        for parameter in (model.scale, model.linear.weight):
            state = optim.state[parameter]
            plain = {k for k, v in state.items() if not isinstance(v, DTensor)}
            assert plain == COUNTERS[optimizer]


@pytest.mark.parametrize("is_kept", [False, True])
def test_recurrent_layers_and_lists_of_parameters(is_kept):
    def step(model, optim, batch):
        loss = model(batch)[0].square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    torch.manual_seed(0)
    batch, model = torch.randn(4, 5, 4), nn.LSTM(4, 4)
    runs = []
    with fake_mesh(1, ("dp",)) as mesh:
        mode = DataParallel("fully_shard")
        for wrap in (lambda step: step, compile(mesh=mesh, parallel_mode=mode)):
            ours = copy.deepcopy(model)
            if is_kept:
                ours.kept = list(ours.parameters())
            optim, compiled = torch.optim.Adam(ours.parameters()), wrap(step)
            runs.append([compiled(ours, optim, batch) for _ in range(3)])
    torch.testing.assert_close(runs[1], runs[0])
    assert all(map(operator.is_, ours._flat_weights, ours.parameters()))
