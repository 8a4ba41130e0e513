"""Layout changes that autograd understands.

Between plain tensors and DTensors, and between layouts of a plain tensor. Each is one
small autograd function, because the ready-made ones of DTensor cost several times as
much host time as the layer they serve.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torchspmd import _torch
from torchspmd.errors import LayoutError, UsageError
from torchspmd.layout.placements import positive_dim
from torchspmd.layout.shards import full_shard_size, shard_bounds, shard_size
from torchspmd.parallel.axis import Axis, global_shape, gradient_layout, layout_of

# ----------------------------------------------------------------------------
# Move a plain local tensor from one layout to another on one axis.
#
# No autograd here: ``move`` is used inside autograd functions, which pair each move of a
# value with the move of its gradient. Every move knows the shape of the whole tensor, so
# that uneven shards are padded on the wire and cut after it.


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

    ``owned`` says that nothing else reads the tensor: a sum may overwrite it.
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
        buffer = (
            tensor.contiguous()
            if owned
            else tensor.clone(memory_format=torch.contiguous_format)
        )
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
    padded = _pad(tensor, dim, full_shard_size(size, axis.size)).contiguous()
    rows = _torch.gather_now(padded, axis.size, axis.group)
    whole = rows if dim == 0 else _join_shards(rows, dim, axis.size)
    # Padding is at the end only: all shards before a short one are full.
    return _cut(whole, dim, size)


def take_shard(tensor: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    """This rank's shard of a whole tensor, in its own memory."""
    start, end = shard_bounds(tensor.size(dim), axis.size, axis.rank)
    return tensor.narrow(dim, start, end - start).contiguous()


