"""Planted bugs: each is a right configuration with one mistake, and where that is.

What runs on one device stays right: a mistake is made in ``parallelize``, or where a
process group exists.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import _parity_plans as plans
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _parity_layers import SumBackward
from _parity_models import build_gpt, build_net, features, loss_of, tokens, train_step
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from torchspmd.parallel import (
    ColwiseParallel,
    clip_grad_norm_,
    parallelize_module,
    vocab_parallel_cross_entropy,
)
from torchspmd.verify import RunOptions

TP, DP = {"tp": 4}, {"dp": 4}
SMOOTHING = 0.1


@dataclass(frozen=True, slots=True)
class Bug:
    """A mistake, the arguments of check_parity that make it, and the right answers.

    ``refused`` is a part of the error where the styles themselves notice the mistake, so
    that the step never comes to be compared.
    """

    name: str
    places: tuple[str, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    causes: tuple[str, ...] = ()
    refused: str = ""


def gpt(**arguments: Any) -> dict[str, Any]:
    base = {"build_model": build_gpt, "step": train_step, "batch": tokens(), "mesh": TP}
    return {**base, "parallelize": plans.tensor, **arguments}


def net(**arguments: Any) -> dict[str, Any]:
    base = {"build_model": build_net, "step": train_step, "batch": features()}
    return {**base, "mesh": DP, "parallelize": plans.ddp, **arguments}


def by_hand(path: str, **mistake: Any) -> dict[str, Any]:
    mistakes = {path: mistake}
    return gpt(parallelize=functools.partial(plans.manual, mistakes=mistakes))


# --- in the layout or in a module -----------------------------------------------------


def _then(
    model: Any,
    mesh: DeviceMesh,
    spread: Callable[..., Any],
    spoil: Callable[[Any, DeviceMesh], Any],
) -> Any:
    """ParallelMode the model rightly, then spoil it."""
    spread_model = spread(model, mesh)
    spoil(model, mesh)
    return spread_model


def spoiled(
    spread: Callable[..., Any], spoil: Callable[..., Any]
) -> Callable[..., Any]:
    return functools.partial(_then, spread=spread, spoil=spoil)


def after_forward(model: Any, mesh: DeviceMesh, path: str, change: str) -> None:
    group = mesh["tp"].get_group()

    def hook(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if change == "scale":
            return output * 1.25
        if change == "halves":
            return torch.cat(output.chunk(2, 1)[::-1], 1)
        gathered = [torch.empty_like(output) for _ in range(group.size())]
        dist.all_gather(gathered, output.detach().contiguous(), group=group)
        return output + sum(gathered).detach() - output.detach()  # reduced once more

    model.get_submodule(path).register_forward_hook(hook)


def own_dropout(model: Any, mesh: DeviceMesh) -> None:
    def reseed(module: nn.Module, args: Any) -> None:
        torch.manual_seed(dist.get_rank())

    model.layers[0].drop.register_forward_pre_hook(reseed)


def stale(model: Any, mesh: DeviceMesh) -> None:
    """A layer that keeps its first weights, as a cache that nobody refreshes."""
    layer = model.layers[1].mlp.up
    kept: dict[str, torch.Tensor] = {}

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept["weight"] = layer.weight.detach().clone()
        fresh = layer.weight - layer.weight.detach() + kept["weight"]
        return F.linear(SumBackward.apply(x, layer.group, 1), fresh, layer.bias)

    layer.forward = forward


def without_norm(model: Any, mesh: DeviceMesh) -> None:
    """Sequence parallelism, but one norm is forgotten in the plan."""
    styles = plans.sequence_plan()
    names = [name for name in styles if name != "layers.*.norm1"]
    kept = {name: styles[name] for name in names}
    parallelize_module(
        model, mesh["tp"], {**kept, "layers.1.norm1": styles["layers.*.norm1"]}
    )


def local_positions(model: Any, mesh: DeviceMesh) -> None:
    """Sequence parallelism, but every rank counts its positions from 0."""
    styles = plans.sequence_plan()
    del styles["position"]
    parallelize_module(model, mesh["tp"], styles)
    size = mesh["tp"].size()

    def shorten(_: nn.Module, args: Any) -> Any:
        return (args[0][: len(args[0]) // size],)

    model.position.register_forward_pre_hook(shorten)


def untie(model: Any, mesh: DeviceMesh) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def reinitialise(model: Any, mesh: DeviceMesh) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    with torch.no_grad():
        model.head.weight.normal_(generator=generator)


def freeze(model: Any, mesh: DeviceMesh) -> None:
    model.layers[1].norm2.weight.requires_grad_(False)


def cut_off(model: Any, mesh: DeviceMesh) -> None:
    def detach(module: nn.Module, args: Any) -> Any:
        return (args[0].detach(),)

    model.layers[1].mlp.down.register_forward_pre_hook(detach)


def tied_gpt() -> nn.Module:
    return build_gpt(tied=True)


def swap_tensor_shards(model: Any, mesh: DeviceMesh) -> None:
    """A DTensor whose shards were loaded in another order."""
    weight = model.layers[0].attention.v.weight
    rank, size = mesh["tp"].get_local_rank(), mesh["tp"].size()
    whole = weight.full_tensor().chunk(size)
    with torch.no_grad():
        weight.to_local().copy_(whole[(rank + 1) % size])


def wrong_norm_input(model: Any, mesh: DeviceMesh) -> None:
    """The gradient of a norm's input counted twice, as by a second hook."""

    def double(_: nn.Module, args: Any) -> None:
        args[0].register_hook(lambda gradient: gradient * 2)

    model.norm.register_forward_pre_hook(double)


