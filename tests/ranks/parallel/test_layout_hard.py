"""Layouts that break elsewhere, against one device: step and full state dict."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from tp_parity import CLOSE, assert_same_state, check_model, full, tp_mesh

from torchspmd.parallel import (
    ColwiseParallel,
    ExpertParallel,
    FusedColwiseParallel,
    KeyValueParallel,
    ReplicateParallel,
    RowwiseParallel,
    parallelize_module,
    vocab_parallel_cross_entropy,
)
from torchspmd.testing import Ranks


def train(model: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    """Two steps; what the model returns after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3, foreach=False)
    for _ in range(2):
        optimizer.zero_grad()
        model(*inputs).square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        return full(model(*inputs))


def check_training(model: nn.Module, plan: Any, *inputs: torch.Tensor) -> None:
    """Train both, compare results and states, and carry the state dict around."""
    reference = model.double()
    parallel = parallelize_module(copy.deepcopy(reference), tp_mesh(), plan)
    assert_same_state(parallel, reference)
    expected = train(reference, *inputs)
    torch.testing.assert_close(train(parallel, *inputs), expected, **CLOSE)
    assert_same_state(parallel, reference)
    check_round_trip(parallel, reference)


def check_round_trip(parallel: nn.Module, reference: nn.Module) -> None:
    """Full state out, plain state in, and back: bit for bit."""
    options = StateDictOptions(full_state_dict=True)
    before = get_model_state_dict(parallel, options=options)
    assert list(before) == list(reference.state_dict())
    for parameter in parallel.parameters():
        with torch.no_grad():
            parameter.zero_()
    set_model_state_dict(parallel, dict(before), options=options)
    after = get_model_state_dict(parallel, options=options)
    for name, value in after.items():
        assert torch.equal(value, before[name]), name
    sharded = {name: value.clone() for name, value in parallel.state_dict().items()}
    for parameter in parallel.parameters():
        with torch.no_grad():
            parameter.zero_()
    parallel.load_state_dict(sharded)
    for name, value in parallel.state_dict().items():
        assert torch.equal(full(value), before[name]), name


