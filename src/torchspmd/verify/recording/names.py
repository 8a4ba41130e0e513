"""Names that do not depend on how a model is wrapped."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Attributes under which wrappers of torch keep the module that they wrap.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def plain_name(name: str) -> str:
    """A path without the parts that wrappers add; DDP's ``module`` is cut elsewhere.

    >>> plain_name("layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own model inside wrappers around all of it."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
            continue
        inner = [getattr(model, name) for name in _WRAPPERS if hasattr(model, name)]
        if not inner:
            return model
        model = inner[0]


def parameter_names(model: nn.Module) -> Mapping[str, torch.nn.Parameter]:
    """Parameters by name, each once."""
    return {plain_name(name): value for name, value in model.named_parameters()}


def module_of(name: str) -> str:
    """The module that owns a parameter, a buffer or a state.

    >>> module_of("layers.0.up.weight")
    'layers.0.up'
    """
    return name.rpartition(".")[0]


def wrappers_of(model: nn.Module) -> tuple[str, ...]:
    """Which data-parallel wrappers are in a model; these want different rows by rank."""
    from torch.distributed.fsdp import FSDPModule  # takes long to import

    found = set()
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            found.add("DistributedDataParallel")
        elif isinstance(module, FSDPModule):
            found.add("fully_shard")
    return tuple(sorted(found))