# --- in data parallelism --------------------------------------------------------------


def _sum_only(state: Any, bucket: Any) -> Any:
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _keep_local(state: Any, bucket: Any) -> Any:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def ddp_with(model: Any, mesh: DeviceMesh, hook: Callable[..., Any]) -> Any:
    wrapped = plans.ddp(model, mesh)
    hook.__annotations__ = {}
    wrapped.register_comm_hook(None, hook)
    return wrapped


def ddp_ignoring(model: Any, mesh: DeviceMesh) -> Any:
    model._ddp_params_and_buffers_to_ignore = ["second.weight"]
    return plans.ddp(model, mesh)


def fsdp_ignoring(model: Any, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh["dp"], ignored_params={model.layers[0].norm2.weight})


def same_rows(batch: Any, mesh: DeviceMesh) -> Any:
    return tuple(part[: len(part) // mesh.size()] for part in batch)


def net_with_norm() -> nn.Module:
    return build_net(batch_norm=True)


def drifting_buffer(model: Any, mesh: DeviceMesh) -> None:
    def drift(*_: Any) -> None:
        if dist.get_rank() == 0:
            model.position_scale.add_(1.0)

    model.register_forward_hook(drift)


def gpt_with_buffer() -> nn.Module:
    model = build_gpt()
    model.register_buffer("position_scale", torch.ones(3))
    return model


# --- in the step: only where there are ranks ------------------------------------------


def smoothed_step(model: Any, optim: Any, batch: Any, right: bool = False) -> Any:
    """Label smoothing over this rank's part of the vocabulary."""
    x, y = batch
    logits = model(x)
    if not dist.is_initialized():
        flat = logits.flatten(0, 1)
        loss = F.cross_entropy(flat, y.flatten(), label_smoothing=SMOOTHING)
    else:
        mesh = model.head.weight.device_mesh
        entropy = functools.partial(vocab_parallel_cross_entropy, logits, y, mesh=mesh)
        if right:
            loss = entropy(label_smoothing=SMOOTHING)
        else:
            spread = entropy(label_smoothing=1.0) * mesh.size()
            loss = (1 - SMOOTHING) * entropy() + SMOOTHING * spread
    return _finish(loss, optim)


def sharded_head(model: Any, mesh: DeviceMesh) -> None:
    styles = plans.tensor_plan() | {"head": ColwiseParallel()}
    parallelize_module(model, mesh["tp"], styles)


def clipped_step(model: Any, optim: Any, batch: Any, right: bool = False) -> Any:
    """Clip by the norm of this rank's shards."""
    loss, scores = loss_of(model, batch)
    loss.backward()
    if right or not dist.is_initialized():
        clip_grad_norm_(model.parameters(), 0.1)
    else:
        locals_ = [
            p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            for p in model.parameters()
        ]
        norm = torch.stack([gradient.norm() for gradient in locals_]).norm()
        for gradient in locals_:
            gradient.mul_(0.1 / norm)
    optim.step()
    optim.zero_grad()
    return loss, scores


def summed_loss_step(model: Any, optim: Any, batch: Any) -> Any:
    loss, _ = loss_of(model, batch)
    if dist.is_initialized():
        loss = loss * batch[1].numel()  # sum where it must be the mean
    return _finish(loss, optim)


def reduced_loss_step(model: Any, optim: Any, batch: Any) -> Any:
    """The loss, which every rank has, is summed over the ranks for the report."""
    loss, _ = loss_of(model, batch)
    loss.backward()
    optim.step()
    optim.zero_grad()
    told = loss.detach()
    if dist.is_initialized():
        dist.all_reduce(told)
    return told


def accumulated_step(model: Any, optim: Any, batch: Any, right: bool = False) -> Any:
    """Two micro-batches; on ranks nobody divides by two."""
    total = torch.zeros(())
    for part in zip(*(each.chunk(2) for each in batch), strict=True):
        loss, _ = loss_of(model, part)
        if right or not dist.is_initialized():
            loss = loss / 2
        loss.backward()
        total = total + loss.detach()
    optim.step()
    optim.zero_grad()
    return total if right or not dist.is_initialized() else total / 2


def _finish(loss: torch.Tensor, optim: Any) -> torch.Tensor:
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


class _Losing(torch.optim.SGD):
    """Forgets something on ranks: the last of three updates, or its momentum."""

    def __init__(self, parameters: Any, forget: str) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.forget, self.count = forget, 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        if dist.is_initialized() and self.forget == "update" and self.count == 3:
            return None
        if dist.is_initialized() and self.forget == "momentum":
            self.state.clear()
        return super().step(closure)


def losing(parameters: Any, forget: str) -> Any:
    return _Losing(parameters, forget)


def changed_adamw(parameters: Any, name: str, value: float) -> Any:
    settings: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.01}
    if dist.is_initialized():
        settings[name] = value
    return torch.optim.AdamW(parameters, **settings)


MANUAL = "layers.1.mlp"
ATTENTION = "layers.0.attention"
OTHER_GRADIENTS = "got other gradients on its ranks"
OTHER_VALUES = "hold other values on its ranks"
ALL, OPTIMIZER, LOSS = "(all parameters)", "(optimizer)", "(loss)"


def hooked(path: str, change: str) -> Callable[..., Any]:
    spoil = functools.partial(after_forward, path=path, change=change)
    return spoiled(plans.tensor, spoil)


BUGS: tuple[Bug, ...] = (
    Bug("missing sum of a row-parallel output", (f"{MANUAL}.down",),
        by_hand(f"{MANUAL}.down", times=0), ("missing-reduction",)),
    Bug("row-parallel output summed twice", (f"{MANUAL}.down",),
        by_hand(f"{MANUAL}.down", times=2)),
    Bug("attention output reduced once more", (f"{ATTENTION}.o",),
        gpt(parallelize=hooked(f"{ATTENTION}.o", "reduce")), ("doubled-reduction",)),
    Bug("missing sum of a column-parallel input's gradient", (f"{MANUAL}.up",),
        by_hand(f"{MANUAL}.up", times=0), ("missing-reduction",)),
    Bug("that gradient summed twice", (f"{ATTENTION}.k",),
        by_hand(f"{ATTENTION}.k", times=2), ("doubled-reduction",)),
    Bug("wrong scale of an activation", (ATTENTION,),
        gpt(parallelize=hooked(ATTENTION, "scale")), ("factor",)),
    Bug("gathered in the wrong order", (MANUAL,),
        gpt(parallelize=hooked(MANUAL, "halves"))),
    Bug("bias added on every rank before the sum", (f"{MANUAL}.down",),
        by_hand(f"{MANUAL}.down", early_bias=True)),
    Bug("sum taken in bfloat16", (f"{MANUAL}.down",),
        by_hand(f"{MANUAL}.down", narrow=True), ("precision",)),
    Bug("shards swapped, plain tensors", (f"{ATTENTION}.q",),
        by_hand(f"{ATTENTION}.q", shift=1), ("swapped-shards",)),
    Bug("shards swapped, DTensor", (f"{ATTENTION}.v",),
        gpt(parallelize=spoiled(plans.tensor, swap_tensor_shards))),
    Bug("wrong shard dim", (f"{ATTENTION}.o",),
        by_hand(f"{ATTENTION}.o", transposed=True), ("wrong-dim",)),
    Bug("embedding rows of the last rank off by one", ("embed",),
        by_hand("embed", slip=1)),
    Bug("stale weights", (f"{MANUAL}.up",),
        gpt(parallelize=spoiled(plans.manual, stale))),
    Bug("unreduced norm gradients under sequence parallelism", ("layers.0.norm1",),
        gpt(parallelize=without_norm), ("missing-reduction",), "before it has no style"),
    Bug("positions counted from 0 on every rank", ("position",),
        gpt(parallelize=local_positions), refused=OTHER_GRADIENTS),
    Bug("dropout differs where it must not", ("layers.0.drop",),
        gpt(build_model=functools.partial(build_gpt, dropout=0.2),
            parallelize=spoiled(plans.tensor, own_dropout)), ("random-mask",),
        OTHER_GRADIENTS),
    Bug("label smoothing over the local vocabulary", (LOSS,),
        gpt(step=smoothed_step, parallelize=sharded_head)),
    Bug("clipped by the local norm", (ALL,),
        gpt(step=clipped_step), ("factor-by-rank",), OTHER_VALUES),
    Bug("tied weights untied", ("embed", "head"),
        gpt(build_model=tied_gpt, parallelize=spoiled(plans.tensor, untie)), ("tie-cut",)),
    Bug("loss summed instead of averaged", (LOSS,), net(step=summed_loss_step)),
    Bug("loss reported summed over ranks", (LOSS,),
        gpt(step=reduced_loss_step), ("doubled-reduction",)),
    Bug("micro-batches not divided", (LOSS,), net(step=accumulated_step), ("factor",)),
    Bug("DDP gradients summed, not averaged", (ALL,),
        net(parallelize=functools.partial(ddp_with, hook=_sum_only)),
        ("doubled-reduction",)),
    Bug("DDP gradients never reduced", (ALL,),
        net(parallelize=functools.partial(ddp_with, hook=_keep_local)),
        ("missing-average",)),
    Bug("DDP ignores one parameter", ("second",),
        net(parallelize=ddp_ignoring), ("missing-average",)),
    Bug("fully_shard ignores one parameter", ("layers.0.norm2",),
        gpt(mesh=DP, parallelize=fsdp_ignoring), ("missing-average",)),
    Bug("every rank has the same rows", ("(batch)",), net(run=RunOptions(split=same_rows))),
    Bug("batch norm over local rows", ("bn",), net(build_model=net_with_norm)),
    Bug("a buffer that one rank changes", ("(model)",),
        gpt(build_model=gpt_with_buffer,
            parallelize=spoiled(plans.tensor, drifting_buffer))),
    Bug("another initial value on each rank", ("head",),
        gpt(parallelize=spoiled(plans.tensor, reinitialise)), refused=OTHER_VALUES),
    Bug("a parameter frozen by accident", ("layers.1.norm2",),
        gpt(parallelize=spoiled(plans.tensor, freeze))),
    Bug("a path cut from autograd", (f"{MANUAL}.down", f"{MANUAL}.up", MANUAL),
        gpt(parallelize=spoiled(plans.tensor, cut_off))),
    Bug("a gradient counted twice", ("norm",),
        gpt(parallelize=spoiled(plans.tensor, wrong_norm_input)), ("factor",)),
    Bug("the last update lost", (OPTIMIZER,),
        gpt(optimizer=functools.partial(losing, forget="update")), ("stale",)),
    Bug("momentum lost", (OPTIMIZER,),
        gpt(optimizer=functools.partial(losing, forget="momentum"))),
    Bug("another learning rate", (OPTIMIZER,),
        gpt(optimizer=functools.partial(changed_adamw, name="lr", value=6e-3))),
    Bug("another weight decay", (OPTIMIZER,),
        gpt(optimizer=functools.partial(changed_adamw, name="weight_decay", value=0.1))),
)  # fmt: skip
