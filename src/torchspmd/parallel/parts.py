"""A parameter that a module holds in parts, each sharded by itself.

The parts are DTensor parameters of their own, so that optimizers, checkpoints and other
mesh sizes see true layouts; the state dict joins them under the parameter's own name.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from torchspmd.errors import LayoutError
from torchspmd.layout.retired import copy_attributes
from torchspmd.layout.shards import shard_size
from torchspmd.parallel.axis import Axis
from torchspmd.parallel.parameters import remember_layout


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

    def layout(self, num_ranks: int, dim: int = 0) -> Placement:
        """How a parameter of the part lies on the axis, its features in a dimension."""
        return Replicate() if self.is_shared(num_ranks) else Shard(dim)

    def local_size(self, num_ranks: int, rank: int) -> int:
        """How many features of the part one rank computes."""
        if self.is_shared(num_ranks):
            return self.size // self.num_heads
        return shard_size(self.size, num_ranks, rank)

    def shared_head(self, axis: Axis) -> tuple[int, int]:
        """First feature and number of features of the head that this rank uses."""
        size = self.size // self.num_heads
        return size * (axis.rank * self.num_heads // axis.size), size


def part_parameters(module: nn.Module, name: str) -> list[torch.Tensor]:
    """The parameters that hold the parts of ``weight`` or ``bias``."""
    found = getattr(module, f"{name}_parts", None)
    return [] if found is None else list(found)


def join_parts(parts: list[torch.Tensor], axis: Axis, dim: int = 0) -> torch.Tensor:
    """The parts as one DTensor in the order of one device, its features sharded.

    Every part is gathered for a moment; each rank keeps only its share of the whole.
    """
    with torch.no_grad():
        # Torch 2.11 gathers no DTensor in inference mode.
        with torch.inference_mode(mode=False), torch.no_grad():
            gathered = _gathered(parts)
        whole = torch.cat(gathered, dim)
        return distribute_tensor(whole, axis.mesh, (Shard(dim),), src_data_rank=None)


def join_with_gradient(parts: list[torch.Tensor], axis: Axis, dim: int) -> torch.Tensor:
    """The same as ``join_parts``; what is computed with it trains the parts."""
    whole = torch.cat(_gathered(parts), dim)
    same = DTensor.from_local(whole, axis.mesh, (Replicate(),), run_check=False)
    return same.redistribute(placements=(Shard(dim),))


def _gathered(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in parts]


@dataclass(frozen=True, slots=True)
class SplitParameter:
    """A parameter that a module holds as several, each sharded by itself.

    A state dict has the whole one, under its name.

    Attributes:
        name: The parameter's name in its module.
        parts: The parts, of the features in one dimension.
        dim: That dimension.
        axis: Where the parts lie.
        where: How errors name the module.
    """

    name: str
    parts: tuple[Part, ...]
    dim: int
    axis: Axis
    where: str

    def split(
        self, value: torch.Tensor, module: nn.Module, src_data_rank: int | None = None
    ) -> list[torch.Tensor]:
        """A whole parameter, plain or a DTensor, laid out like the parts that hold it."""
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        expected = sum(part.size for part in self.parts)
        if whole.size(self.dim) != expected:
            raise LayoutError(
                f"{self.where}: the saved {self.name} has {whole.size(self.dim)} "
                f"{'columns' if self.dim else 'rows'}, the layer has {expected} output "
                "features."
            )
        held = part_parameters(module, self.name)
        return [
            _like(piece, parameter, src_data_rank)
            for piece, parameter in zip(self._pieces(whole), held, strict=True)
        ]

    def _pieces(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Copies: DTensors around views of a larger storage do not pickle."""
        return [
            whole.narrow(self.dim, part.start, part.size).clone() for part in self.parts
        ]

    def save(self, state: dict[str, Any], prefix: str) -> None:
        """One key of a state dict for all parts."""
        keys = [f"{prefix}{self.name}_parts.{i}" for i in range(len(self.parts))]
        if all(key in state for key in keys):
            parts = [state.pop(key) for key in keys]
            state[f"{prefix}{self.name}"] = join_parts(parts, self.axis, self.dim)

    def load(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Keys for the parts instead of that of the whole parameter."""
        value = state.pop(f"{prefix}{self.name}", None)
        if value is not None:
            for i, part in enumerate(self.split(value, module)):
                state[f"{prefix}{self.name}_parts.{i}"] = part

    def place(self, module: nn.Module, src_data_rank: int | None) -> None:
        """Replace the parameter by a list of DTensors, one for each part."""
        known = vars(module).setdefault(_SPLIT, {})
        if not known:
            module.register_state_dict_post_hook(save_joined)
            module.register_load_state_dict_pre_hook(load_split)
        known[self.name] = self
        parameter = getattr(module, self.name)
        delattr(module, self.name)
        if parameter is None:
            module.register_module(f"{self.name}_parts", None)
            return
        placed = [
            nn.Parameter(
                distribute_tensor(
                    piece,
                    self.axis.mesh,
                    (part.layout(self.axis.size, self.dim),),
                    src_data_rank=src_data_rank,
                ),
                requires_grad=parameter.requires_grad,
            )
            for part, piece in zip(
                self.parts, self._pieces(parameter.detach()), strict=True
            )
        ]
        held = nn.ParameterList(placed)
        for i, part in enumerate(held):
            copy_attributes(parameter, part)
            remember_layout(held, str(i), part)
        module.register_module(f"{self.name}_parts", held)


_SPLIT = "split_parameters"  # on a module: those that it holds in parts, by name


def save_joined(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """State-dict hook: one key for each parameter, as before it was split."""
    for split in getattr(module, _SPLIT).values():
        split.save(state, prefix)


def load_split(
    module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Load hook: the key of a whole parameter becomes those of its parts."""
    for split in getattr(module, _SPLIT).values():
        split.load(module, state, prefix)


def _like(
    value: torch.Tensor, parameter: torch.Tensor, src_data_rank: int | None
) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return value
    # Other styles of parallelism may have added axes to the parameter's mesh.
    mesh, layout = parameter.device_mesh, parameter.placements
    return distribute_tensor(value, mesh, layout, src_data_rank=src_data_rank)