class FusedAttention(nn.Module):
    """Attention with one projection; ``kv_heads`` may be fewer than the query heads."""

    def __init__(self, heads: int = 12, kv_heads: int = 12, bias: bool = True) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, 2
        self.qkv = nn.Linear(8, (heads + 2 * kv_heads) * 2, bias=bias)
        self.out = nn.Linear(heads * 2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected = self.qkv(x).unflatten(-1, (-1, self.size))
        num_ranks = 1 if not isinstance(self.out.weight, DTensor) else tp_mesh().size()
        heads = self.heads // num_ranks
        kv_heads = max(self.kv_heads // num_ranks, 1)
        q, k, v = projected.split((heads, kv_heads, kv_heads), dim=-2)
        k, v = (t.repeat_interleave(heads // kv_heads, dim=-2) for t in (k, v))
        scores = torch.einsum("bshd,bthd->bhst", q, k).softmax(-1)
        return self.out(torch.einsum("bhst,bthd->bshd", scores, v).flatten(-2))


def fused_qkv() -> None:
    value = torch.randn(2, 5, 8, dtype=torch.float64)
    for kv_heads in (12, 1) if tp_mesh().size() == 3 else (12, 4, 2, 1):
        if kv_heads % tp_mesh().size() and tp_mesh().size() % kv_heads:
            continue
        sizes = (24, 2 * kv_heads, 2 * kv_heads)
        style = FusedColwiseParallel(parts=sizes, num_heads=(12, kv_heads, kv_heads))
        plan = {"qkv": style, "out": RowwiseParallel()}
        for bias in (True, False):
            model = FusedAttention(kv_heads=kv_heads, bias=bias)
            check_training(model, plan, value)


@pytest.mark.parametrize("ranks", (2, 3, 4), indirect=True)
def test_fused_qkv_with_many_and_few_key_value_heads(ranks: Ranks) -> None:
    ranks.run(fused_qkv)


class GatedMLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(8, 2 * hidden)
        self.down = nn.Linear(hidden, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def gate_up() -> None:
    value = torch.randn(4, 8, dtype=torch.float64)
    for hidden in (12, 7, 4):
        style = FusedColwiseParallel(parts=(hidden, hidden))
        plan = {"gate_up": style, "down": RowwiseParallel()}
        check_training(GatedMLP(hidden), plan, value)


def test_fused_gate_and_up_even_and_uneven(ranks: Ranks) -> None:
    ranks.run(gate_up)


class GroupedAttention(nn.Module):
    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(8, 24), nn.Linear(24, 8)
        self.k, self.v = nn.Linear(8, 2 * kv_heads), nn.Linear(8, 2 * kv_heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 2)) for p in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(q.size(-2) // k.size(-2), dim=-2) for t in (k, v))
        scores = torch.einsum("bshd,bthd->bhst", q, k).softmax(-1)
        return self.out(torch.einsum("bhst,bthd->bshd", scores, v).flatten(-2))


def grouped_query() -> None:
    value = torch.randn(2, 5, 8, dtype=torch.float64)
    for kv_heads in (1, 2, 6, 12):
        if kv_heads % tp_mesh().size() and tp_mesh().size() % kv_heads:
            continue
        style = KeyValueParallel(num_heads=kv_heads)
        plan = {"q": ColwiseParallel(), "[kv]": style, "out": RowwiseParallel()}
        check_training(GroupedAttention(kv_heads), plan, value)


@pytest.mark.parametrize("ranks", (2, 3, 4), indirect=True)
def test_fewer_key_value_heads_than_ranks(ranks: Ranks) -> None:
    ranks.run(grouped_query)


class TiedModel(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embed(tokens))))


def tied_embeddings() -> None:
    mesh = tp_mesh()
    for vocabulary in (12, 13, 4):
        tokens = torch.randint(0, vocabulary, (4, 5))
        reference = TiedModel(vocabulary).double()
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(),
        }
        parallel = parallelize_module(copy.deepcopy(reference), mesh, plan)
        assert parallel.head.weight is parallel.embed.weight
        optimizers = [
            torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, parallel)
        ]
        for _ in range(2):
            logits = reference(tokens)
            expected = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            found = vocab_parallel_cross_entropy(
                parallel(tokens), tokens, mesh=mesh, num_classes=vocabulary
            )
            torch.testing.assert_close(found, expected, **CLOSE)
            for optimizer, loss in zip(optimizers, (expected, found), strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        assert_same_state(parallel, reference)
        check_round_trip(parallel, reference)
        assert parallel.head.weight is parallel.embed.weight


def test_tied_embeddings_of_any_vocabulary(ranks: Ranks) -> None:
    ranks.run(tied_embeddings)


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2 * self.b(self.a(x))


def build_lora() -> nn.Module:
    up, down = LoRA(nn.Linear(8, 14)), LoRA(nn.Linear(14, 8))
    return nn.Sequential(up, nn.ReLU(), down)


LORA_PLAN = {
    "0.base": ColwiseParallel(),
    "0.a": ReplicateParallel(),
    "0.b": ColwiseParallel(),
    "2.base": RowwiseParallel(),
    "2.a": RowwiseParallel(),
    "2.b": ReplicateParallel(),
}


def lora() -> None:
    value = torch.randn(4, 8, dtype=torch.float64)
    model = check_model(build_lora, LORA_PLAN, (value,))
    assert model[0].base.weight.grad is None
    check_training(build_lora(), LORA_PLAN, value)


def test_lora_beside_parallel_linears(ranks: Ranks) -> None:
    ranks.run(lora)


class Experts(nn.Module):
    """Stacked experts with a dense router, as in Mixtral-like models."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, 8, 12) / 4)
        self.down = nn.Parameter(torch.randn(count, 12, 8) / 4)

    def forward(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(torch.einsum("td,edh->teh", x, self.up))
        return torch.einsum("teh,ehd,te->td", hidden, self.down, gates)


class Mixture(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, count), Experts(count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x)
        kept = scores.topk(2, dim=-1)
        gates = torch.zeros_like(scores).scatter(
            -1, kept.indices, kept.values.softmax(-1)
        )
        return x + self.experts(x, gates)


def experts() -> None:
    value = torch.randn(6, 8, dtype=torch.float64)
    whole = (Replicate(), Replicate())
    by_expert = ExpertParallel(
        input_layouts=whole, desired_input_layouts=(Replicate(), Shard(-1))
    )
    by_width = ExpertParallel(
        parameter_placements={"up": Shard(2), "down": Shard(1)}, input_layouts=whole
    )
    for count in (12, 5, 4):
        for style in (by_expert, by_width):
            plan = {"router": ReplicateParallel(), "experts": style}
            check_training(Mixture(count), plan, value)


def test_stacked_experts(ranks: Ranks) -> None:
    ranks.run(experts)


class ScaledExperts(Experts):
    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return super().forward(x, gates) * self.scale


def replicated_beside_experts() -> None:
    model = Mixture(4)
    model.experts = ScaledExperts(4)
    style = ExpertParallel(
        parameter_placements={"up": Shard(0), "down": Shard(0), "scale": Replicate()},
        input_layouts=(Replicate(), Replicate()),
        desired_input_layouts=(Replicate(), Shard(-1)),
    )
    plan = {"router": ReplicateParallel(), "experts": style}
    value = torch.randn(6, 8, dtype=torch.float64)
    check_training(model, plan, value)


def test_a_replicated_parameter_beside_sharded_experts(ranks2: Ranks) -> None:
    ranks2.run(replicated_beside_experts)


def reset_fused() -> None:
    style = FusedColwiseParallel(parts=(4, 4, 4), num_heads=(2, 1, 1))
    layer = parallelize_module(nn.Linear(8, 12), tp_mesh(), style)
    torch.manual_seed(7 + dist.get_rank())
    layer.reset_parameters()
    torch.manual_seed(7)
    assert_same_state(layer, nn.Linear(8, 12))
    for parameter in layer.parameters():
        if parameter.placements == (Replicate(),):
            values = [torch.empty_like(parameter.to_local()) for _ in range(2)]
            dist.all_gather(values, parameter.to_local())
            assert torch.equal(*values)


def test_a_fused_layer_resets_to_the_values_of_one_device(ranks2: Ranks) -> None:
    ranks2.run(reset_fused)
