"""Plans that Hugging Face models carry, and those found from their graphs."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate

from torchspmd.errors import PlanError
from torchspmd.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torchspmd.parallel.plan.auto import auto_plan
from torchspmd.parallel.plan.plan import Plan

pytestmark = pytest.mark.unit
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed"
)

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
COLWISE, ROWWISE, WHOLE = ColwiseParallel(), RowwiseParallel(), Replicate()


def build(family, **options):
    config = getattr(transformers, f"{family}Config")(**SHAPE, **options)
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
    with pytest.raises(
        PlanError, match=r"the parameter '.*q_norm.weight' is used on them"
    ):
        auto_plan(model)


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


def test_mixtral_is_refused_by_entry():
    with pytest.raises(PlanError) as caught:
        Plan.from_transformers(build("Mixtral"))
    assert str(caught.value) == (
        "Plan.from_transformers: MixtralForCausalLM has entries in its tp_plan that have "
        "no counterpart here\n\n"
        "  * 'model.layers.*.mlp.experts.gate_up_proj': 'packed_colwise' is no style "
        "here\n"
        "  * 'model.layers.*.mlp.experts.down_proj': 'rowwise' for a parameter that no "
        "module of its own holds\n"
        "  * 'model.layers.*.mlp.experts': 'moe_tp_experts' is no style here\n\n"
        "Name them in leave= to keep these modules whole on every rank, and add styles "
        "of your own to the plan."
    )


def test_what_is_left_stays_whole():
    model = build("Mixtral")
    plan = Plan.from_transformers(model, leave=("*.experts*",))
    preview = plan.preview(model, {"tp": 2}, batch=1, seq=8)
    rows = {row.name: row for row in preview.rows}
    assert rows["model.layers.[0-1].mlp.experts.gate_up_proj"].is_replicated
    assert preview.notes[0].startswith("The model does not run on shapes alone")
    with pytest.raises(PlanError, match=r"leave= names '\*.expert' \(nearest: "):
        Plan.from_transformers(model, leave=("*.expert",))


@pytest.mark.parametrize("model", [gpt2, lambda: nn.Linear(2, 2)])
def test_a_model_without_a_plan_is_refused(model):
    with pytest.raises(PlanError, match=r"carries no tp_plan\. Write a Plan by hand"):
        Plan.from_transformers(model())


def test_gpt2_is_refused_by_module():
    with pytest.raises(PlanError) as caught:
        auto_plan(gpt2())
    text = str(caught.value)
    assert "  * 'transformer.h.[0-1].attn.c_attn', 'transformer.h.[0-1].attn.c_" in text
    assert "'transformer.h.[0-1].mlp.c_proj' each: Conv1D has parameters of its" in text


def test_replicate_is_no_style():
    class Model(nn.Module):
        tp_plan = {"up": "colwise", "scale": "replicate"}  # noqa: RUF012

        def __init__(self):
            super().__init__()
            self.up = nn.Linear(2, 2)

    assert Plan.from_transformers(Model()) == Plan({"up": COLWISE})
