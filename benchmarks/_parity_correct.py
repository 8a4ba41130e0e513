"""Right configurations: models, layouts, meshes, optimizers, steps and dtypes."""

import functools
from collections.abc import Callable
from typing import Any

import _parity_plans as plans
import torch
import torch.nn.functional as F
from _parity_bugs import (
    accumulated_step,
    clipped_step,
    gpt,
    net,
    sharded_head,
    smoothed_step,
)
from _parity_models import (
    VOCAB,
    build_gpt,
    build_net,
    features,
    loss_of,
    tokens,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)

from torchspmd import Plan, auto_plan, local_map, parallelize_module
from torchspmd.parallel import FusedColwiseParallel, RowwiseParallel
from torchspmd.step import DataParallel
from torchspmd.verify import RunOptions

SGD = torch.optim.SGD
partial = functools.partial


def model(**options: Any) -> Callable[[], nn.Module]:
    return partial(build_gpt, **options)


def spread(plan: str) -> Callable[..., Any]:
    return partial(plans.tensor, plan=plan)


class Fused(nn.Module):
    """Attention whose three projections are one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        q, k, v = (
            part.unflatten(-1, (-1, 4)).transpose(1, 2)
            for part in self.qkv(self.embed(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(self.out(mixed.transpose(1, 2).flatten(2)))


def fused(model: Any, mesh: DeviceMesh) -> None:
    styles = {"qkv": FusedColwiseParallel(parts=(32, 32, 32)), "out": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], styles)


@local_map(out_placements=[Partial()], in_placements=([Shard(-1)], [Shard(1)]))
def row_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One term of a product: features of the input are sharded."""
    return x @ weight.T


class Mapped(nn.Module):
    """A layer that is a local function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 16), nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        hidden = F.gelu(self.first(x))
        weight: Any = self.last.weight
        if not hasattr(weight, "device_mesh"):
            return row_product(hidden, weight) + self.last.bias
        mesh = weight.device_mesh
        everywhere = DTensor.from_local(hidden, mesh, [Replicate()])
        shard = everywhere.redistribute(placements=[Shard(-1)])
        whole = row_product(shard, weight).redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Replicate()]) + self.last.bias


def mapped(model: Any, mesh: DeviceMesh) -> None:
    placed = distribute_tensor(model.last.weight, mesh["tp"], [Shard(1)])
    model.last.weight = nn.Parameter(placed)


class Experts(nn.Module):
    """A convolution and a frozen layer: not everything is a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.frozen = nn.Linear(48, 16).requires_grad_(False)
        self.last = nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        return self.last(F.relu(self.frozen(F.relu(self.conv(x[:, None])).flatten(1))))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def llama_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y.flatten())


def llama_plan(model: Any, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh["tp"], Plan.from_transformers(model))


def automatic(model: Any, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh["tp"], auto_plan(model))


def summed_step(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="sum") / 50


def compiled_step(model: Any, optim: Any, batch: Any) -> torch.Tensor:
    loss, _ = loss_of(model, batch)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *rest = parameters
    groups = [{"params": [first], "lr": 0.05}, {"params": rest}]
    return torch.optim.AdamW(groups, lr=0.003)


TP, TP2, TP3 = {"tp": 4}, {"tp": 2}, {"tp": 3}
DP, DP2 = {"dp": 4}, {"dp": 2}
BOTH = {"dp": 2, "tp": 2}
HYBRID = {"dp_replicate": 2, "dp_shard": 2}
ADAMW = plans.adamw
ADAGRAD = partial(torch.optim.Adagrad, lr=0.05)
RMSPROP = partial(torch.optim.RMSprop, lr=0.003)
ADAM_FUSED = partial(torch.optim.Adam, lr=0.003, fused=True)
hybrid = partial(plans.fsdp, axes=("dp_replicate", "dp_shard"))
compiled = partial(net, step=compiled_step, parallelize=None)
average = {"parallel_mode": DataParallel("replicate", reduce="avg")}
F64 = torch.float64

