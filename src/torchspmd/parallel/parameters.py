"""From DTensor parameters to the shards that a layer computes with, and back.

Parameters stay DTensors for state dicts, optimizers and checkpoints; ``local_shards``
returns this rank's part and turns the gradients back into DTensors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    distribute_tensor,
)
from torch.nn.utils import parametrize

from torchspmd import _torch
from torchspmd.errors import LayoutError
from torchspmd.layout.names import format_mesh
from torchspmd.layout.placements import PARTIAL, REPLICATE
from torchspmd.layout.retired import set_successor, successor
from torchspmd.parallel.axis import Axis
from torchspmd.parallel.redistribute import begin_backward, change_layout
from torchspmd.parallel.replicas import LAYOUTS

# ----------------------------------------------------------------------------
# State dicts of modules whose parameters DistributedDataParallel has unwrapped.
#
# It registers this rank's shards as plain parameters and, from the first forward on, puts
# DTensors around them where no state dict looks: into plain attributes. Saving would drop
# the parameters silently, or take one rank's shard for the whole.


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """How a parameter was laid out; shared by copies, as they talk to the same ranks."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    local_shape: torch.Size

    def wrap(self, shard: torch.Tensor) -> DTensor:
        """The DTensor around this rank's shard, in the same memory."""
        return DTensor.from_local(
            shard,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def remember_layout(module: nn.Module, name: str, placed: DTensor) -> None:
    """Let the module save and load a parameter as it was placed."""
    known = getattr(module, LAYOUTS, None)
    if known is None:
        module.register_state_dict_post_hook(save_unwrapped)
        module.register_load_state_dict_pre_hook(load_unwrapped)
    layout = ParameterLayout(
        placed.device_mesh,
        placed.placements,
        placed.shape,
        placed.stride(),
        _torch.local_tensor(placed).shape,
    )
    setattr(module, LAYOUTS, {**(known or {}), name: layout})


def unwrapped_parameters(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The DTensor of each parameter that is a plain shard now, or an attribute.

    What is computed with it trains the shard. A weight that a parametrization computes
    is neither: its parameters have other names.
    """
    held = {
        **vars(module),
        **dict(module.named_parameters(recurse=False, remove_duplicate=False)),
    }
    for name, layout in getattr(module, LAYOUTS, {}).items():
        value: Any = held.get(name)
        if isinstance(value, DTensor) and not isinstance(value, nn.Parameter):
            yield name, value
        elif isinstance(value, nn.Parameter) and not isinstance(value, DTensor):
            # A whole tensor that was assigned is none of this rank's shards.
            if value.shape == layout.local_shape:
                yield name, layout.wrap(value)


def save_unwrapped(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """State-dict hook: unwrapped parameters are saved as the DTensors that they were."""
    for name, parameter in unwrapped_parameters(module):
        state[f"{prefix}{name}"] = parameter.detach()


def load_unwrapped(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    *rest: Any,
) -> None:
    """Load hook: whole tensors and DTensors go into the shards of unwrapped parameters."""
    registered = dict(module.named_parameters(recurse=False))
    for name, unwrapped in unwrapped_parameters(module):
        parameter = unwrapped.detach()
        key = f"{prefix}{name}"
        value = state.get(key)
        if value is None and name not in registered:
            missing.append(key)
        if value is None or value.shape != parameter.shape:
            continue  # torch names what is missing or of another shape
        _copy_into(parameter, value)
        if name in registered:
            state[key] = parameter.to_local()
        else:
            del state[key]


def _copy_into(parameter: DTensor, value: torch.Tensor) -> None:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    mesh, placements = parameter.device_mesh, parameter.placements
    with torch.no_grad():
        parameter.copy_(distribute_tensor(value, mesh, placements, src_data_rank=None))


def place_parameter(
    module: nn.Module,
    name: str,
    placement: Placement,
    axis: Axis,
    src_data_rank: int | None,
) -> None:
    """Replace a parameter by a DTensor with this placement; ties are kept."""
    parameter = module.get_parameter(name)
    broken = describe_broken_tie(parameter, placement, axis)
    if broken:
        raise LayoutError(f"{name!r} of a {type(module).__name__}: {broken}.")
    placed = successor(parameter)
    if placed is None:
        placed = nn.Parameter(
            distribute_tensor(
                parameter.detach(), axis.mesh, (placement,), src_data_rank=src_data_rank
            ),
            requires_grad=parameter.requires_grad,
        )
        set_successor(parameter, placed)
    module.register_parameter(name, placed)
    remember_layout(module, name, placed)


def describe_broken_tie(
    parameter: torch.Tensor, placement: Placement | None, axis: Axis | None = None
) -> str | None:
    """Why a parameter that an earlier call has replaced would become two.

    Args:
        parameter: The one that a module holds, perhaps still the one before the call.
        placement: What it is to have now; None where it would be split into parts.
        axis: Where, if that is known.
    """
    placed = successor(parameter)
    if placed is None:
        return None
    same_mesh = axis is None or placed.device_mesh == axis.mesh
    if same_mesh and placed.placements == (placement,):
        return None
    asked = "a split into parts" if placement is None else repr(placement)
    return (
        f"one parameter would become several: an earlier call laid it out as "
        f"{placed.placements[0]!r} on the mesh {format_mesh(placed.device_mesh)} for a "
        f"module that shares it, this call asks for {asked}; lay out both modules in one "
        "plan, with the same layout, or untie them first"
    )


def place_buffers(module: nn.Module, axis: Axis, src_data_rank: int | None) -> None:
    """Replace the buffers of a module, not of its children, by replicated DTensors."""
    for name, buffer in list(module.named_buffers(recurse=False)):
        if not isinstance(buffer, DTensor):
            placed = distribute_tensor(
                buffer, axis.mesh, (Replicate(),), src_data_rank=src_data_rank
            )
            setattr(module, name, placed)


def local_shard(parameter: torch.Tensor, sum_over: Axis | None = None) -> torch.Tensor:
    """This rank's shard of one parameter; see ``local_shards``."""
    (shard,) = local_shards([parameter], sum_over)
    assert shard is not None
    return shard


def local_shards(
    parameters: Sequence[torch.Tensor | None], sum_over: Axis | None = None
) -> list[torch.Tensor | None]:
    """This rank's shard of each parameter; gradients arrive as DTensors.

    Args:
        parameters: DTensors; None is passed through, a plain tensor is its own
            shard.
        sum_over: Sum the gradients over this axis first, all in one collective: for
            replicated parameters of which every rank sees another part of the data.
    """
    given = [p for p in parameters if isinstance(p, DTensor)]
    if torch.compiler.is_compiling():
        shards = iter([_sum_gradient(p.to_local(), sum_over) for p in given])
    elif torch.is_grad_enabled() and any(p.requires_grad for p in given):
        shards = iter(_LocalShards.apply(sum_over, *given))
    else:
        shards = iter([_torch.local_tensor(p) for p in given])
    return [
        next(shards)
        if isinstance(p, DTensor)
        else p
        if p is None
        else _sum_gradient(p, sum_over)
        for p in parameters
    ]


def _sum_gradient(shard: torch.Tensor, axis: Axis | None) -> torch.Tensor:
    if axis is None:
        return shard
    same, shape = REPLICATE, tuple(shard.shape)
    return change_layout(shard, same, same, axis, shape, gradient=PARTIAL)


class _LocalShards(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sum_over: Axis | None, *parameters: DTensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.sum_over = sum_over
        ctx.specs = [_torch.spec(p) for p in parameters]
        ctx.set_materialize_grads(False)
        locals_ = [_torch.local_tensor(p) for p in parameters]
        return tuple(local.view_as(local) for local in locals_)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        given = next((gradient for gradient in gradients if gradient is not None), None)
        begin_backward("a parallel layer", given, ctx.sum_over)
        if ctx.sum_over is not None:
            gradients = sum_over_axis(gradients, ctx.sum_over)
            return None, *map(wrap_gradient, gradients, ctx.specs)
        return None, *(
            None if gradient is None else _torch.wrap_local(gradient, spec)
            for gradient, spec in zip(gradients, ctx.specs, strict=True)
        )


def sum_over_axis(
    gradients: Sequence[torch.Tensor | None], axis: Axis
) -> tuple[torch.Tensor | None, ...]:
    """The gradients summed over the ranks, in one collective."""
    given = [g for g in gradients if g is not None]
    if not given:
        return tuple(gradients)
    flat = torch.cat([g.reshape(-1) for g in given])
    flat = _torch.wait(_torch.start_all_reduce(flat, "sum", axis.group))
    parts = iter(flat.split([g.numel() for g in given]))
    return tuple(None if g is None else next(parts).view_as(g) for g in gradients)


def wrong_shard(
    where: str, name: str, found: torch.Tensor, expected: tuple[int, ...]
) -> LayoutError:
    """The error of a parameter that is not this rank's shard any more."""
    return LayoutError(
        f"{where}: this rank's part of {name!r} has shape {tuple(found.shape)}, its "
        f"layout gives {expected}. The parameter was replaced by one in another layout, "
        "as load_state_dict(..., assign=True) with whole tensors does. Load whole tensors "
        "with torch.distributed.checkpoint.state_dict.set_model_state_dict and "
        "StateDictOptions(full_state_dict=True), or lay out what you assign with "
        "distribute_tensor, as the parameter was."
    )


def unwrap_parameter(parameter: torch.Tensor | None) -> tuple[torch.Tensor | None, Any]:
    """A parameter's shard, and what makes a DTensor of its gradient.

    For autograd functions that take parameters as they are. A plain tensor is
    its own shard: DistributedDataParallel and ``functional_call`` put such tensors in
    the place of parameters.
    """
    if isinstance(parameter, DTensor):
        # Detached: DistributedDataParallel makes the shard a view of the tensor that the
        # optimizer changes, and autograd refuses to hand such a view to a backward.
        return _torch.local_tensor(parameter).detach(), _torch.spec(parameter)
    return parameter, None


def wrap_gradient(gradient: torch.Tensor | None, spec: Any) -> torch.Tensor | None:
    """The gradient of a shard as that of the parameter it was unwrapped from."""
    if spec is None or gradient is None:
        return gradient
    if type(gradient) is torch.Tensor and gradient.storage_offset():
        # A copy, of something small that was summed together with others: torch cannot
        # deepcopy a DTensor around the later part of a storage. A captured step holds
        # other types, and no gradients to copy.
        gradient = gradient.clone()
    return _torch.wrap_local(gradient, spec)


# ----------------------------------------------------------------------------
# Parameters that a layer computes anew in each call: weight norm, pruning and the like.
#
# What it computes them from can be kept whole, but not cut: the norm of a shard is not that
# of the weight.


def describe_computed(module: nn.Module) -> list[str]:
    """The problem of a module with computed parameters, as ``find_problems`` says it."""
    return [text for part in module.modules() for text in _parametrized(part)] + [
        text for part in module.modules() for text in describe_hooked(part)
    ]


def _parametrized(module: nn.Module) -> list[str]:
    if not parametrize.is_parametrized(module):
        return []
    tables: Any = module.parametrizations
    listed = ", ".join(
        f"{name} by {', '.join(type(step).__name__ for step in steps)}"
        for name, steps in tables.items()
    )
    return [
        f"it computes parameters in each call ({listed}), which no shard can do; make "
        "them plain first, with torch.nn.utils.parametrize.remove_parametrizations, or "
        "keep the module whole with ReplicateParallel()"
    ]


def describe_hooked(module: nn.Module) -> list[str]:
    """The same for the older way: a hook that writes the parameter before each call."""
    hooks = [
        type(hook).__name__
        for _, _, hook in _torch.hooks_of(module, _torch.HOOK_TABLES)
        if type(hook).__module__.startswith("torch.nn.utils.")
    ]
    if not hooks:
        return []
    return [
        f"a hook computes parameters before each call ({', '.join(hooks)}), which no "
        "style knows; make them plain first, with torch.nn.utils.remove_weight_norm, "
        "remove_spectral_norm or prune.remove"
    ]