def all_reduce_max(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The largest value over the ranks, in the given memory."""
    return _torch.wait(_torch.start_all_reduce(tensor, "max", axis.group))


def _reshard(
    tensor: torch.Tensor, source: int, target: int, axis: Axis, shape: tuple[int, ...]
) -> torch.Tensor:
    """Shards of one dimension into shards of another: every rank sends to every rank."""
    chunk = full_shard_size(shape[source], axis.size)
    rows = _stack_shards(_pad(tensor, source, chunk), target, axis.size).contiguous()
    count = [rows.size(0) // axis.size] * axis.size
    received = _torch.wait(_torch.start_all_to_all(rows, count, count, axis.group))
    whole = _join_shards(received, source, axis.size)
    whole = _cut(whole, source, shape[source])
    return _cut(whole, target, shard_size(shape[target], axis.size, axis.rank))


def _stack_shards(tensor: torch.Tensor, dim: int, num_ranks: int) -> torch.Tensor:
    """The shards of ``dim``, padded to one size, one below the other on dim 0."""
    chunk = full_shard_size(tensor.size(dim), num_ranks)
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


def change_layout(
    tensor: torch.Tensor,
    source: Placement,
    target: Placement,
    axis: Axis,
    shape: tuple[int, ...],
    *,
    gradient: Placement | None = None,
    leaving: Placement | None = None,
) -> torch.Tensor:
    """A local tensor in another layout, with the matching move of its gradient.

    Args:
        tensor: This rank's part.
        source: Its layout.
        target: The layout of the result.
        axis: The mesh axis.
        shape: Shape of the whole tensor.
        gradient: The layout in which the result's gradient arrives, if that is not the
            usual one of ``target``: a layer that reads a whole input and writes a
            shard of its output gives every rank a partial value of the input's gradient.
        leaving: The layout in which the gradient goes on, if that is not the usual one
            of ``source``.
    """
    arriving = gradient_layout(target) if gradient is None else gradient
    leaving = gradient_layout(source) if leaving is None else leaving
    if is_same(source, target) and is_same(arriving, leaving):
        return tensor
    return _Redistribute.apply(
        tensor, (source, target), (arriving, leaving), axis, shape, False
    )


def redistribute(
    tensor: torch.Tensor,
    source: Placement,
    target: Placement,
    axis: Axis,
    shape: tuple[int, ...],
    *,
    as_dtensor: bool,
) -> torch.Tensor:
    """A plain tensor or DTensor in another layout, as a plain tensor or DTensor.

    One collective each way: a gradient that arrives as partial values is reduced
    straight into the layout in which it leaves.
    """
    if torch.compiler.is_compiling():
        local = unwrap(tensor, axis) if isinstance(tensor, DTensor) else tensor
        local = change_layout(local, source, target, axis, shape)
        return wrap(local, target, axis, shape) if as_dtensor else local
    gradients = gradient_layout(target), gradient_layout(source)
    return _Redistribute.apply(
        tensor, (source, target), gradients, axis, shape, as_dtensor
    )


def reduce_other_partials(tensor: DTensor) -> DTensor:
    """The same DTensor, with a pending mean or maximum over the ranks computed.

    Layers know partial sums only. A DTensor on another mesh is left for ``layout_of``.
    """
    placements = tensor.placements
    if type(placements[0]) is not Partial or placements[0].reduce_op == "sum":
        return tensor
    return tensor.redistribute(placements=(Replicate(), *placements[1:]))


def arriving(
    tensor: torch.Tensor, given: Placement, axis: Axis, where: str
) -> tuple[torch.Tensor, Placement, tuple[int, ...]]:
    """What a layer gets as an input, its layout, and the shape of the whole.

    The parts of a plain tensor, whose layout is the given one, are taken as even; only a
    DTensor says otherwise.
    """
    if isinstance(tensor, DTensor):
        reduced = reduce_other_partials(tensor)
        return reduced, layout_of(reduced, axis, where), tuple(reduced.shape)
    layout = positive_dim(given, tensor.ndim)
    return tensor, layout, global_shape(tuple(tensor.shape), layout, axis.size)


def unwrap(
    tensor: DTensor, axis: Axis, gradient: Placement | None = None
) -> torch.Tensor:
    """This rank's shard of a DTensor; its gradient goes back as a DTensor.

    ``gradient`` is the layout of that gradient, if not the usual one. Layers that read
    the same DTensor share one shard, so that their gradients add up as plain tensors.
    """
    if torch.compiler.is_compiling():
        gradients = None if gradient is None else (gradient,)
        return tensor.to_local(grad_placements=gradients)
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return _torch.local_tensor(tensor)
    shared = getattr(tensor, _SHARED, None)
    shard, history = _torch.local_tensor(tensor), tensor.grad_fn
    if (
        shared is not None
        and shared[0] is shard
        and shared[1] is history
        and shared[2] is type(gradient)
    ):
        return shared[3]
    layout: Placement = tensor.placements[0]
    leaving = gradient_layout(layout) if gradient is None else gradient
    local: torch.Tensor = _Redistribute.apply(
        tensor, (layout, layout), (leaving, leaving), axis, tuple(tensor.shape), False
    )
    setattr(tensor, _SHARED, (shard, history, type(gradient), local))
    return local


# Where a DTensor keeps the shard that layers share.
_SHARED = "_torchspmd_shard"


def wrap(
    tensor: torch.Tensor, placement: Placement, axis: Axis, shape: tuple[int, ...]
) -> DTensor:
    """A DTensor around this rank's shard; its gradient comes back as a shard."""
    if torch.compiler.is_compiling():
        meta = torch.empty(shape, device="meta")
        return DTensor.from_local(
            tensor, axis.mesh, (placement,), shape=meta.shape, stride=meta.stride()
        )
    gradient = gradient_layout(placement)
    return _Redistribute.apply(
        tensor, (placement, placement), (gradient, gradient), axis, shape, True
    )


def begin_backward(what: str, gradient: torch.Tensor | None, axis: Axis | None) -> None:
    """What every backward of a layer begins with: checks that are nearly free.

    ``once_differentiable`` refuses second derivatives too, at several times the host time.
    """
    if torch.compiler.is_compiling():
        return
    if torch.is_grad_enabled():
        raise UsageError(
            f"backward of {what} with create_graph=True: the gradients of parallel "
            "layers cannot be differentiated again. Use the layer without its style, or "
            "torch.distributed.tensor.parallel, where second derivatives are needed."
        )
    if axis is not None and axis.replicas is not None and gradient is not None:
        if isinstance(gradient, DTensor):
            gradient = _torch.local_tensor(gradient)
        axis.replicas.note_backward(gradient)


class _Redistribute(torch.autograd.Function):
    """A plain tensor or DTensor in another layout, as a plain tensor or DTensor."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        layouts: tuple[Placement, Placement],
        gradients: tuple[Placement, Placement],
        axis: Axis,
        shape: tuple[int, ...],
        as_dtensor: bool,
    ) -> torch.Tensor:
        from_dtensor = isinstance(tensor, DTensor)
        ctx.call = (*gradients, axis, shape, from_dtensor)
        local = _torch.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        moved = move(local, *layouts, axis, shape)
        if as_dtensor:
            spec = axis.spec(layouts[1], shape, moved.dtype)
            return _torch.wrap_local(moved.detach(), spec)
        # A fresh object: autograd writes its history into what is returned here.
        return moved.view_as(moved) if moved is local else moved

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        arriving, leaving, axis, shape, from_dtensor = ctx.call
        begin_backward("a parallel layer", gradient, axis)
        if isinstance(gradient, DTensor):
            gradient, arriving = unwrap_gradient(gradient, arriving)
        moved = move(gradient, arriving, leaving, axis, shape)
        if from_dtensor:
            moved = _torch.wrap_local(moved, axis.spec(leaving, shape, moved.dtype))
        return moved, None, None, None, None, None


def unwrap_gradient(
    gradient: torch.Tensor, layout: Placement
) -> tuple[torch.Tensor, Placement]:
    """A gradient's shard and the layout in which it arrived.

    ``layout`` is that of the tensor whose gradient it is.
    """
    if not isinstance(gradient, DTensor):
        return gradient, gradient_layout(layout)
    gradient = reduce_other_partials(gradient)
    arriving: Placement = gradient.placements[0]
    return _torch.local_tensor(gradient), arriving
