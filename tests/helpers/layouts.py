"""Tensors in the layouts that tests of ``local_map`` are about."""

import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)

# torch 2.11 has other names for them.
all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
reduce_scatter = (
    getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
)


def put(full, mesh, *layout):
    """A whole value, known to every rank, as a DTensor."""
    return distribute_tensor(full.detach(), mesh, layout, src_data_rank=None)


def leaf(full, mesh, layout):
    """The same, as a leaf of autograd."""
    return put(full, mesh, *layout).requires_grad_()


def leaf_of_terms(full, mesh, layout):
    """The same; partial ones get unequal terms that add up."""
    whole = [R if entry.is_partial() else entry for entry in layout]
    local = put(full, mesh, *whole).to_local()
    for axis, entry in enumerate(layout):
        if entry.is_partial():
            size, rank = mesh.size(axis), mesh.get_local_rank(axis)
            local = local * (2 * (rank + 1) / (size * (size + 1)))
    return DTensor.from_local(
        local, mesh, layout, shape=full.shape, stride=full.stride()
    ).requires_grad_()
