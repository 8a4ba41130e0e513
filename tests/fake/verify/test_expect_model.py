"""Contracts on a model that runs: layers, lines, and names that do not exist."""

import re

import pytest
import torch
import torch.distributed.tensor.parallel as torch_styles
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from torchspmd import CommDebugMode, parallelize_module
from torchspmd.errors import ContractError, UsageError
from torchspmd.parallel import ColwiseParallel, RowwiseParallel
from torchspmd.testing import fake_mesh
from torchspmd.verify import expect

NUM_LAYERS = 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def mesh():
    with fake_mesh((2, 4), ("dp", "tp")) as mesh:
        yield mesh


@pytest.fixture
def model(mesh):
    plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    return parallelize_module(Net(), mesh["tp"], plan)


def step(model, optimizer=None):
    with CommDebugMode(sources=True) as comm_mode:
        model(torch.randn(5, 8, requires_grad=True)).sum().backward()
        if optimizer is not None:
            optimizer.step()
    return comm_mode.ledger


def test_tensor_parallel_layers(model, mesh):
    ledger = step(model, torch.optim.AdamW(model.parameters()))
    size = 5 * 8 * 4
    with expect(ledger, model=model, mesh=mesh) as claims:
        claims.count(
            all_reduce=lambda model: len(model.layers), axis="tp", phase="forward"
        )
        claims.count(all_reduce=NUM_LAYERS, module="layers.*.down", phase="forward")
        claims.count(all_reduce=NUM_LAYERS, module="layers.*.up", phase="backward")
        claims.payload_bytes(2 * NUM_LAYERS * size)
        claims.count(0, phase="optimizer").count(0, axis="dp")
        claims.forbid_implicit()
        claims.nothing_else()


def test_the_line_that_communicates_is_named(model):
    with pytest.raises(ContractError) as caught:
        expect(step(model)).count(0, phase="forward")
    text = str(caught.value)
    assert "forward of Net.layers.[0-2].down (each of 3): at " in text
    line = Block.forward.__code__.co_firstlineno + 1
    assert f"test_expect_model.py:{line} in forward" in text


def test_implicit_redistribution_names_operator_and_layouts(mesh):
    left = distribute_tensor(torch.ones(8, 8), mesh["tp"], [Shard(0)])
    right = distribute_tensor(torch.ones(8, 8), mesh["tp"], [Shard(1)])
    with CommDebugMode(sources=True) as comm_mode:
        _ = left + right
        left.redistribute(placements=[Replicate()])
    with pytest.raises(ContractError) as caught:
        expect(comm_mode.ledger).forbid_implicit()
    text = str(caught.value)
    assert "DTensor redistributed an operand of aten.add.Tensor from Shard(" in text
    assert "test_expect_model.py" in text
    expect(comm_mode.ledger).count(all_gather=1, implicit=False)


def test_names_that_the_model_and_the_mesh_do_not_have(model, mesh):
    """A claim of zero about a misspelt name would hold for ever."""
    claims = expect(step(model), model=model, mesh=mesh)
    claims.count(0, axis="dp").count(0, module="layers.*.down", phase="backward")
    with pytest.raises(UsageError) as caught:
        claims.count(0, axis="pt")
    assert (
        str(caught.value) == "expect: the mesh has no axis 'pt'; its axes are dp, tp."
    )
    with pytest.raises(UsageError) as caught:
        claims.count(0, module="layers.*.downs")
    assert str(caught.value).startswith(
        "expect: Net has no module that fits 'layers.*.downs'. Near to it: Net.layers."
    )


def test_an_optimizer_that_starts_to_reduce_is_found(mesh):
    """pytorch PR #121669: torch leaves gradients of norms partial, and AdamW reduces."""
    model = nn.Sequential(nn.LayerNorm(8))
    torch_styles.parallelize_module(
        model, mesh["tp"], {"0": torch_styles.SequenceParallel(sequence_dim=0)}
    )
    ledger = step(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ContractError) as caught:
        expect(ledger).count(0, phase="optimizer")
    text = str(caught.value)
    assert "count of communication in optimizer: expected 0, got " in text
    assert "all_reduce over tp, " in text and "optimizer of Global: DTensor" in text
    line = step.__code__.co_firstlineno + 4
    assert re.search(
        rf"from Partial to Replicate at \S*test_expect_model.py:{line} ", text
    )
