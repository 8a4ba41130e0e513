"""Plans that Hugging Face models carry, and those found from their graphs."""

import plan_families as families
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from torchspmd.errors import PlanError, PlanWarning
from torchspmd.parallel import (
    ColwiseParallel,
    ExpertParallel,
    FusedColwiseParallel,
    ReplicateParallel,
    RowwiseParallel,
    SequenceParallel,
)
from torchspmd.parallel.plan.auto import auto_plan
from torchspmd.parallel.plan.plan import Plan
from torchspmd.parallel.plan.text_form import read_toml

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed"
)

COLWISE, ROWWISE, WHOLE = ColwiseParallel(), RowwiseParallel(), Replicate()


def build(family, **options):
    config = getattr(transformers, f"{family}Config")(**families.SHAPE, **options)
    with torch.device("meta"):
        return getattr(transformers, f"{family}ForCausalLM")(config)


def gpt2():
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=64, bos_token_id=0, eos_token_id=0
    )
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel(config)


def test_llama_carries_the_usual_plan():
    layer = "model.layers.*"
    assert Plan.from_transformers(build("Llama")) == Plan(
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=WHOLE),
            f"{layer}.self_attn.q_proj": COLWISE,
            f"{layer}.self_attn.k_proj": COLWISE,
            f"{layer}.self_attn.v_proj": COLWISE,
            f"{layer}.self_attn.o_proj": ROWWISE,
            f"{layer}.mlp.gate_proj": COLWISE,
            f"{layer}.mlp.up_proj": COLWISE,
            f"{layer}.mlp.down_proj": ROWWISE,
            "lm_head": ColwiseParallel(output_layouts=WHOLE),
        }
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Mistral"])
def test_the_graph_gives_the_plan_that_the_model_carries(family, attention):
    model = build(family, attn_implementation=attention)
    assert auto_plan(model) == Plan.from_transformers(model)


def test_a_norm_between_shards_sums_its_gradients():
    model = build("Qwen3")
    plan = Plan.from_transformers(model)
    norm = SequenceParallel(sequence_dim=-2, use_local_output=True)
    assert plan["model.layers.*.self_attn.q_norm"] == norm
    assert auto_plan(model) == plan


def test_more_ranks_than_key_value_heads_is_refused_before_anything_is_done():
    model = build("Llama")
    with pytest.raises(PlanError) as caught:
        Plan.from_transformers(model).preview(model, {"tp": 4})
    assert (
        "'model.layers.[0-1].self_attn.k_proj', 'model.layers.[0-1].self_attn.v_proj' "
        "each: 2 heads (16 features, head_dim 8 of "
        "'model.layers.[0-1].self_attn') cannot be shared out whole over tp=4; use an "
        "axis of 1, 2 ranks"
    ) in str(caught.value)


def test_packed_experts_are_cut_inside_of_each():
    style = ExpertParallel(
        parameter_placements={"gate_up_proj": Shard(1), "down_proj": Shard(2)},
        packed={"gate_up_proj": 2},
        input_layouts=(WHOLE, None, WHOLE),
    )
    model = build("Mixtral")
    plan = Plan.from_transformers(model)
    assert plan["model.layers.*.mlp.experts"] == style
    assert auto_plan(model) == plan
    loaded = read_toml(plan.to_toml(), "plan.toml")[0]
    assert loaded == dict(plan)


def test_entries_without_a_counterpart_are_named():
    model = build("Mixtral")
    model._tp_plan = {
        "model.layers.*.mlp.experts.gate_up_proj": "interleaved_colwise",
        "model.layers.*.mlp.experts": "moe_tp_experts",
        "model.layers.*.mlp.experts.down_proj": "rowwise",
    }
    with pytest.raises(PlanError) as caught:
        Plan.from_transformers(model)
    assert str(caught.value) == (
        "Plan.from_transformers: MixtralForCausalLM has entries in its tp_plan that have "
        "no counterpart here\n\n"
        "  * 'model.layers.*.mlp.experts.gate_up_proj': 'interleaved_colwise' is no style "
        "here\n"
        "  * 'model.layers.*.mlp.experts': 'moe_tp_experts' is no style here\n"
        "  * 'model.layers.*.mlp.experts.down_proj': 'rowwise' for a name that no module "
        "has, a parameter perhaps\n\n"
        "Name them in leave= to keep these modules whole on every rank, and add styles "
        "of your own to the plan."
    )


