"""Right ways to spread the models of ``_parity_models`` over a mesh."""

from typing import Any

import torch
from _parity_layers import by_hand
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from torchspmd.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

Styles = dict[str, Any]


def tensor_plan() -> Styles:
    return {
        "layers.*.attention.[qkv]": ColwiseParallel(),
        "layers.*.attention.o": RowwiseParallel(),
        "layers.*.mlp.up": ColwiseParallel(),
        "layers.*.mlp.down": RowwiseParallel(),
    }


def vocabulary_plan() -> Styles:
    return {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def sequence_plan() -> Styles:
    by_token = SequenceParallel(use_local_output=True)
    gather = PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate()
    )
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "position": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "norm": by_token,
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        "layers.*.norm1": by_token,
        "layers.*.norm2": by_token,
        "layers.*.attention": gather,
        "layers.*.attention.[qkv]": ColwiseParallel(),
        "layers.*.attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.mlp": gather,
        "layers.*.mlp.up": ColwiseParallel(),
        "layers.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.drop": by_token,
    }


PLANS = {
    "tensor": tensor_plan,
    "vocabulary": lambda: tensor_plan() | vocabulary_plan(),
    "sequence": sequence_plan,
}


def tensor(model: Any, mesh: DeviceMesh, plan: str = "tensor") -> None:
    parallelize_module(model, mesh["tp"], PLANS[plan]())


def manual(
    model: Any, mesh: DeviceMesh, mistakes: dict[str, dict[str, Any]] | None = None
) -> None:
    by_hand(model, mesh["tp"], mistakes)


def ddp(model: Any, mesh: DeviceMesh) -> Any:
    return DistributedDataParallel(model, device_mesh=mesh["dp"])


def fsdp(model: Any, mesh: DeviceMesh, axes: tuple[str, ...] = ("dp",)) -> None:
    data = mesh[axes] if len(axes) > 1 else mesh[axes[0]]
    for layer in getattr(model, "layers", ()):
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)


def fsdp_tensor(model: Any, mesh: DeviceMesh, plan: str = "tensor") -> None:
    tensor(model, mesh, plan)
    fsdp(model, mesh)


def ddp_tensor(model: Any, mesh: DeviceMesh) -> Any:
    tensor(model, mesh)
    return ddp(model, mesh)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)
