"""Layers that compute their weight, have none yet, or are never called: plan errors."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from torchspmd.errors import PlanError, UnsupportedModuleError
from torchspmd.parallel import (
    ColwiseParallel,
    ExpertParallel,
    FusedColwiseParallel,
    KeyValueParallel,
    PrepareModuleOutput,
    ReplicateParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchspmd.testing import fake_mesh

pytestmark = pytest.mark.fake

CUTTING = (
    ColwiseParallel(),
    RowwiseParallel(),
    FusedColwiseParallel(parts=(4, 8)),
    KeyValueParallel(num_heads=2),
    ExpertParallel(),
    SequenceParallel(),
)


@pytest.mark.parametrize("style", CUTTING, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize(
    ("give", "name"),
    [
        (parametrizations.weight_norm, "_WeightNorm"),
        (parametrizations.orthogonal, "_Orthogonal"),
        (parametrizations.spectral_norm, "_SpectralNorm"),
    ],
)
def test_a_parametrized_layer(give: Any, name: str, style: Any) -> None:
    model = nn.Sequential(give(nn.Linear(8, 12)))
    text = rf"'0': it computes parameters in each call \(weight by {name}\).*remove_par"
    with fake_mesh(2, ("tp",)) as mesh, pytest.raises(PlanError, match=text):
        parallelize_module(model, mesh, {"0": style})


def test_a_parametrized_layer_may_stay_whole() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 12)))
    with fake_mesh(2, ("tp",)) as mesh:
        parallelize_module(model, mesh, {"0": ReplicateParallel()}, src_data_rank=None)
        model(torch.ones(2, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.parametrize("style", [ColwiseParallel(), ReplicateParallel()])
def test_a_parametrization_after_the_plan_keeps_its_own_keys(style: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 12))
    with fake_mesh(2, ("tp",)) as mesh:
        parallelize_module(model, mesh, {"0": style}, src_data_rank=None)
        parametrize.register_parametrization(model[0], "weight", Twice())
        state = model.state_dict()
        assert set(state) == {"0.bias", "0.parametrizations.weight.original"}
        model.load_state_dict(state)


@pytest.mark.parametrize("style", [*CUTTING, ReplicateParallel()])
@pytest.mark.parametrize(
    ("give", "name"),
    [
        (nn.utils.spectral_norm, "SpectralNorm"),
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), "L1Unstructured"),
    ],
)
def test_a_layer_whose_weight_a_hook_computes(give: Any, name: str, style: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 12))
    give(model[0])
    text = (
        rf"'0': a hook computes parameters before each call \({name}\).*prune\.remove"
    )
    with fake_mesh(2, ("tp",)) as mesh, pytest.raises(PlanError, match=text):
        parallelize_module(model, mesh, {"0": style})


OUTPUT = PrepareModuleOutput(
    output_layouts=torch.distributed.tensor.Shard(0),
    desired_output_layouts=torch.distributed.tensor.Replicate(),
)


@pytest.mark.parametrize("style", [RowwiseParallel(), ReplicateParallel(), OUTPUT])
def test_the_output_projection_that_an_attention_never_calls(style: Any) -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    text = (
        r"'self_attn\.out_proj': it is the out_proj of an nn\.MultiheadAtt.*never calls"
    )
    with fake_mesh(2, ("tp",)) as mesh:
        with pytest.raises(PlanError, match=text):
            parallelize_module(model, mesh, {"self_attn.out_proj": style})
        with pytest.raises(UnsupportedModuleError, match=r"with four nn\.Linear"):
            parallelize_module(model.self_attn.out_proj, mesh, style)


@pytest.mark.parametrize("style", [RowwiseParallel(), SequenceParallel()])
def test_an_attention_that_cannot_be_cut(style: Any) -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    text = r"'self_attn': an nn\.MultiheadAttention computes.*with four nn\.Linear"
    with fake_mesh(2, ("tp",)) as mesh:
        with pytest.raises(PlanError, match=text):
            parallelize_module(model, mesh, {"self_attn": style})
        parallelize_module(model, mesh, ReplicateParallel())


def test_a_layer_that_has_no_shape_yet() -> None:
    model = nn.Sequential(nn.LazyLinear(8))
    text = r"'0': weight, bias: no shape yet.*call the module once on a batch before"
    with fake_mesh(2, ("tp",)) as mesh:
        with pytest.raises(PlanError, match=text):
            parallelize_module(model, mesh, {"0": ColwiseParallel()})
        model(torch.ones(2, 4))
        parallelize_module(model, mesh, {"0": ColwiseParallel()})


def test_a_second_style_on_a_fused_layer() -> None:
    layer = nn.Linear(8, 12)
    with fake_mesh(2, ("tp",)) as mesh:
        parallelize_module(layer, mesh, FusedColwiseParallel(parts=(6, 6)))
        for style in (ColwiseParallel(), FusedColwiseParallel(parts=(6, 6))):
            with pytest.raises(
                UnsupportedModuleError, match=r"weight_parts\.0.*one sty"
            ):
                parallelize_module(layer, mesh, style)
