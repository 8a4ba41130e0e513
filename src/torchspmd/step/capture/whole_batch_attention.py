"""Attention on the CPU in the default mode: DTensor has no rule for its kernel.

A row of the batch attends to itself alone, so each rank calls the kernel on its own rows,
with those rows of the mask; heads that lie over ranks are handled alike.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torchspmd import _torch
from torchspmd.step.capture.finishing import finished
from torchspmd.step.capture.whole_values import on_all_ranks

_aten = torch.ops.aten
ATTENTION = (
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


def attention(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """The kernel, or its backward, on this rank's part of the batch or of the heads."""
    first = 0 if func is ATTENTION[0] else 1  # a backward takes the gradient before
    given = args[first : first + 3]  # query, key, value
    query = next(value for value in (*given, *args) if isinstance(value, DTensor))
    layout = tuple(_part(axis, given) for axis in range(query.device_mesh.ndim))
    query = on_all_ranks(given[0], query.device_mesh)

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return _torch.local_tensor(_moved(value, query, layout))

    made = func(*map(own, args), **{name: own(value) for name, value in kwargs.items()})
    return tuple(_whole(local, query, layout) for local in made)


def _part(axis: int, given: tuple[torch.Tensor, ...]) -> Placement:
    """What all of query, key and value are to be, so that little is sent."""
    found = [value.placements[axis] for value in given if isinstance(value, DTensor)]
    if Shard(0) in found:
        return Shard(0)
    # Heads that share keys with others do not lie where those are.
    same_heads = len({value.shape[1] for value in given}) == 1
    return Shard(1) if Shard(1) in found and same_heads else Replicate()


def _moved(
    value: torch.Tensor, query: DTensor, layout: tuple[Placement, ...]
) -> DTensor:
    """A tensor with the part that goes with the query's; what is for all rows, whole."""
    value = on_all_ranks(value, query.device_mesh)
    assert isinstance(value, DTensor), type(value)

    def place(placement: Placement) -> Placement:
        if not isinstance(placement, Shard):
            return placement
        dim = placement.dim
        has_rows = value.ndim >= 3 and value.shape[dim] == query.shape[dim]
        return placement if has_rows else Replicate()

    return finished(value, tuple(map(place, layout)))


def _whole(
    local: torch.Tensor, query: DTensor, layout: tuple[Placement, ...]
) -> torch.Tensor:
    """The DTensor that a rank's result is a part of, in the same order of memory."""
    shape, stride = list(local.shape), list(local.stride())
    for placement in layout:
        if isinstance(placement, Shard):
            dim = placement.dim
            for other, step in enumerate(stride):
                if step > stride[dim]:
                    stride[other] = step // max(shape[dim], 1) * query.shape[dim]
            shape[dim] = query.shape[dim]
    spec = _torch.strided_spec(
        query.device_mesh, layout, tuple(shape), tuple(stride), local.dtype
    )
    return _torch.wrap_local(local, spec)
