"""Model families whose plans need more than Linears in pairs, and plans for them."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from torchspmd.parallel import (
    ColwiseParallel,
    ExpertParallel,
    FusedColwiseParallel,
    Plan,
    ReplicateParallel,
    RowwiseParallel,
    auto_plan,
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
TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


class FusedAttention(nn.Module):
    """As nanoGPT has it: sizes of one device in the forward."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head, self.n_embd = num_heads, width

    def forward(self, x):
        batch, tokens, width = x.size()
        size = width // self.n_head
        q, k, v = (
            part.view(batch, tokens, self.n_head, size).transpose(1, 2)
            for part in self.c_attn(x).split(self.n_embd, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(batch, tokens, width)
        return self.c_proj(y)


class NanoGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(64, 32), nn.Embedding(16, 32)
        self.ln, self.attn = nn.LayerNorm(32), FusedAttention(32, 4)
        self.c_fc, self.c_proj = nn.Linear(32, 96), nn.Linear(96, 32)
        self.lm_head = nn.Linear(32, 64, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1), device=ids.device))
        x = x + self.attn(self.ln(x))
        return self.lm_head(x + self.c_proj(F.gelu(self.c_fc(x))))


class LoraLinear(nn.Module):
    """A layer with an adapter, under the names that PEFT gives them."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        first, second = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )
        self.lora_A = nn.ModuleDict({"default": first})
        self.lora_B = nn.ModuleDict({"default": second})
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})

    def forward(self, x):
        low = self.lora_A["default"](self.lora_dropout["default"](x))
        return self.base_layer(x) + self.lora_B["default"](low) * 2.0


class PeftModel(nn.Module):
    """Puts a prefix before the names, and passes attributes on, as PEFT does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model.model, name)

    def forward(self, *args, **kwargs):
        return self.base_model.model(*args, **kwargs)


def transformers_model(family: str, kind: str = "ForCausalLM", **options) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = getattr(transformers, f"{family}Config")(**{**options, **TOKENS})
    return getattr(transformers, f"{family}{kind}")(config)


def build(name: str) -> nn.Module:
    if name == "nanogpt":
        return NanoGPT()
    if name == "gpt2":
        sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 64}
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return transformers_model("GPT2", "LMHeadModel", **sizes, **dropouts)
    if name == "bert":
        dropouts = ("hidden_dropout_prob", "attention_probs_dropout_prob")
        bert = {**SHAPE, **dict.fromkeys(dropouts, 0.0)}
        return transformers_model("Bert", "ForMaskedLM", **bert)
    if name == "peft":
        model = transformers_model("Llama", **SHAPE)
        for layer in model.model.layers:
            for owner, names in (
                (layer.self_attn, ("q_proj", "v_proj", "o_proj")),
                (layer.mlp, ("gate_proj", "down_proj")),
            ):
                for each in names:
                    setattr(owner, each, LoraLinear(getattr(owner, each)))
        return PeftModel(model)
    if name == "mixtral":
        return transformers_model("Mixtral", **SHAPE, num_local_experts=4)
    if name == "gemma3":
        import transformers

        config = transformers.Gemma3TextConfig(**SHAPE, pad_token_id=0)
        return transformers.Gemma3ForCausalLM(config)
    return transformers_model(name, **SHAPE)


def hand_written(name: str, model: nn.Module) -> Plan:
    if name == "gpt2":
        block = "transformer.h.*"
        qkv = FusedColwiseParallel(
            parts=(32,) * 3, num_heads=(4,) * 3, split_whole=True
        )
        return Plan(
            {
                f"{block}.attn.c_attn": qkv,
                f"{block}.attn.c_proj": RowwiseParallel(),
                f"{block}.mlp.c_fc": ColwiseParallel(),
                f"{block}.mlp.c_proj": RowwiseParallel(),
            }
        )
    if name == "nanogpt":
        qkv = FusedColwiseParallel(
            parts=(32,) * 3, split_whole=True, use_local_output=False
        )
        return Plan({"attn.c_attn": qkv, "attn.c_proj": RowwiseParallel()})
    if name == "mixtral":
        experts = ExpertParallel(
            parameter_placements={"gate_up_proj": Shard(1), "down_proj": Shard(2)},
            packed={"gate_up_proj": 2},
            input_layouts=(Replicate(), None, Replicate()),
        )
        return Plan({"model.layers.*.mlp.experts": experts})
    if name == "peft":
        layer = "base_model.model.model.layers.*.self_attn"
        down = "base_model.model.model.layers.*.mlp"
        return Plan(
            {
                f"{layer}.[qv]_proj.base_layer": ColwiseParallel(),
                f"{layer}.[qv]_proj.lora_B.default": ColwiseParallel(),
                f"{layer}.k_proj": ColwiseParallel(),
                f"{layer}.o_proj.base_layer": RowwiseParallel(),
                f"{layer}.o_proj.lora_A.default": RowwiseParallel(),
                f"{down}.up_proj": ColwiseParallel(),
                f"{down}.gate_proj.base_layer": ColwiseParallel(),
                f"{down}.gate_proj.lora_A.default": ReplicateParallel(),
                f"{down}.gate_proj.lora_B.default": ColwiseParallel(),
                f"{down}.down_proj.base_layer": RowwiseParallel(),
                f"{down}.down_proj.lora_A.default": RowwiseParallel(),
            }
        )
    return Plan.from_transformers(model)


def make_plan(name: str, model: nn.Module, kind: str) -> Plan:
    if kind == "auto":
        left = ("cls.predictions.transform.dense",) if name == "bert" else ()
        return auto_plan(model, leave=left)
    carried = kind == "carried"
    return Plan.from_transformers(model) if carried else hand_written(name, model)
