"""Layouts and writes that would have no effect, and second styles: each is an error."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn.utils import parametrizations, parametrize, prune

from torchspmd.errors import LayoutError, PlanError, UnsupportedModuleError
from torchspmd.parallel import (
    ColwiseParallel,
    ExpertParallel,
    FusedColwiseParallel,
    KeyValueParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    ReplicateParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchspmd.testing import fake_mesh

S, R = Shard(0), Replicate()


class Two(nn.Module):
    def forward(self, a: Any, b: Any = None) -> Any:
        return a if b is None else a + b


# --- layouts that would not be used ---------------------------------------------------
@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: PrepareModuleInput(desired_input_layouts=R),
            r"desired_input_layouts is \(Replicate\(\),\) without input_layouts.*Pass the",
        ),
        (
            lambda: PrepareModuleInput(desired_input_kwarg_layouts={"b": R}),
            r"must have the same names: \[\] and \['b'\]",
        ),
        (
            lambda: PrepareModuleInput(
                input_layouts=(S, None), desired_input_layouts=(R, R)
            ),
            r"input 1 has None in input_layouts and Replicate\(\).*or None in both",
        ),
        (
            lambda: PrepareModuleOutput(
                output_layouts=(None,), desired_output_layouts=(S,)
            ),
            r"output 0 has None in output_layouts and Shard\(dim=0\)",
        ),
    ],
)
def test_a_desired_layout_without_a_given_one(build: Any, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        build()


def keyword_style(name: str) -> PrepareModuleInput:
    return PrepareModuleInput(
        input_kwarg_layouts={name: S},
        desired_input_kwarg_layouts={name: R},
        use_local_output=True,
    )


def test_a_keyword_that_the_module_does_not_take(tp2: Any) -> None:
    text = r"names bb, which Two\.forward does not take; it takes a, b"
    with pytest.raises(LayoutError, match=text):
        parallelize_module(Two(), tp2, keyword_style("bb"))
    both = PrepareModuleInputOutput(
        input_kwarg_layouts={"bb": S},
        desired_input_kwarg_layouts={"bb": R},
        output_layouts=S,
        desired_output_layouts=R,
    )
    with pytest.raises(PlanError, match="names bb"):
        parallelize_module(nn.Sequential(Two()), tp2, {"0": both})


def test_a_keyword_layout_for_an_input_that_comes_by_position() -> None:
    x = torch.ones(2, 2)
    with fake_mesh(2, ("tp",)) as mesh:
        module = parallelize_module(Two(), mesh, keyword_style("b"))
        with pytest.raises(LayoutError, match=r"input 'b' was passed by pos.*by name"):
            module(x, x)
        assert module(x).shape == (2, 2)  # an input that is left out needs no layout
        assert module(torch.ones(4, 2), b=x).shape == (4, 2)


def test_a_keyword_input_with_gradient_for_experts() -> None:
    x = torch.ones(2, 2)
    with fake_mesh(2, ("tp",)) as mesh:
        module = parallelize_module(Two(), mesh, ExpertParallel())
        with pytest.raises(LayoutError, match=r"keyword inputs b require.*by position"):
            module(x, b=x.clone().requires_grad_())
        assert module(x, b=x).shape == (2, 2)
        with torch.no_grad():
            module(x, b=x.clone().requires_grad_())
        # Where every rank computes the same, the gradient is whole as it is.
        same = parallelize_module(Two(), mesh, ReplicateParallel())
        assert same(x, b=x.clone().requires_grad_()).requires_grad


# --- second styles --------------------------------------------------------------------
INPUT = PrepareModuleInput(input_layouts=S, desired_input_layouts=R)
OUTPUT = PrepareModuleOutput(output_layouts=S, desired_output_layouts=R)

BOTH = PrepareModuleInputOutput(
    input_layouts=S, desired_input_layouts=R, output_layouts=S, desired_output_layouts=R
)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (INPUT, INPUT, "PrepareModuleInput has placed the inputs"),
        (INPUT, BOTH, "PrepareModuleInput has placed the inputs"),
        (BOTH, OUTPUT, "PrepareModuleOutput has placed the outputs"),
        (SequenceParallel(), SequenceParallel(sequence_dim=0), "SequenceParallel has"),
        (ReplicateParallel(), ExpertParallel(), "ReplicateParallel has placed the for"),
    ],
)
@pytest.mark.parametrize("build", [lambda: nn.Dropout(0.5), nn.Identity])
def test_a_second_style_on_a_module_without_parameters(
    tp2: Any, build: Any, first: ParallelStyle, second: ParallelStyle, text: str
) -> None:
    module = copy.deepcopy(parallelize_module(build(), tp2, first))
    with pytest.raises(LayoutError, match=f"{text}.*give a module one style"):
        parallelize_module(module, tp2, second)


def test_styles_for_different_parts_of_a_module(tp2: Any) -> None:
    module = nn.Identity()
    for style in (INPUT, OUTPUT):
        parallelize_module(module, tp2, style)
    assert module(torch.ones(2, 2)).shape == (4, 2)


# --- ties over several calls ----------------------------------------------------------
@pytest.mark.parametrize(
    ("style", "asked"),
    [
        (ColwiseParallel(), r"Shard\(dim=0\)"),
        (FusedColwiseParallel(parts=(8, 8)), "a split into parts"),
    ],
)
def test_a_tie_that_a_second_call_would_break(
    tp2: Any, style: ParallelStyle, asked: str
) -> None:
    embed, head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
    head.weight = embed.weight
    parallelize_module(embed, tp2, ColwiseParallel())
    text = (
        rf"'weight': one parameter.*laid it out as Shard\(dim=1\) on the mesh tp=2.*"
        rf"asks for {asked}; lay out both modules in one plan"
    )
    with pytest.raises(PlanError, match=text):
        parallelize_module(head, tp2, style)
    assert head.weight is not embed.weight
    assert type(head) is nn.Linear


def test_a_tie_over_two_meshes() -> None:
    embed, head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
    head.weight = embed.weight
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        parallelize_module(embed, mesh["dp"], ReplicateParallel())
        with pytest.raises(
            LayoutError, match=r"on the mesh dp=2 for a module that shar"
        ):
            parallelize_module(head, mesh["tp"], ReplicateParallel())


# --- fused layers ---------------------------------------------------------------------
def fused_on(mesh: Any) -> tuple[nn.Module, Any, ParallelStyle]:
    # Two parts have fewer heads than ranks, so that they are replicated.
    style = FusedColwiseParallel(parts=(4, 4, 4), num_heads=(2, 1, 1))
    return nn.Linear(8, 12), mesh, style


@pytest.mark.parametrize("source", [0, None])
def test_a_fused_layer_with_replicated_parts_copies_and_pickles(
    tp2: Any, source: int | None
) -> None:
    model = parallelize_module(*fused_on(tp2), src_data_rank=source)
    for _ in range(2):
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            for mine, theirs in zip(
                model.parameters(), other.parameters(), strict=True
            ):
                assert torch.equal(mine.to_local(), theirs.to_local())
        model.load_state_dict(model.state_dict(), assign=True)


def test_a_parallel_model_shares_its_memory(tp2: Any) -> None:
    """torch copies from the memory that a DTensor does not have."""
    model = parallelize_module(*fused_on(tp2))
    parameters = list(model.parameters())
    before = [p.to_local().clone() for p in parameters]
    assert not any(p.is_shared() for p in parameters)
    assert model.share_memory() is model
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    for old, parameter in zip(before, parameters, strict=True):
        assert parameter.is_shared() and parameter.to_local().is_shared()
        assert torch.equal(old, parameter.to_local())


def test_a_fused_layer_resets_its_parts(tp2: Any) -> None:
    model = parallelize_module(*fused_on(tp2))
    before = [p.to_local().clone() for p in model.parameters()]
    model.reset_parameters()
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert not torch.equal(old, parameter.to_local())
        assert parameter.requires_grad


# ----------------------------------------------------------------------------
# Layers that compute their weight, have none yet, or are never called: plan errors.


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


PARAMETERS_OUTPUT = PrepareModuleOutput(
    output_layouts=torch.distributed.tensor.Shard(0),
    desired_output_layouts=torch.distributed.tensor.Replicate(),
)


@pytest.mark.parametrize(
    "style", [RowwiseParallel(), ReplicateParallel(), PARAMETERS_OUTPUT]
)
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
