"""Gradient penalties and other weights on each rank: numbers, and what is refused."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from training import train

from torchspmd.errors import AgreementError, CaptureError
from torchspmd.step import DataParallel, compile

REPLICATE = DataParallel("replicate")


def build(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.02)


def penalized(model, optim, batch):
    loss = model(batch).square().mean()
    inner = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    penalty = sum(gradient.square().sum() for gradient in inner)
    (loss + penalty).backward()
    optim.step()
    optim.zero_grad()
    return penalty


def on_each_rank(model, optim, batches):
    """The same with the average of all ranks' gradients, on one device."""
    gradients = []
    for batch in batches:
        twin = copy.deepcopy(model)
        idle = torch.optim.SGD(twin.parameters(), lr=0.0)
        idle.zero_grad = lambda: None
        penalized(twin, idle, batch)
        gradients.append([p.grad for p in twin.parameters()])
    for parameter, *own in zip(model.parameters(), *gradients, strict=True):
        parameter.grad = sum(own) / len(own)
    optim.step()


def run_penalty(mode):
    (model, optim), (other, other_optim) = build(), build()
    step = compile(parallel_mode=mode)(penalized)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        whole = torch.randn(6, 4, generator=generator, dtype=torch.float64)
        batches = whole.chunk(dist.get_world_size())
        step(model, optim, batches[dist.get_rank()].clone())
        if mode is None:
            penalized(other, other_optim, whole)
        else:
            on_each_rank(other, other_optim, batches)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


@pytest.mark.parametrize("mode", (None, REPLICATE))
def test_penalty(mode, ranks2):
    for found in ranks2.run(run_penalty, mode):
        assert found < 1e-12


def plain(model, optim, batch):
    loss = model(batch).square().mean()
    with torch.no_grad():
        for p, g in zip(
            model.parameters(),
            torch.autograd.grad(loss, model.parameters()),
            strict=True,
        ):
            p.sub_(g, alpha=0.1)


def with_graph(model, optim, batch):
    model(batch).square().mean().backward(create_graph=True)
    optim.step()


def by_hand(model, optim, batch):
    loss = model(batch).square().mean()
    inner = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    for parameter, gradient in zip(model.parameters(), inner, strict=True):
        parameter.grad = gradient.detach()
    optim.step()
    optim.zero_grad()


def run_refused():
    batch = torch.randn(3, 4, dtype=torch.float64)
    texts = []
    for step, mode in (
        (with_graph, REPLICATE),
        (by_hand, REPLICATE),
        (penalized, DataParallel("fully_shard")),
    ):
        with pytest.raises(CaptureError) as caught:
            compile(parallel_mode=mode)(step)(*build(), batch)
        texts.append(str(caught.value))
    model, optim = build()
    compile(parallel_mode=REPLICATE)(plain)(model, optim, batch * dist.get_rank())
    weights = [torch.zeros(4, 4, dtype=torch.float64) for _ in range(2)]
    dist.all_gather(weights, model[0].weight.detach())
    return texts, torch.equal(*weights)


def test_refused(ranks2):
    for (graph, own, sharded), is_equal in ranks2.run(run_refused):
        assert "backward(create_graph=True) would leave" in graph
        assert "test_step_inner_gradients.py" in graph
        assert "torch.autograd.grad(loss, parameters, create_graph=True)" in graph
        assert "Sequential.0.weight and 3 more would be updated" in own
        assert "create_graph=True" in sharded and "'replicate'" in sharded
        assert is_equal  # plain gradients of autograd.grad are reduced


def run_other_weights(mode):
    batch = torch.ones(3, 4, dtype=torch.float64)
    model, optim = build(dist.get_rank())
    model.register_buffer("own", torch.full((2,), float(dist.get_rank())))
    with pytest.raises(AgreementError) as caught:
        compile(parallel_mode=mode)(train)(model, optim, batch)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    step = compile(parallel_mode=mode)(train)
    for rows in (3, 2):
        step(model, optim, batch[:rows])
    phases = [program.notes[0] for program in step.programs]
    return str(caught.value), ["checksums" in line for line in phases]


@pytest.mark.parametrize("mode", (None, REPLICATE))
def test_other_weights(mode, ranks2):
    for text, compared in ranks2.run(run_other_weights, mode):
        assert "ranks hold other values of the same tensors" in text
        assert "Sequential.0.weight [4, 4] #" in text and "Sequential.own" not in text
        assert "broadcast from one rank first" in text
        assert compared == [True, False]
