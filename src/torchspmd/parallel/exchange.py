"""Move a plain local tensor from one layout to another on one axis.

No autograd here: ``move`` is used inside autograd functions, which pair each move of a
value with the move of its gradient. Every move knows the shape of the whole tensor, so
that uneven shards are padded on the wire and cut after it.
"""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchspmd import _torch
from torchspmd.errors import LayoutError
from torchspmd.parallel.axis import Axis, shard_offset, shard_size


def move(
    tensor: torch.Tensor,
    source: Placement,
    target: Placement,
    axis: Axis,
    shape: tuple[int, ...],
    *,
    owned: bool = False,
) -> torch.Tensor:
    """The same value in another layout; ``shape`` is that of the whole tensor.

    ``owned`` says that nobody else reads the tensor: a sum may overwrite it.
    """
    if is_same(source, target):
        return tensor
    if type(source) is Partial:
        started = start_reduce(tensor, target, axis, owned=owned)
        return finish_reduce(started, target, axis, shape)
    if type(source) is Shard:
        if type(target) is Shard:
            return _reshard(tensor, source.dim, target.dim, axis, shape)
        if type(target) is Replicate:
            return all_gather(tensor, source.dim, axis, shape[source.dim])
    elif type(target) is Shard:
        return take_shard(tensor, target.dim, axis)
    elif type(target) is Partial:
        return tensor if axis.rank == 0 else torch.zeros_like(tensor)
    raise LayoutError(f"no way from {source!r} to {target!r} on the {axis}.")


def is_same(first: Placement, second: Placement) -> bool:
    """Whether two placements are equal; their own comparison takes 5 us.

    >>> is_same(Shard(0), Shard(0)), is_same(Shard(0), Replicate())
    (True, False)
    """
    if first is second:
        return True
    kind = type(first)
    if kind is not type(second):
        return False
    if kind is Shard:
        return bool(first.dim == second.dim)  # type: ignore[attr-defined]
    return kind is Replicate or kind is Partial


def start_reduce(
    tensor: torch.Tensor, target: Placement, axis: Axis, *, owned: bool
) -> torch.Tensor:
    """Start to sum a tensor over the ranks; give the result to ``finish_reduce``."""
    if type(target) is Partial:
        return tensor
    if type(target) is Replicate:
        buffer = tensor.contiguous() if owned else _copy(tensor)
        return _torch.start_all_reduce(buffer, "sum", axis.group)
    assert type(target) is Shard, target
    stacked = _stack_shards(tensor, target.dim, axis.size).contiguous()
    return _torch.start_reduce_scatter(stacked, axis.size, axis.group)


def finish_reduce(
    buffer: torch.Tensor, target: Placement, axis: Axis, shape: tuple[int, ...]
) -> torch.Tensor:
    """Wait for a started sum and cut the padding of an uneven shard."""
    if type(target) is Partial:
        return buffer
    result = _torch.wait(buffer)
    if type(target) is not Shard:
        return result
    return _cut(result, target.dim, shard_size(shape[target.dim], axis.size, axis.rank))


def all_gather(tensor: torch.Tensor, dim: int, axis: Axis, size: int) -> torch.Tensor:
    """All shards of a dimension of ``size`` elements, in order."""
    padded = _pad(tensor, dim, -(-size // axis.size)).contiguous()
    rows = _torch.wait(_torch.start_all_gather(padded, axis.size, axis.group))
    whole = rows if dim == 0 else _join_shards(rows, dim, axis.size)
    # Padding is at the end only: all shards before a short one are full.
    return _cut(whole, dim, size)


def take_shard(tensor: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    """This rank's shard of a whole tensor, in its own memory."""
    size = tensor.size(dim)
    start = shard_offset(size, axis.size, axis.rank)
    length = shard_size(size, axis.size, axis.rank)
    return tensor.narrow(dim, start, length).contiguous()


def all_reduce_max(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The largest value over the ranks, in the given memory."""
    return _torch.wait(_torch.start_all_reduce(tensor, "max", axis.group))


def _reshard(
    tensor: torch.Tensor, source: int, target: int, axis: Axis, shape: tuple[int, ...]
) -> torch.Tensor:
    """Shards of one dimension into shards of another: every rank sends to every rank."""
    chunk = -(-shape[source] // axis.size)
    rows = _stack_shards(_pad(tensor, source, chunk), target, axis.size).contiguous()
    count = [rows.size(0) // axis.size] * axis.size
    received = _torch.wait(_torch.start_all_to_all(rows, count, count, axis.group))
    whole = _join_shards(received, source, axis.size)
    whole = _cut(whole, source, shape[source])
    return _cut(whole, target, shard_size(shape[target], axis.size, axis.rank))


def _stack_shards(tensor: torch.Tensor, dim: int, num_ranks: int) -> torch.Tensor:
    """The shards of ``dim``, padded to one size, one below the other on dim 0."""
    chunk = -(-tensor.size(dim) // num_ranks)
    padded = _pad(tensor, dim, chunk * num_ranks)
    if dim == 0:
        return padded.contiguous()
    apart: torch.Tensor = padded.unflatten(dim, (num_ranks, chunk))
    return apart.movedim(dim, 0).flatten(0, 1)


def _join_shards(rows: torch.Tensor, dim: int, num_ranks: int) -> torch.Tensor:
    """The inverse: shards one below the other on dim 0 become neighbours on ``dim``."""
    apart: torch.Tensor = rows.unflatten(0, (num_ranks, rows.size(0) // num_ranks))
    return apart.movedim(0, dim).flatten(dim, dim + 1)


def _pad(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    missing = size - tensor.size(dim)
    if missing == 0:
        return tensor
    if missing < 0:
        raise LayoutError(
            f"dimension {dim} of this rank's part of a tensor has {tensor.size(dim)} "
            f"elements where a shard has at most {size}. The part is not laid out as "
            "the layers take it: pass its true layout, or a DTensor."
        )
    return F.pad(tensor, [0, 0] * (tensor.ndim - 1 - dim) + [0, missing])


def _cut(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    if tensor.size(dim) == size:
        return tensor
    return tensor.narrow(dim, 0, size).contiguous()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
