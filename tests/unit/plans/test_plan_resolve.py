"""Every reason why a plan does not fit, and that nothing has changed then."""

import random
import re
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from plan_models import GPT, MLP, Attention, fingerprint
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise

from torchspmd.errors import PlanError, UnsupportedModuleError, UsageError
from torchspmd.parallel import (
    ColwiseParallel,
    FusedColwiseParallel,
    KeyValueParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    auto_plan,
)
from torchspmd.parallel.plan.plan import Plan
from torchspmd.parallel.plan.resolve import resolve

COLWISE, ROWWISE = ColwiseParallel(), RowwiseParallel()
GOOD = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    "layers.*.attention.[qkv]": COLWISE,
    "layers.*.attention.o": ROWWISE,
    "layers.*.mlp.up": COLWISE,
    "layers.*.mlp.down": ROWWISE,
    "head": ColwiseParallel(output_layouts=Replicate()),
}


def problems(plan, model=None, mesh=None):
    """The lines of the error, after checking that the model is as it was."""
    model = GPT() if model is None else model
    before = fingerprint(model)
    with pytest.raises(PlanError) as caught:
        resolve(plan, model, mesh or {"tp": 2})
    assert fingerprint(model) == before
    return [
        line[4:] for line in str(caught.value).splitlines() if line.startswith("  *")
    ]


def test_a_plan_that_fits_gives_one_style_to_each_module():
    resolved = resolve(GOOD, GPT(), {"tp": 2})
    assert [a.path for a in resolved.assignments] == [
        "embed",
        *(f"layers.{i}.attention.{n}" for i in (0, 1) for n in "qkv"),
        *(f"layers.{i}.attention.o" for i in (0, 1)),
        *(f"layers.{i}.mlp.up" for i in (0, 1)),
        *(f"layers.{i}.mlp.down" for i in (0, 1)),
        "head",
    ]
    assert {a.style for a in resolved.assignments} == set(GOOD.values())


def test_the_text_names_the_call_the_model_the_mesh_and_the_fix():
    with pytest.raises(PlanError) as caught:
        resolve({"haed": COLWISE}, GPT(), {"dp": 4, "tp": 2})
    assert str(caught.value) == (
        "parallelize_module: the plan does not fit GPT on the mesh dp=4, tp=2\n\n"
        "  * 'haed' matches no module; the model has no 'haed' inside, only embed, layers, "
        "head; nearest: 'head'\n\n"
        "The module was not changed. Change these entries of the plan."
    )


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (
            "layers.*.mlp.dwn",
            "'layers.*.mlp' matches, but has no 'dwn' inside, only up, down; nearest: "
            "'layers.*.mlp.down'",
        ),
        (
            "layers.5.mlp.up",
            "'layers' matches, but has no '5' inside, only 0, 1; nearest: "
            "'layers.*.mlp.up'",
        ),
        ("mlp.up", "only embed, layers, head; nearest: 'layers.*.mlp.up'"),
        ("embed.table", "'embed' matches, but has no modules inside"),
        (
            "layers.*.mlp.up.weight",
            "names a parameter, and a plan names modules: write ",
        ),
    ],
)
def test_a_pattern_that_matches_nothing_says_where_it_stops(pattern, text):
    (problem,) = problems({**GOOD, pattern: COLWISE})
    assert problem.startswith(f"'{pattern}' matches no module; ")
    assert text in problem


def test_a_module_with_two_styles_names_both_patterns():
    found = problems({"layers.*.mlp.up": COLWISE, "layers.0.mlp.*": ROWWISE})
    assert found[0] == (
        "'layers.0.mlp.up' gets two styles: 'layers.*.mlp.up' asks ColwiseParallel(), "
        "'layers.0.mlp.*' asks RowwiseParallel(); write patterns that do not overlap"
    )


def test_a_module_in_two_places_cannot_have_two_styles():
    model = nn.ModuleDict({"a": nn.Linear(4, 4)})
    model["b"] = model["a"]
    (problem,) = problems({"a": COLWISE, "b": ROWWISE}, model)
    assert problem.startswith("'a' (also known as 'b') gets two styles")


def test_the_same_style_twice_is_applied_once():
    model = nn.ModuleDict({"a": nn.Linear(4, 4)})
    model["b"] = model["a"]
    plan = {"a": COLWISE, "[ab]": ColwiseParallel()}
    assert len(resolve(plan, model, {"tp": 2}).assignments) == 1


