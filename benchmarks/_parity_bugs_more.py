"""More planted bugs, written after the patterns of the first set were in place."""

from typing import Any

import _parity_plans as plans
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _parity_bugs import (
    ALL,
    DP,
    LOSS,
    OPTIMIZER,
    OTHER_GRADIENTS,
    OTHER_VALUES,
    Bug,
    gpt,
    net,
    spoiled,
    tied_gpt,
)
from _parity_bugs import net_with_norm as build_norm
from _parity_models import HEAD, VOCAB, loss_of, tokens
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torchspmd.verify import RunOptions

# --- in a module ----------------------------------------------------------------------


def other_epsilon(model: Any, mesh: DeviceMesh) -> None:
    model.layers[1].norm1.eps = 0.05


def other_gelu(model: Any, mesh: DeviceMesh) -> None:
    mlp = model.layers[0].mlp
    mlp.forward = lambda x: mlp.down(F.gelu(mlp.up(x), approximate="tanh"))


def not_causal(model: Any, mesh: DeviceMesh) -> None:
    attention = model.layers[1].attention

    def forward(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for layer in (attention.q, attention.k, attention.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        return attention.o(mixed.transpose(1, 2).flatten(2))

    attention.forward = forward


def residual_twice(model: Any, mesh: DeviceMesh) -> None:
    block = model.layers[0]
    block.inner = lambda x: block.drop(
        2 * x + block.attention(block.norm1(x)) + block.mlp(block.norm2(x))
    )


def shifted_positions(model: Any, mesh: DeviceMesh) -> None:
    def shift(_: nn.Module, args: Any) -> Any:
        return (args[0].roll(1),)

    model.position.register_forward_pre_hook(shift)


def bias_gradient(model: Any, mesh: DeviceMesh) -> None:
    bias = model.layers[0].attention.o.bias
    bias.register_hook(lambda gradient: gradient * mesh["tp"].size())


def cut_embedding(model: Any, mesh: DeviceMesh) -> None:
    model.embed.register_forward_hook(lambda _, args, output: output.detach())


def norm_in_eval(model: Any, mesh: DeviceMesh) -> None:
    model.bn.eval()


def broadcast_forgotten(model: Any, mesh: DeviceMesh) -> None:
    with torch.no_grad():
        model.norm.weight.add_(0.1 * dist.get_rank())


# --- in the reduction -----------------------------------------------------------------


def fsdp_in_bfloat16(model: Any, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)


def fsdp_reduces_in_bfloat16(model: Any, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)


# --- in the step ----------------------------------------------------------------------


def clip_then_reduce(model: Any, optim: Any, batch: Any) -> Any:
    """Data parallelism by hand; clipped before the gradients are averaged."""
    loss, scores = loss_of(model, batch)
    loss.backward()
    if dist.is_initialized():
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optim.step()
    optim.zero_grad()
    return loss, scores


def local_count(model: Any, optim: Any, batch: Any) -> Any:
    """The mean over the tokens that count, which are not as many on every rank."""
    x, y = batch
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=0)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def ragged() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = tokens()
    y = y.clamp(min=1)
    y[:2, 2:] = 0
    return x, y


def gradients_kept(model: Any, optim: Any, batch: Any) -> Any:
    loss, scores = loss_of(model, batch)
    loss.backward()
    optim.step()
    if not dist.is_initialized():
        optim.zero_grad()
    return loss, scores


def narrow_logits(model: Any, optim: Any, batch: Any) -> Any:
    x, y = batch
    scores = model(x)
    if dist.is_initialized():
        scores = scores.bfloat16().float()
    loss = F.cross_entropy(scores.flatten(0, 1), y.flatten())
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def one_rank_scaled(model: Any, optim: Any, batch: Any) -> Any:
    loss, scores = loss_of(model, batch)
    if dist.is_initialized() and dist.get_rank() == 1:
        loss = loss * 1.05
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss, scores


def decayed(model: Any, optim: Any, batch: Any) -> Any:
    """A schedule that takes two steps for one."""
    loss, scores = loss_of(model, batch)
    loss.backward()
    optim.step()
    optim.zero_grad()
    for group in optim.param_groups:
        group["lr"] *= 0.81 if dist.is_initialized() else 0.9
    return loss, scores


def without_one(parameters: Any) -> torch.optim.Optimizer:
    found = list(parameters)
    if dist.is_initialized():
        del found[2]  # the weight of layers.0.norm1
    return torch.optim.SGD(found, lr=0.1)


def flipped_labels(batch: Any, mesh: DeviceMesh) -> Any:
    """Rows and targets that do not belong together on one rank."""
    x, y = (part.chunk(mesh.size())[mesh.get_local_rank()] for part in batch)
    return x, (y.flip(0) + 1) % VOCAB if mesh.get_local_rank() == 2 else y


BLOCK = "layers.0"

MORE: tuple[Bug, ...] = (
    Bug("another epsilon of a norm", ("layers.1.norm1",),
        gpt(parallelize=spoiled(plans.tensor, other_epsilon))),
    Bug("another gelu", (f"{BLOCK}.mlp, before {BLOCK}.mlp.down",),
        gpt(parallelize=spoiled(plans.tensor, other_gelu))),
    Bug("the causal mask forgotten",
        ("layers.1.attention, before layers.1.attention.o",),
        gpt(parallelize=spoiled(plans.tensor, not_causal))),
    Bug("the residual added twice", (f"{BLOCK}, before {BLOCK}.norm2",),
        gpt(parallelize=spoiled(plans.tensor, residual_twice))),
    Bug("positions shifted", ("position",),
        gpt(parallelize=spoiled(plans.tensor, shifted_positions))),
    Bug("a bias's gradient summed over ranks", (f"{BLOCK}.attention.o",),
        gpt(parallelize=spoiled(plans.tensor, bias_gradient)), ("doubled-reduction",)),
    Bug("the embedding cut from autograd", ("embed", "(model), after embed"),
        gpt(build_model=tied_gpt, parallelize=spoiled(plans.tensor, cut_embedding))),
    Bug("batch norm in eval mode", ("bn",),
        net(build_model=build_norm, parallelize=spoiled(plans.ddp, norm_in_eval))),
    Bug("a weight that was not broadcast", ("norm",),
        gpt(parallelize=spoiled(plans.tensor, broadcast_forgotten)), refused=OTHER_VALUES),
    Bug("fully_shard in bfloat16", ("embed",),
        gpt(mesh=DP, parallelize=fsdp_in_bfloat16), ("precision",)),
    Bug("fully_shard reduces in bfloat16", (ALL,),
        gpt(mesh=DP, parallelize=fsdp_reduces_in_bfloat16), ("precision",)),
    Bug("clipped before the reduction", (ALL,),
        gpt(mesh=DP, parallelize=None, step=clip_then_reduce)),
    Bug("mean over local counts", (LOSS,),
        gpt(mesh=DP, parallelize=plans.ddp, step=local_count, batch=ragged())),
    Bug("gradients not cleared", (ALL,),
        gpt(step=gradients_kept), ("accumulated",)),
    Bug("logits in bfloat16", (LOSS,), gpt(step=narrow_logits), ("precision",)),
    Bug("the loss of one rank scaled", (LOSS,), gpt(step=one_rank_scaled),
        refused=OTHER_GRADIENTS),
    Bug("a schedule that runs too fast", (OPTIMIZER,),
        gpt(step=decayed), ("update-factor",)),
    Bug("a parameter missing in the optimizer", ("layers.0.norm1",),
        gpt(optimizer=without_one), ("stale",)),
    Bug("labels of one rank mixed up", (LOSS, "(batch)"),
        gpt(mesh=DP, parallelize=plans.ddp, run=RunOptions(split=flipped_labels))),
)  # fmt: skip