def test_entries_for_what_the_model_does_not_have_are_told():
    model = build("Mixtral")
    wanted = Plan.from_transformers(model)
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp.gate_proj": "colwise"}
    with pytest.warns(
        PlanWarning, match=r"names 'model\.layers\.\*\.mlp\.gate_proj', whi"
    ):
        assert Plan.from_transformers(model) == wanted


def test_a_model_that_computes_its_loss_has_a_plan():
    model, tokens = build("Llama"), torch.zeros(2, 8, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    assert auto_plan(model, example_inputs=batch) == auto_plan(model)


def test_a_wrapper_that_puts_a_prefix_before_the_names():
    plan = Plan.from_transformers(families.build("peft"))
    layer = "base_model.model.model.layers.*"
    assert plan[f"{layer}.self_attn.k_proj"] == COLWISE
    assert plan[f"{layer}.self_attn.q_proj.base_layer"] == COLWISE
    assert plan[f"{layer}.self_attn.q_proj.lora_A.*"] == ReplicateParallel()
    assert plan[f"{layer}.self_attn.q_proj.lora_B.*"] == COLWISE
    assert plan[f"{layer}.mlp.down_proj.lora_A.*"] == ROWWISE
    assert plan[f"{layer}.mlp.down_proj.lora_B.*"] == ReplicateParallel()


def test_a_style_for_a_layer_with_an_adapter_names_the_layers_inside():
    model = families.build("peft")
    plan = Plan({"base_model.model.model.layers.*.self_attn.q_proj": COLWISE})
    with pytest.raises(
        PlanError, match=r"inside of it \('base_layer', 'lora_A.default'"
    ):
        plan.preview(model, {"tp": 2})


@pytest.mark.parametrize("masked", [False, True])
def test_bert_is_judged_on_shapes_also_with_a_mask(masked):
    model = families.build("bert")
    plan = auto_plan(model, leave=("cls.predictions.transform.dense",))
    ids = torch.zeros(2, 8, dtype=torch.long)
    inputs = {"input_ids": ids} | ({"attention_mask": ids + 1} if masked else {})
    preview = plan.preview(model, {"tp": 2}, example_inputs=inputs)
    assert preview.notes[0].startswith(
        "Shapes are those of a run on input_ids=int64[2,"
    )


def test_what_is_left_stays_whole():
    model = build("Mixtral")
    plan = Plan.from_transformers(model, leave=("*.experts*",))
    preview = plan.preview(model, {"tp": 2}, batch=1, seq=8)
    rows = {row.name: row for row in preview.rows}
    assert rows["model.layers.[0-1].mlp.experts.gate_up_proj"].is_replicated
    assert preview.notes == ("Shapes are those of a run on int64[1, 8].",)
    with pytest.raises(PlanError, match=r"leave= names '\*.expert' \(nearest: "):
        Plan.from_transformers(model, leave=("*.expert",))


@pytest.mark.parametrize("model", [gpt2, lambda: nn.Linear(2, 2)])
def test_a_model_without_a_plan_is_refused(model):
    with pytest.raises(PlanError, match=r"carries no tp_plan\. Write a Plan by hand"):
        Plan.from_transformers(model())


def test_gpt2_has_fused_projections_and_transposed_weights():
    plan = auto_plan(gpt2())
    fused = FusedColwiseParallel(parts=(32,) * 3, num_heads=(4,) * 3, split_whole=True)
    assert plan["transformer.h.*.attn.c_attn"] == fused
    assert plan["transformer.h.*.mlp.c_fc"] == COLWISE
    rows = {row.name: row for row in plan.preview(gpt2(), {"tp": 2}).rows}
    assert rows["transformer.h.[0-1].attn.c_attn.weight"].local_shapes == ((32, 48),)
    assert rows["transformer.h.[0-1].mlp.c_proj.weight"].local_shapes == ((64, 32),)


def test_replicate_is_no_style():
    class Model(nn.Module):
        tp_plan = {"up": "colwise", "scale": "replicate"}  # noqa: RUF012

        def __init__(self):
            super().__init__()
            self.up = nn.Linear(2, 2)

    assert Plan.from_transformers(Model()) == Plan({"up": COLWISE})