def test_a_style_that_does_not_fit_its_module():
    found = problems({"layers.*.mlp": COLWISE, "layers.*.norm": ROWWISE})
    assert found == [
        "'layers.[0-1].mlp': ColwiseParallel currently only support nn.Linear and "
        "nn.Embedding! This is a MLP; write the pattern of the layer inside of it ('up', "
        "'down')",
        "'layers.[0-1].norm': RowwiseParallel currently only support nn.Linear and "
        "nn.Embedding! This is a LayerNorm; its parameters are its own: "
        "ExpertParallel(parameter_placements={...}) cuts them where its forward makes "
        "partial values of them, ReplicateParallel() keeps it whole",
    ]


def test_a_style_that_does_not_fit_the_number_of_ranks():
    style = FusedColwiseParallel(parts=(8, 8), num_heads=(4, 4))
    found = problems({"": style}, nn.Linear(8, 16), {"tp": 3})
    assert "part 0 has 4 heads for 3 ranks" in found[0]
    assert "part 1 has 4 heads for 3 ranks" in found[1]


def test_a_single_style_keeps_the_error_of_styles():
    with pytest.raises(UnsupportedModuleError, match="on the mesh tp=2: Colwise"):
        resolve(COLWISE, nn.ReLU(), {"tp": 2})
    with pytest.raises(UsageError, match="Expect Union"):
        resolve("colwise", nn.ReLU(), {"tp": 2})  # type: ignore[arg-type]


def test_a_value_that_is_no_style():
    (problem,) = problems({"head": "colwise"})
    assert problem == (
        "'head': 'colwise' is not a style; pass ColwiseParallel() or another style; names "
        "are for TOML files"
    )


def test_heads_that_the_ranks_cannot_share_come_from_head_dim():
    found = problems(GOOD, mesh={"tp": 4})
    assert found == [
        "'layers.[0-1].attention.k', 'layers.[0-1].attention.v' each: 2 heads (4 "
        "features, head_dim 2 of "
        "'layers.[0-1].attention') cannot be shared out whole over tp=4; use an axis of "
        "1, 2 ranks, or KeyValueParallel(num_heads=2) if these are keys or values of an "
        "attention of your own, or "
        "heads={pattern: 0} in the Plan if these are not heads"
    ]


def test_the_style_for_few_heads_is_accepted():
    plan = {p: s for p, s in GOOD.items() if "qkv" not in p}
    plan["layers.*.attention.q"] = COLWISE
    plan["layers.*.attention.[kv]"] = KeyValueParallel(num_heads=2)
    assert resolve(plan, GPT(), {"tp": 4}).assignments


def test_heads_come_from_a_count_and_a_width():
    model = Attention()
    del model.head_dim
    model.num_heads, model.embed_dim = 4, 8
    (problem,) = problems({"o": ROWWISE}, model, {"tp": 3})
    assert "4 heads (8 features, head_dim 2 of '')" in problem


def test_heads_come_from_the_plan():
    plan = Plan({"up": COLWISE, "down": ROWWISE}, heads={"up": 2, "dwn": 2})
    found = problems(plan, MLP(), {"tp": 4})
    assert found[0].startswith("heads: 'dwn' matches no module")
    assert found[1].startswith("'up': 2 heads (16 features, heads['up'] of the plan)")


def test_features_that_are_not_heads_can_be_said_to_be_none():
    plan = Plan({"q": COLWISE}, heads={"q": 0})
    assert resolve(plan, Attention(), {"tp": 3})


def test_a_tie_that_would_be_broken():
    found = problems({"embed": ColwiseParallel()}, GPT(tied=True))
    assert found == [
        "one parameter would become several: 'embed.weight' Shard(dim=1), 'head.weight' "
        "with no style; give the modules that share it styles with the same layout "
        "(RowwiseParallel for an embedding table goes with ColwiseParallel for a "
        "Linear), or untie them first"
    ]
    assert resolve(GOOD, GPT(tied=True), {"tp": 2})


def test_a_tied_parameter_cannot_be_split():
    plan = {**GOOD, "head": FusedColwiseParallel(parts=(16, 16))}
    (problem,) = problems(plan, GPT(tied=True))
    assert "'head.weight' is split into parts, but is also 'embed.weight'" in problem


def test_a_parameter_that_two_styles_lay_out():
    (problem,) = problems(
        {"layers.0": SequenceParallel(), "layers.0.norm": SequenceParallel()}
    )
    assert problem == (
        "'layers.0.norm.bias' would be laid out twice: by SequenceParallel() of "
        "'layers.0' and by SequenceParallel() of 'layers.0.norm'; give a style to one "
        "of them"
    )


def sequential(*styles):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    plan = {str(2 * i): s for i, s in enumerate(styles) if s is not None}
    return plan, model


