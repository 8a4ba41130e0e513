"""State dicts of modules whose parameters DistributedDataParallel has opened.

It registers this rank's shards as plain parameters and, from the first forward on, puts
DTensors around them where no state dict looks: into plain attributes. Saving would drop
the parameters silently, or take one rank's shard for the whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from torchspmd import _torch

_LAYOUTS = "_torchspmd_layouts"  # on a module: the layout of each placed parameter


@dataclass(frozen=True, slots=True)
class Layout:
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
    known = getattr(module, _LAYOUTS, None)
    if known is None:
        module.register_state_dict_post_hook(save_opened)
        module.register_load_state_dict_pre_hook(load_opened)
    layout = Layout(
        placed.device_mesh,
        placed.placements,
        placed.shape,
        placed.stride(),
        _torch.local_tensor(placed).shape,
    )
    setattr(module, _LAYOUTS, {**(known or {}), name: layout})


def opened_parameters(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The DTensor of each parameter that is a plain shard now, or an attribute.

    What is computed with it trains the shard. A weight that a parametrization computes
    is neither: its parameters have other names.
    """
    held = {
        **vars(module),
        **dict(module.named_parameters(recurse=False, remove_duplicate=False)),
    }
    for name, layout in getattr(module, _LAYOUTS, {}).items():
        value: Any = held.get(name)
        if isinstance(value, DTensor) and not isinstance(value, nn.Parameter):
            yield name, value
        elif isinstance(value, nn.Parameter) and not isinstance(value, DTensor):
            # A whole tensor that was assigned is none of this rank's shards.
            if value.shape == layout.local_shape:
                yield name, layout.wrap(value)


def save_opened(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """State-dict hook: opened parameters are saved as the DTensors that they were."""
    for name, parameter in opened_parameters(module):
        state[f"{prefix}{name}"] = parameter.detach()


def load_opened(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    *rest: Any,
) -> None:
    """Load hook: whole tensors and DTensors go into the shards of opened parameters."""
    registered = dict(module.named_parameters(recurse=False))
    for name, opened in opened_parameters(module):
        parameter = opened.detach()
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
