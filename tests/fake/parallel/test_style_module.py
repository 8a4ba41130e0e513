"""What parallelize_module leaves behind: keys, copies, pickles, ties, values."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed.tensor.parallel as torch_styles
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from torchspmd.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchspmd.testing import fake_mesh

PLAN = {
    "0": ColwiseParallel(),
    "2": RowwiseParallel(output_layouts=Shard(1)),
    "3": SequenceParallel(),
}


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8))


def test_state_dict_keys_shapes_and_types_stay(tp4: object) -> None:
    model = build()
    before = {name: value.shape for name, value in model.state_dict().items()}
    parallelize_module(model, tp4, PLAN)
    after = model.state_dict()
    assert {name: value.shape for name, value in after.items()} == before
    assert all(isinstance(value, DTensor) for value in after.values())
    assert isinstance(model[0], nn.Linear)
    assert isinstance(model[3], nn.LayerNorm)


def test_a_deep_copy_is_independent_and_talks_to_the_same_ranks(tp4: object) -> None:
    model = parallelize_module(build(), tp4, PLAN, src_data_rank=None)
    other = copy.deepcopy(model)
    assert other[0].route.axis is model[0].route.axis
    assert other[0].weight is not model[0].weight
    with torch.no_grad():
        other[0].weight.zero_()
    assert model[0].weight.to_local().abs().sum() > 0
    assert other(torch.ones(2, 4, 8)).shape == (2, 4, 8)


def test_a_parallel_model_pickles(tp4: object) -> None:
    # A fake group moves no values: without a source rank they are this rank's own.
    model = parallelize_module(build(), tp4, PLAN, src_data_rank=None)
    other = pickle.loads(pickle.dumps(model))
    for name, parameter in other.named_parameters():
        expected = model.get_parameter(name)
        assert parameter.placements == expected.placements
        assert torch.equal(parameter.to_local(), expected.to_local())
    assert other(torch.randn(2, 4, 8)).shape == (2, 4, 8)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)


def test_a_style_is_a_frozen_value() -> None:
    style = ColwiseParallel()
    assert style == ColwiseParallel(input_layouts=Replicate())
    assert hash(style) == hash(ColwiseParallel())
    assert style != ColwiseParallel(use_local_output=False)
    with pytest.raises(AttributeError):
        style.use_local_output = False
    assert hash(
        PrepareModuleInput(
            input_kwarg_layouts={"x": Shard(0)},
            desired_input_kwarg_layouts={"x": Replicate()},
        )
    )
    with fake_mesh(4, ("tp",)) as mesh:
        before = dict(vars(style))
        for layer in (nn.Linear(8, 8), nn.Embedding(8, 8)):
            parallelize_module(layer, mesh, style, src_data_rank=None)
        assert dict(vars(style)) == before


def test_representations_are_those_of_torch() -> None:
    for ours, theirs in (
        (ColwiseParallel(), torch_styles.ColwiseParallel()),
        (RowwiseParallel(), torch_styles.RowwiseParallel()),
        (SequenceParallel(), torch_styles.SequenceParallel()),
    ):
        assert repr(ours) == repr(theirs)


def test_a_layer_shows_its_style(tp4: object) -> None:
    layer = parallelize_module(nn.Linear(8, 16), tp4, ColwiseParallel())
    assert "ColwiseParallel on tp=4" in repr(layer)


def test_patterns_match_part_by_part(tp4: object) -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([build(), build()])})
    parallelize_module(
        model, tp4, {"layers.*.[02]": RowwiseParallel(input_layouts=Replicate())}
    )
    for block in model["layers"]:
        assert block[0].weight.placements == (Shard(1),)
        assert block[2].weight.placements == (Shard(1),)
        assert not isinstance(block[3].weight, DTensor)


def test_tied_parameters_stay_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
            self.head.weight = self.embed.weight

    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(),
    }
    with fake_mesh(4, ("tp",)) as mesh:
        model = parallelize_module(Tied(), mesh, plan)
        assert model.head.weight is model.embed.weight
        apart = Tied()  # two calls, one module each
        parallelize_module(apart.embed, mesh, plan["embed"])
        parallelize_module(apart.head, mesh, plan["head"])
        assert apart.head.weight is apart.embed.weight


def test_your_own_style_and_torchs_styles_apply() -> None:
    class Freeze(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: object) -> nn.Module:
            module.seen = self.src_data_rank
            return module.requires_grad_(False)

    with fake_mesh(4, ("tp",)) as mesh:
        model, own, theirs = build(), Freeze(), torch_styles.ColwiseParallel()
        parallelize_module(model, mesh, {"2": own, "0": theirs}, src_data_rank=None)
        assert model[2].seen is None
        assert own.src_data_rank == theirs.src_data_rank == 0
        assert not model[2].weight.requires_grad
        assert model[0].weight.placements == (Shard(0),)


def test_a_frozen_parameter_stays_frozen(tp4: object) -> None:
    layer = nn.Linear(8, 16)
    layer.weight.requires_grad_(False)
    parallelize_module(layer, tp4, ColwiseParallel())
    layer(torch.ones(2, 8, requires_grad=True)).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None


def test_meta_modules_are_placed_without_memory() -> None:
    with fake_mesh(4, ("tp",)) as mesh, torch.device("meta"):
        model = parallelize_module(build(), mesh, PLAN)
        assert model[0].weight.to_local().shape == (4, 8)
        assert model[0].weight.is_meta


def test_autocast_computes_and_returns_what_a_linear_does() -> None:
    with fake_mesh(4, ("tp",)) as mesh, torch.autocast("cpu", torch.bfloat16):
        layer = parallelize_module(nn.Linear(8, 16), mesh, ColwiseParallel())
        value = torch.ones(2, 8, requires_grad=True)
        output = layer(value)
        assert output.dtype == torch.bfloat16
        output.sum().backward()
        assert value.grad.dtype == layer.weight.grad.dtype == torch.float32


def test_the_surrounding_mesh_is_used() -> None:
    with fake_mesh(4, ("tp",)) as mesh, mesh:
        layer = parallelize_module(nn.Linear(8, 16), None, ColwiseParallel())
        assert layer.weight.device_mesh == mesh
