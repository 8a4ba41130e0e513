"""Names for people: the axes of a mesh, and modules whatever wraps them."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

# Attributes under which wrappers of torch keep the module that they wrap.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of a mesh's axes; numbers where it has none."""
    return mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))


def format_mesh(mesh: DeviceMesh) -> str:
    """Names and sizes of a mesh's axes: ``dp=2, tp=4``."""
    sizes = zip(axis_names(mesh), mesh.shape, strict=True)
    return ", ".join(f"{name}={size}" for name, size in sizes)


def plain_name(name: str) -> str:
    """A path without the parts that wrappers add, except DDP's ``module``.

    A user's own attribute may be called ``module`` too; see ``unwrapped``.

    >>> plain_name("layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def inner_module(module: nn.Module) -> nn.Module:
    """The module inside of compile, checkpoint and FSDP wrappers around it."""
    for name in WRAPPERS:
        if hasattr(module, name):
            return inner_module(getattr(module, name))
    return module


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own model inside all wrappers, DistributedDataParallel too."""
    inner = inner_module(model)
    if isinstance(inner, DistributedDataParallel):
        return unwrapped(inner.module)
    return inner


def parameter_names(model: nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters by plain name, each once."""
    return {plain_name(name): value for name, value in model.named_parameters()}
