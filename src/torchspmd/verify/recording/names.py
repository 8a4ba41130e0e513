"""Which module owns a name, and which data-parallel wrappers a model has."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel


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
