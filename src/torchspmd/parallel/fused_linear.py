"""A Linear whose output features are several parts side by side, each sharded by itself.

The parts are DTensor parameters of their own, so that optimizers, checkpoints and other
mesh sizes see honest layouts; the state dict joins them under the layer's own key.
"""

import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from torchspmd.errors import LayoutError
from torchspmd.parallel.axis import Axis
from torchspmd.parallel.fused_copy import mark_copy
from torchspmd.parallel.handover import change_layout
from torchspmd.parallel.opened import opened_parameters
from torchspmd.parallel.parameters import GradientSum, local_shards
from torchspmd.parallel.route import Route, check_tensor, enter_features

NAMES = ("weight", "bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some consecutive output features of a layer.

    Attributes:
        start: The first of them.
        size: How many.
        num_heads: How many heads they are; 0 where heads do not matter.
    """

    start: int
    size: int
    num_heads: int = 0

    def is_shared(self, num_ranks: int) -> bool:
        """Whether there are fewer heads than ranks, so that ranks share a head."""
        return 0 < self.num_heads < num_ranks

    def layout(self, num_ranks: int) -> Placement:
        """How the part's parameters lie on the axis."""
        return Replicate() if self.is_shared(num_ranks) else Shard(0)

    def shared_head(self, axis: Axis) -> tuple[int, int]:
        """First feature and number of features of the head that this rank uses."""
        size = self.size // self.num_heads
        return size * (axis.rank * self.num_heads // axis.size), size


class LocalFusedLinear(nn.Linear):
    """A Linear that computes this rank's share of each of its parts.

    ``parallelize_module`` turns an ``nn.Linear`` into one; it is not built by hand.
    """

    route: Route
    parts: tuple[Part, ...]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """This rank's features of every part, side by side."""
        route = self.route
        check_tensor(input, route)
        steps = route.steps(input.ndim, input.ndim)
        value = enter_features(input, route, steps, self.in_features)
        whole = change_layout(
            value.tensor,
            value.layout,
            steps.needed,
            route.axis,
            value.shape,
            gradient=Partial(),
            leaving=value.gradient,
        )
        weight, bias = (self._local(name) for name in NAMES)
        assert weight is not None
        return F.linear(whole, weight, bias)

    def _local(self, name: str) -> torch.Tensor | None:
        """This rank's rows of a parameter, part after part."""
        given = part_parameters(self, name)
        if not given:
            return None
        axis = self.route.axis
        rows = []
        for part, parameter in zip(self.parts, given, strict=True):
            if part.is_shared(axis.size):
                (shard,) = local_shards([parameter], GradientSum(axis))
                assert shard is not None
                shard = shard.narrow(0, *part.shared_head(axis))
            else:
                (shard,) = local_shards([parameter])
                assert shard is not None
            rows.append(shard)
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def reset_parameters(self) -> None:
        """Draw values as one device does; those of the first rank go to all."""
        given = part_parameters(self, "weight")[0]
        whole = nn.Linear(
            self.in_features,
            self.out_features,
            bias=bool(part_parameters(self, "bias")),
            device=given.device,
            dtype=given.dtype,
        ).requires_grad_(False)
        for name, value in whole.named_parameters():
            parts = split_into_parts(value, name, self, src_data_rank=0)
            held = part_parameters(self, name)
            with torch.no_grad():
                for parameter, part in zip(held, parts, strict=True):
                    parameter.copy_(part)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The whole weight in the order of one device, sharded by rows. It communicates.

        It is a copy to read: a loss may be computed with it, but writing into it,
        freezing it or asking for its gradient is an error. The parameters are those in
        ``weight_parts``.
        """
        joined = self._joined("weight")
        assert joined is not None
        return joined

    @property
    def bias(self) -> torch.Tensor | None:  # type: ignore[override]
        """The whole bias, as a copy like ``weight``. It communicates."""
        return self._joined("bias")

    def _joined(self, name: str) -> torch.Tensor | None:
        held: Any = getattr(self, f"{name}_parts")
        if held is None:
            return None
        opened = dict(opened_parameters(held))
        given = [opened.get(str(i), part) for i, part in enumerate(held)]
        if torch.is_grad_enabled() and any(part.requires_grad for part in given):
            joined = _join_with_gradient(given, self.route.axis)
        else:
            # Writing into this rank's shard of such a tensor is an error too.
            with torch.inference_mode():
                joined = join_parts(given, self.route.axis)
        return mark_copy(joined, self.route.where, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy, also of gradients: those of the parts are pieces of one tensor.

        Torch cannot deepcopy a DTensor around the later part of a storage, so pieces
        get memory of their own first; not in each backward, where that would cost some.
        """
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        """As in every module, but the joined parameters cannot be replaced."""
        if name in NAMES:
            raise LayoutError(
                f"{self.route.where}: its {name} cannot be set, as the layer computes "
                f"with {name}_parts, one parameter for each part. Write into these, or "
                f"load a whole {name} with load_state_dict."
            )
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """The layer's sizes, its parts and its style."""
        sizes = ", ".join(str(part.size) for part in self.parts)
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"parts=({sizes}), {self.route}"
        )


def part_parameters(module: nn.Module, name: str) -> list[torch.Tensor]:
    """The parameters that hold the parts of ``weight`` or ``bias``."""
    found = getattr(module, f"{name}_parts", None)
    return [] if found is None else list(found)


def join_parts(parts: list[torch.Tensor], axis: Axis) -> torch.Tensor:
    """The parts as one DTensor in the order of one device, sharded by rows.

    Every part is gathered for a moment; each rank keeps only its rows of the whole.
    """
    with torch.no_grad():
        whole = torch.cat(
            [p.full_tensor() if isinstance(p, DTensor) else p for p in parts]
        )
        return distribute_tensor(whole, axis.mesh, (Shard(0),), src_data_rank=None)


def _join_with_gradient(parts: list[torch.Tensor], axis: Axis) -> torch.Tensor:
    """The same as ``join_parts``; what is computed with it trains the parts."""
    whole = torch.cat([p.full_tensor() if isinstance(p, DTensor) else p for p in parts])
    same = DTensor.from_local(whole, axis.mesh, (Replicate(),), run_check=False)
    return same.redistribute(placements=(Shard(0),))


def split_into_parts(
    value: torch.Tensor,
    name: str,
    module: LocalFusedLinear,
    src_data_rank: int | None = None,
) -> list[torch.Tensor]:
    """A whole parameter, plain or a DTensor, laid out like the parts that hold it."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    if whole.size(0) != module.out_features:
        raise LayoutError(
            f"{module.route.where}: the saved {name} has {whole.size(0)} rows, the layer "
            f"has {module.out_features} output features."
        )
    held = part_parameters(module, name)
    return [
        # A copy: DTensors around views of a larger storage do not pickle.
        _like(whole.narrow(0, part.start, part.size).clone(), parameter, src_data_rank)
        for part, parameter in zip(module.parts, held, strict=True)
    ]


def _like(
    value: torch.Tensor, parameter: torch.Tensor, src_data_rank: int | None
) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return value
    # Other styles of parallelism may have added axes to the parameter's mesh.
    mesh, layout = parameter.device_mesh, parameter.placements
    return distribute_tensor(value, mesh, layout, src_data_rank=src_data_rank)


def save_joined(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """State-dict hook: one key for each parameter, as before the layer was split."""
    assert isinstance(module, LocalFusedLinear)
    for name in NAMES:
        keys = [f"{prefix}{name}_parts.{i}" for i in range(len(module.parts))]
        if all(key in state for key in keys):
            parts = [state.pop(key) for key in keys]
            state[f"{prefix}{name}"] = join_parts(parts, module.route.axis)


def load_split(
    module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Load hook: the key of the whole parameter becomes those of its parts."""
    assert isinstance(module, LocalFusedLinear)
    for name in NAMES:
        value = state.pop(f"{prefix}{name}", None)
        if value is not None:
            for i, part in enumerate(split_into_parts(value, name, module)):
                state[f"{prefix}{name}_parts.{i}"] = part