@pytest.mark.parametrize(
    ("styles", "text"),
    [
        (
            (COLWISE, None),
            "'0' (ColwiseParallel()) returns Shard(-1), but '2' has no style and needs "
            "the whole tensor, or its parameters get the gradients of one rank's part; "
            "give '2' RowwiseParallel(), or '0' output_layouts=Replicate()",
        ),
        (
            (COLWISE, COLWISE),
            "'0' (ColwiseParallel()) returns Shard(-1), but '2' (ColwiseParallel()) takes "
            "Replicate(); give '2' RowwiseParallel(), or '0' output_layouts=Replicate()",
        ),
        (
            (None, ROWWISE),
            "'2' (RowwiseParallel()) takes Shard(-1), but '0' before it has no style and "
            "returns all its features; give '0' ColwiseParallel(), or '2' "
            "input_layouts=Replicate()",
        ),
        (
            (RowwiseParallel(output_layouts=Shard(1)), COLWISE),
            "'0' (RowwiseParallel(output_layouts=Shard(1))) returns Shard(1), but '2' "
            "(ColwiseParallel()) takes Replicate(); give '2' input_layouts=Shard(1), or "
            "'0' output_layouts=Replicate()",
        ),
        (
            (
                COLWISE,
                PrepareModuleInput(
                    input_layouts=Replicate(), desired_input_layouts=Shard(0)
                ),
            ),
            "but '2' (PrepareModuleInput(input_layouts=Replicate(), "
            "desired_input_layouts=Shard(0))) takes Replicate()",
        ),
    ],
)
def test_neighbours_that_do_not_hand_over(styles, text):
    plan, model = sequential(*styles)
    (problem,) = problems(plan, model)
    if styles == (COLWISE, COLWISE):
        assert problem.startswith("'0' (ColwiseParallel()) returns Shard(-1), but '2' ")
    else:
        assert text in problem


def test_a_whole_tensor_into_sequence_parallel_would_be_tiled():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    (problem,) = problems({"0": ROWWISE, "1": SequenceParallel()}, model)
    assert problem == (
        "'0' (RowwiseParallel()) returns Replicate(), but '1' (SequenceParallel()) takes "
        "Shard(1); give '0' output_layouts=Shard(1)"
    )
    before, problem = problems({"1": SequenceParallel(use_local_output=True)}, model)
    assert before == (
        "'1' (SequenceParallel(use_local_output=True)) takes Shard(1), but '0' before it "
        "has no style, so that its parameters get the gradients of one rank's part; give "
        "'0' SequenceParallel(), or '1' a style that takes Replicate()"
    )
    assert problem == (
        "'1' (SequenceParallel(use_local_output=True)) returns Shard(1), but '2' has no "
        "style and needs the whole tensor, or its parameters get the gradients of one "
        "rank's part; give '2' a style that takes Shard(1)"
    )


@pytest.mark.parametrize(
    "styles",
    [
        (COLWISE, ROWWISE),
        (ColwiseParallel(output_layouts=Replicate()), None),
        (None, RowwiseParallel(input_layouts=Replicate())),
        (None, COLWISE),
        (ROWWISE, COLWISE),
        # A DTensor knows its layout.
        (ColwiseParallel(use_local_output=False), COLWISE),
    ],
)
def test_neighbours_that_hand_over(styles):
    plan, model = sequential(*styles)
    assert resolve(plan, model, {"tp": 2})


def test_a_fused_projection_cannot_be_column_wise():
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.o = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            return self.o(q * k + v)

    (problem,) = problems({"qkv": COLWISE, "o": ROWWISE}, Fused())
    assert problem == (
        "'qkv' (ColwiseParallel()) returns a shard of its features, which chunk then "
        "takes apart: a rank's parts would not be its share of each part; give 'qkv' "
        "FusedColwiseParallel(parts=...)"
    )
    fused = FusedColwiseParallel(parts=(8, 8, 8))
    assert resolve({"qkv": fused, "o": ROWWISE}, Fused(), {"tp": 2})


def test_what_a_hook_may_change_is_not_judged():
    plan, model = sequential(COLWISE, None)
    model[0].register_forward_hook(lambda module, inputs, output: output)
    assert resolve(plan, model, {"tp": 2})


def test_layers_built_with_the_features_of_one_rank_are_not_judged():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(4, 4), nn.Linear(8, 8))
    assert resolve({"0": COLWISE, "2": ROWWISE}, model, {"tp": 2})