CORRECT: dict[str, dict[str, Any]] = {
    # tensor parallelism
    "tp4": gpt(),
    "tp4, AdamW": gpt(optimizer=ADAMW),
    "tp4, float64": gpt(dtype=F64, optimizer=ADAMW),
    "tp4, bfloat16": gpt(dtype=torch.bfloat16),
    "tp2": gpt(mesh=TP2),
    "tp3, uneven vocabulary": gpt(
        mesh=TP3, build_model=model(width=24, vocab=50), parallelize=spread("vocabulary")
    ),
    "tp3": gpt(mesh=TP3, build_model=model(width=24)),
    "tp4, vocabulary": gpt(parallelize=spread("vocabulary")),
    "tp4, vocabulary, RMSprop": gpt(parallelize=spread("vocabulary"), optimizer=RMSPROP),
    "tp4, vocabulary, tied": gpt(
        build_model=model(tied=True), parallelize=spread("vocabulary"), optimizer=ADAMW
    ),
    "tp4, sequence": gpt(parallelize=spread("sequence")),
    "tp4, sequence, AdamW": gpt(parallelize=spread("sequence"), optimizer=ADAMW),
    "tp2, sequence, float64": gpt(mesh=TP2, parallelize=spread("sequence"), dtype=F64),
    "tp4, sequence, dropout": gpt(
        build_model=model(dropout=0.2), parallelize=spread("sequence")
    ),
    "tp4, dropout": gpt(build_model=model(dropout=0.2)),
    "tp4, recompute": gpt(build_model=model(recompute=True)),
    "tp4, sequence, recompute": gpt(
        build_model=model(recompute=True), parallelize=spread("sequence")
    ),
    "tp4, no biases": gpt(build_model=model(bias=False), optimizer=ADAMW),
    "tp4, four layers": gpt(build_model=model(layers=4), optimizer=ADAMW),
    "tp4, clipped": gpt(step=partial(clipped_step, right=True)),
    "tp4, label smoothing": gpt(
        step=partial(smoothed_step, right=True), parallelize=sharded_head
    ),
    "tp4, by hand": gpt(parallelize=plans.manual),
    "tp4, by hand, AdamW": gpt(parallelize=plans.manual, optimizer=ADAMW),
    "tp4, by hand, vocabulary": gpt(
        parallelize=partial(plans.manual, mistakes={"embed": {}})
    ),
    "tp4, fused query, key, value": gpt(build_model=Fused, parallelize=fused),
    "tp2, auto_plan": gpt(mesh=TP2, parallelize=automatic),
    "tp4, Llama": gpt(
        build_model=llama, step=llama_loss, parallelize=llama_plan, optimizer=ADAMW
    ),
    "tp2, local function": net(mesh=TP2, build_model=Mapped, parallelize=mapped),
    "tp4, local function": net(mesh=TP, build_model=Mapped, parallelize=mapped),
    "tp4, another batch each step": gpt(batch=tokens, steps=4),
    # data parallelism
    "ddp4": gpt(mesh=DP, parallelize=plans.ddp),
    "ddp2, AdamW": gpt(mesh=DP2, parallelize=plans.ddp, optimizer=ADAMW),
    "ddp4, two groups": net(optimizer=two_groups),
    "ddp4, loss only": net(step=loss_of),
    "ddp4, micro-batches": net(
        step=partial(accumulated_step, right=True), mesh=DP2
    ),
    "ddp4, convolution and frozen layer": net(build_model=Experts),
    "ddp2, recompute": gpt(
        mesh=DP2, build_model=model(recompute=True), parallelize=plans.ddp
    ),
    "fsdp4": gpt(mesh=DP, parallelize=plans.fsdp),
    "fsdp4, AdamW": gpt(mesh=DP, parallelize=plans.fsdp, optimizer=ADAMW),
    "fsdp2, tied": gpt(mesh=DP2, build_model=model(tied=True), parallelize=plans.fsdp),
    "fsdp4, Adagrad, another batch each step": net(
        parallelize=plans.fsdp, optimizer=ADAGRAD, batch=features
    ),
    "hybrid 2 x 2": gpt(mesh=HYBRID, parallelize=hybrid, optimizer=ADAMW),
    # both
    "fsdp2 x tp2": gpt(mesh=BOTH, parallelize=plans.fsdp_tensor),
    "fsdp2 x tp2, sequence, AdamW": gpt(
        mesh=BOTH,
        parallelize=partial(plans.fsdp_tensor, plan="sequence"),
        optimizer=ADAMW,
    ),
    "ddp2 x tp2": gpt(mesh=BOTH, parallelize=plans.ddp_tensor),
    "ddp2 x tp2, AdamW, float64": gpt(
        mesh=BOTH, parallelize=plans.ddp_tensor, optimizer=ADAMW, dtype=F64
    ),
    # compiled steps
    "compiled, 2 ranks": compiled(mesh=DP2, compile=True),
    "compiled, 4 ranks, batch norm": compiled(
        compile=True, build_model=partial(build_net, batch_norm=True)
    ),
    "compiled, average of gradients": compiled(compile=average, optimizer=ADAM_FUSED),
    "compiled, GPT": gpt(
        mesh=DP2, step=compiled_step, parallelize=None, compile=True,
        build_model=model(layers=1),
    ),
    "compiled, average, Adam": compiled(compile=average, mesh=DP2, optimizer=ADAMW),
    "one step": gpt(steps=1),
    "sum of losses": net(
        step=summed_step, parallelize=None, compile=True,
        run=RunOptions(loss_reduction="sum"),
    ),
}  # fmt: skip
