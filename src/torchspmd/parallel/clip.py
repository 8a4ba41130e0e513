"""A gradient norm over parameters of any mesh and layout, and clipping by it."""

import functools
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from torchspmd import _torch
from torchspmd.errors import UsageError

# The axes of a mesh over which a gradient is sharded: its parts are summed over these.
Scope = tuple[DeviceMesh | None, tuple[int, ...]]


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients in place so that their norm is at most ``max_norm``.

    The norm is that of one device: shards are counted once each, replicas once,
    partial values are reduced. Parameters may be plain tensors and DTensors of several
    meshes and layouts; only one or two numbers travel for each set of mesh axes.

    Args:
        parameters: Those whose gradients are clipped together; one or many.
        max_norm: The largest norm to leave.
        norm_type: Which norm; ``float("inf")`` for the largest element.
        error_if_nonfinite: Raise when the norm is not finite, and change nothing.
        foreach: As in ``torch.nn.utils.clip_grad_norm_``.

    Returns:
        The norm before clipping, as a plain tensor, equal on every rank.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_([weight], 1.0)
        tensor(5.)
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = [p.grad for p in given if p.grad is not None]
    if norm_type <= 0:
        raise UsageError(
            f"clip_grad_norm_: norm_type is {norm_type}; pass a positive number or "
            'float("inf").'
        )
    if not given:
        raise UsageError(
            "clip_grad_norm_: no parameters were given, so nothing would be clipped. A "
            "model inside DistributedDataParallel(device_mesh=...) shows none after its "
            "first forward: keep a list of its parameters from before."
        )
    if not gradients:
        return torch.tensor(0.0)
    total = total_norm(gradients, norm_type, foreach=foreach)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is "
            "non-finite, so it cannot be clipped. To disable this error and scale the "
            "gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for shard in map(_local, gradients):
        # No look at the value: that would make the host wait for the device.
        shard.mul_(scale.to(device=shard.device, dtype=shard.dtype))
    return total


def total_norm(
    gradients: list[torch.Tensor], norm_type: float, *, foreach: bool | None = None
) -> torch.Tensor:
    """The norm of all gradients as if they lay on one device."""
    scopes: dict[Scope, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        whole = _reduce_partials(gradient)
        scopes[_scope(whole)].append(_local(whole))
    device = _local(gradients[0]).device
    powers = [
        _power_of(shards, scope, norm_type, foreach).to(device)
        for scope, shards in scopes.items()
    ]
    stacked = torch.stack(powers)
    if norm_type == float("inf"):
        return stacked.max()
    return stacked.sum().pow(1.0 / norm_type)


def _power_of(
    shards: list[torch.Tensor], scope: Scope, norm_type: float, foreach: bool | None
) -> torch.Tensor:
    """Sum of powers (or maximum) of the gradients that lie on the same mesh axes."""
    is_max = norm_type == float("inf")
    # A rank whose shards are all empty must send a number of the same type as the rest.
    dtype = functools.reduce(torch.promote_types, map(_norm_dtype, shards))
    power = torch.zeros((), dtype=dtype.to_real(), device=shards[0].device)
    norms = _norms([s for s in shards if s.numel()], norm_type, foreach)
    if norms:
        stacked = torch.stack([n.to(power) for n in norms])
        power = stacked.max() if is_max else stacked.pow(norm_type).sum()
    mesh, axes = scope
    for axis in axes:
        assert mesh is not None
        group = mesh.get_group(axis).group_name
        if is_max:
            power = _largest(power, group)
        else:
            power = _torch.wait(_torch.start_all_reduce(power, "sum", group))
    return power


def _largest(value: torch.Tensor, group: str) -> torch.Tensor:
    """The maximum over the ranks; NaN where one of them has NaN."""
    # Collectives may drop NaN from a maximum: whether there is one travels beside it.
    sent = torch.stack([value, value.isnan().to(value)])
    largest, has_nan = _torch.wait(_torch.start_all_reduce(sent, "max", group))
    return torch.where(has_nan > 0, torch.nan, largest)


def _norms(
    shards: list[torch.Tensor], norm_type: float, foreach: bool | None
) -> list[torch.Tensor]:
    wide = [s.to(_norm_dtype(s)) for s in shards]
    if foreach is False or not wide:
        return [torch.linalg.vector_norm(s, norm_type) for s in wide]
    return _torch.foreach_norm(wide, norm_type)


def _norm_dtype(shard: torch.Tensor) -> torch.dtype:
    """Half-precision squares overflow: their norms are taken in float32."""
    return torch.promote_types(shard.dtype, torch.float32)


def _scope(gradient: torch.Tensor) -> Scope:
    if not isinstance(gradient, DTensor):
        return None, ()
    axes = enumerate(gradient.placements)
    sharded = tuple(i for i, placement in axes if not placement.is_replicate())
    return gradient.device_mesh, sharded


def _reduce_partials(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient without partial values; the stored one is not touched."""
    if not isinstance(gradient, DTensor):
        return gradient
    layout = gradient.placements
    if not any(isinstance(placement, Partial) for placement in layout):
        return gradient
    whole = [Replicate() if isinstance(p, Partial) else p for p in layout]
    return gradient.redistribute(placements=whole)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return _torch.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
