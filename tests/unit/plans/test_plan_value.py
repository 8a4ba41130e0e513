"""``Plan`` as a value, and its text form."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise

from torchspmd.errors import PlanError
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
)
from torchspmd.parallel.plan.plan import Plan

EVERY_STYLE = Plan(
    {
        "": SequenceParallel(sequence_dim=0, use_local_output=True),
        "a": ColwiseParallel(),
        "b.*": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "c": ColwiseParallel(output_layouts=Partial(), use_local_output=False),
        "d": FusedColwiseParallel(parts=(8, 4, 4), num_heads=(4, 2, 2)),
        "d1": FusedColwiseParallel(parts=(8,)),
        "e": KeyValueParallel(num_heads=2),
        "f": ExpertParallel(parameter_placements={"up": Shard(2), "down": Shard(1)}),
        "g": ExpertParallel(
            input_layouts=(Replicate(), None), desired_input_layouts=(Shard(0), None)
        ),
        "h": ReplicateParallel(num_inputs=2),
        "i": PrepareModuleInput(
            input_layouts=(Shard(1), None),
            desired_input_layouts=(Replicate(), None),
            input_kwarg_layouts={"x": Shard(1)},
            desired_input_kwarg_layouts={"x": Replicate()},
        ),
        "j": PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Shard(-1)
        ),
        "k": PrepareModuleInputOutput(
            input_layouts=Shard(1),
            desired_input_layouts=Replicate(),
            output_layouts=Partial(),
            desired_output_layouts=Shard(1),
        ),
        'quo"ted': ColwiseParallel(),
    },
    heads={"a": 8, "layers.*.k": 2},
)


def test_every_style_survives_the_text_form(tmp_path):
    path = tmp_path / "plan.toml"
    EVERY_STYLE.save(path)
    assert Plan.load(path) == EVERY_STYLE


def test_the_text_form_says_only_what_is_not_default():
    plan = Plan(
        {
            "layers.*.up": ColwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        },
        heads={"layers.*.k": 8},
    )
    assert plan.to_toml() == (
        "[styles]\n"
        '"layers.*.up" = "ColwiseParallel"\n'
        '"head" = { style = "ColwiseParallel", output_layouts = "Replicate()" }\n'
        "\n"
        "[heads]\n"
        '"layers.*.k" = 8\n'
    )
    assert repr(plan) == (
        "Plan({'layers.*.up': ColwiseParallel(), 'head': "
        "ColwiseParallel(output_layouts=Replicate())}, heads={'layers.*.k': 8})"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[styles", r"plan.toml is not TOML: "),
        ("", r"there is no table \[styles\]"),
        ("[stiles]\n", r"\[stiles\] is unknown; did you mean 'styles'\?"),
        (
            '[styles]\nup = "ColwisParallel"',
            "'up': no style is called 'ColwisParallel'; did you mean 'ColwiseParallel'",
        ),
        ("[styles]\nup = 3", "'up': no style is called 3; known: ColwiseParallel, "),
        (
            '[styles]\nup = { style = "ColwiseParallel", output_layout = "Shard(0)" }',
            "ColwiseParallel has no argument 'output_layout'; did you mean "
            "'output_layouts'",
        ),
        (
            '[styles]\nup = { style = "ColwiseParallel", output_layouts = "Sharded" }',
            r"'up': 'Sharded' is no layout; write \"Replicate\(\)\"",
        ),
        (
            '[styles]\nup = { style = "ColwiseParallel", output_layouts = 1 }',
            "'up': ColwiseParallel: output_layouts is 1; a layout is",
        ),
        ('[styles]\nup = { style = "KeyValueParallel" }', "'up': .*num_heads"),
        ("heads = 1\n[styles]\n", r"\[heads\] is not a table from patterns to numbers"),
        ("[styles]\n[heads]\nk = -1\n", r"\[heads\] 'k': -1 is not a number of heads"),
    ],
)
def test_a_bad_text_form_names_the_entry_and_the_nearest_name(tmp_path, text, message):
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(PlanError, match=message):
        Plan.load(path)


def test_all_problems_of_a_file_come_at_once(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('[styles]\na = "A"\nb = "B"\n[heads]\nk = "many"\n')
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert str(caught.value).count("\n  * ") == 3


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(PlanError, match=r"the plan .*none.toml cannot be read"):
        Plan.load(tmp_path / "none.toml")


class OwnStyle(ParallelStyle):
    def _apply(self, module, device_mesh):
        return module


def test_a_style_of_the_user_has_no_text_form():
    with pytest.raises(PlanError, match="the styles of 'a' are none of Colwise"):
        Plan({"a": OwnStyle()}).to_toml()


def test_a_plan_is_a_frozen_mapping():
    given = {"a": ColwiseParallel()}
    plan = Plan(given)
    given["b"] = RowwiseParallel()
    assert dict(plan) == {"a": ColwiseParallel()}
    assert len(plan) == 1 and "a" in plan and plan["a"] == ColwiseParallel()
    plan.heads["a"] = 4
    assert plan.heads == {}
    with pytest.raises(TypeError):
        plan["b"] = RowwiseParallel()  # type: ignore[index]


def test_plans_compare_by_what_they_say():
    plan = Plan({"a": ColwiseParallel(), "b": RowwiseParallel()}, heads={"a": 2})
    same = Plan({"b": RowwiseParallel(), "a": ColwiseParallel()}, heads={"a": 2})
    assert plan == same and hash(plan) == hash(same)
    assert plan != Plan(plan)
    assert plan != dict(plan)
    assert copy.deepcopy(EVERY_STYLE) == EVERY_STYLE
    assert pickle.loads(pickle.dumps(EVERY_STYLE)) == EVERY_STYLE


def test_a_plan_is_put_over_another():
    plan = Plan({"a": ColwiseParallel()}, heads={"a": 2})
    both = plan | {"b": RowwiseParallel()} | Plan({}, heads={"b": 4})
    assert both == Plan(
        {"a": ColwiseParallel(), "b": RowwiseParallel()}, heads={"a": 2, "b": 4}
    )


def test_the_styles_of_torch_may_be_in_a_plan():
    assert len(Plan({"a": TorchColwise()})) == 1


@pytest.mark.parametrize(
    ("styles", "heads", "message"),
    [
        (ColwiseParallel(), None, "a plan maps patterns to styles; this is a Colwise"),
        ("plan.toml", None, r'a str\. .*or Plan\.load\("plan\.toml"\) to read a file'),
        (
            {"a": "ColwiseParallel"},
            None,
            r"'a': 'ColwiseParallel' is not a style; pass ColwiseParallel\(\); names are "
            "for TOML files",
        ),
        (
            {"a": RowwiseParallel},
            None,
            r"RowwiseParallel is a class; pass Rowwise.*\(\)",
        ),
        (
            {"a": 3},
            None,
            r"'a': 3 is not a style; pass one such as ColwiseParallel\(\)",
        ),
        ({1: ColwiseParallel()}, None, "the pattern 1 is not text"),
        ({}, {"a": -1}, r"heads\['a'\]: -1 is not a number of heads"),
    ],
)
def test_what_is_not_a_plan(styles, heads, message):
    with pytest.raises(PlanError, match=message):
        Plan(styles, heads=heads)


class WithToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(4))
        self.up, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)


def test_other_layers_that_no_style_covers_are_named():
    plan = Plan({"up": ColwiseParallel()})
    with pytest.raises(
        PlanError, match=r"'' \(WithToken\) has parameters of its own \(to"
    ):
        plan.replicate_others(WithToken())
    model = WithToken()
    model.token.requires_grad_(False)
    assert list(plan.replicate_others(model)) == ["up", "norm"]
