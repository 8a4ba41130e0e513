"""Models under plans from transformers and from their graph, against one device."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from plan_families import SHAPE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from torchspmd.parallel import parallelize_module
from torchspmd.parallel.plan.auto import auto_plan
from torchspmd.parallel.plan.plan import Plan
from torchspmd.testing import Ranks


class Attention(nn.Module):
    def __init__(self, width, head_dim):
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.o = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for p in (self.q, self.k, self.v)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))


class Tiny(nn.Module):
    """A transformer with a tied head, which nothing but its graph describes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 24)
        self.attention = Attention(24, 4)
        self.norm = nn.LayerNorm(24)
        self.up = nn.Linear(24, 36)
        self.down = nn.Linear(36, 24)
        self.head = nn.Linear(24, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(self.norm(x))
        x = x + self.down(F.gelu(self.up(x)))
        return self.head(x)


def build(family: str, tied: bool = False) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{family}Config")(**SHAPE, tie_word_embeddings=tied)
    if family == "Mixtral":
        config.num_local_experts = 2
    return getattr(transformers, f"{family}ForCausalLM")(config)


def train_once(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    output = model(tokens)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.step()
    return logits.detach()


def differences(model: nn.Module, plan: Plan) -> dict[str, float]:
    """The largest difference to one device of the logits and of each new parameter."""
    single = copy.deepcopy(model)
    tokens = torch.randint(16, (2, 6))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    parallel = parallelize_module(model, mesh, plan)
    expected, got = train_once(single, tokens), train_once(parallel, tokens)
    result = {"logits": (expected - got).abs().max().item()}
    sharded = 0
    state = parallel.state_dict()
    for name, value in single.state_dict().items():
        new = state[name]
        if isinstance(new, DTensor):
            sharded += not new.placements[0].is_replicate()
            new = new.full_tensor()
        result[name] = (new - value).abs().max().item()
    return result | {"sharded": -sharded}


def transformers_differences(family, tied, leave):
    model = build(family, tied)
    return differences(model, Plan.from_transformers(model, leave=leave))


def shared_differences(family):
    model = build(family)
    plan = Plan.from_transformers(model)
    shared = plan.share_inputs(model)
    assert len(shared) == len(plan) + 2
    return differences(model, shared)


def auto_differences():
    model = Tiny()
    return differences(model, auto_plan(model).share_inputs(model))


def check(results: list[dict[str, float]], num_sharded: int) -> None:
    for result in results:
        assert -result.pop("sharded") == num_sharded
        assert max(result.values()) < 2e-5, result


@pytest.mark.parametrize(
    ("family", "tied", "leave", "num_sharded"),
    [
        ("Llama", False, (), 16),
        ("Llama", True, (), 16),
        ("Qwen2", False, (), 22),
        ("Qwen3", False, (), 16),
        ("Mixtral", False, ("*.mlp.experts*",), 10),
    ],
)
def test_a_transformers_model_trains_as_on_one_device(
    ranks2: Ranks, family, tied, leave, num_sharded
):
    pytest.importorskip("transformers", reason="transformers is not installed")
    results = ranks2.run(transformers_differences, family, tied, leave)
    check(results, num_sharded)


def test_an_inferred_plan_trains_as_on_one_device(ranks2: Ranks, ranks3: Ranks):
    for ranks in (ranks2, ranks3):
        check(ranks.run(auto_differences), 12)


@pytest.mark.parametrize(("family", "num_sharded"), [("Llama", 16), ("Qwen3", 16)])
def test_shared_inputs_train_as_on_one_device(ranks2: Ranks, family, num_sharded):
    pytest.importorskip("transformers", reason="transformers is not installed")
    check(ranks2.run(shared_differences, family), num_sharded)