def test_a_norm_without_a_style_before_a_layer_that_takes_a_part_of_the_tokens():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    plan = {
        "1": ColwiseParallel(input_layouts=Shard(0)),
        "3": RowwiseParallel(output_layouts=Shard(0)),
    }
    (problem,) = problems(plan, model)
    assert "'0' before it has no style" in problem
    assert "give '0' SequenceParallel(sequence_dim=0), or '1' a style" in problem
    model[0].weight.register_hook(lambda gradient: gradient)  # may add it up
    assert resolve(plan, model, {"tp": 2})
    assert resolve(plan, model.requires_grad_(False), {"tp": 2})


class WritesInForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.calls = 0
        self.seen, self.config = [], {"nested": [SimpleNamespace(calls=0)]}
        self.register_buffer("ema", torch.ones(8))
        self.up.register_forward_hook(self.note)
        kept = self.kept = []
        self.up.register_forward_hook(lambda module, args, output: kept.append(output))

    shared: ClassVar[list[Any]] = []

    def note(self, module, args, output):
        self.seen.append(output)

    def forward(self, x):
        print("forward")
        self.calls += 1
        self.up.calls = self.config["nested"][0].calls = self.calls
        self.ema.mul_(0.9)
        self.seen.append(x)
        self.shared.append(x)
        self.last = self.up(x) + torch.rand(()) + random.random()
        return self.down(self.last)


@pytest.mark.parametrize("way", (resolve, auto_plan, Plan.preview))
def test_looking_at_a_forward_leaves_no_trace_in_the_module(way, capsys):
    model = WritesInForward()
    names, ema = set(vars(model)), model.ema
    states = torch.get_rng_state(), random.getstate()
    if way is resolve:
        assert resolve({"up": COLWISE, "down": ROWWISE}, model, {"tp": 2})
    elif way is auto_plan:
        auto_plan(model, leave=("up", "down"))
    else:
        Plan({"up": COLWISE, "down": ROWWISE}).preview(model, {"tp": 2})
    assert set(vars(model)) == names and not hasattr(model.up, "calls")
    assert (model.calls, model.config["nested"][0].calls) == (0, 0)
    assert not (model.seen or model.kept or model.shared)
    assert model.ema is ema and ema.eq(1).all()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert not capsys.readouterr().out


CALLS = []


class WritesGlobals(WritesInForward):
    def forward(self, x):
        CALLS.append(x)
        return self.down(self.up(x))


class WritesThroughAMethod(WritesInForward):
    def forward(self, x):
        return self._run(x)

    def _run(self, x):
        count_globally()
        return self.down(self.up(x))


def count_globally():
    global CALLS  # noqa: PLW0603
    CALLS = [*CALLS, 1]


@pytest.mark.parametrize("kind", (WritesGlobals, WritesThroughAMethod))
def test_a_forward_that_may_change_globals_is_not_run(kind):
    assert resolve({"up": COLWISE}, kind(), {"tp": 2})
    assert not CALLS


def test_a_forward_that_cannot_be_followed_is_not_judged():
    class Branches(WritesInForward):
        def forward(self, x):
            return self.down(self.up(x)) if x.sum() > 0 else x

    assert resolve({"up": COLWISE}, Branches(), {"tp": 2})


def test_the_styles_of_torch_are_read_as_ours():
    (problem,) = problems({"up": TorchColwise()}, MLP())
    assert "'up' (ColwiseParallel()) returns Shard(-1)" in problem
    found = problems({"embed": TorchColwise()}, GPT(tied=True))
    assert "one parameter would become several" in found[0]


def test_all_problems_come_at_once():
    plan = {
        "nothing": COLWISE,
        "layers.*.norm": COLWISE,
        "layers.*.attention.k": COLWISE,
        "layers.*.mlp.up": COLWISE,
        "embed": COLWISE,
    }
    found = problems(plan, GPT(tied=True), {"tp": 4})
    kinds = ["matches no", "only support", "become several", "heads (4", "returns"]
    assert len(found) == len(kinds)
    for problem, kind in zip(found, kinds, strict=True):
        assert kind in problem


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        ({}, r"the mesh is {}. Pass a DeviceMesh, or sizes"),
        (8, "the mesh is 8"),
        ({"tp": 0}, "at least 1"),
        ({"dp": 2, "cp": 2}, "has the axes dp, cp; none is 'tp'"),
    ],
)
def test_a_mesh_that_says_nothing(mesh, text):
    with pytest.raises(UsageError, match=re.escape(text)):
        resolve(GOOD, GPT(), mesh)


def test_a_model_on_meta_resolves():
    with torch.device("meta"):
        model = GPT()
    assert resolve(GOOD, model, {"tp": 2})
