"""Random numbers of the default mode: those that one device would draw for the whole batch.

Each rank has rows of the batch. If each drew for its own rows alone, ranks with one seed
would all draw the same numbers. So every rank draws for the whole batch and keeps its part:
ranks with one seed draw what one device with that seed draws, others draw independently.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torchspmd import _torch
from torchspmd.step.capture.whole_values import everything, write_terms

_aten = torch.ops.aten


def draw_for_all(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Call an operator that draws random numbers for its first argument, a DTensor."""
    written = _torch.written_arguments(func)
    if "dropout_p" in _torch.argument_names(func) or any(written):
        raise NotImplementedError(
            f"Operator {func} draws random numbers inside its kernel and has no sharding "
            "strategy for them."
        )
    first = args[0]
    if func is _aten.native_dropout.default:
        return _dropout(func, *args)
    name = func.name().partition(".")[0]
    is_filled = bool(written) or name.endswith("_like")
    whole = empty_whole(first) if is_filled else everything(first)
    made = func(whole, *map(everything, args[1:]), **kwargs)
    if not isinstance(made, torch.Tensor):
        raise NotImplementedError(
            f"Operator {func} draws several tensors and has no sharding strategy for them."
        )
    part = own_part(made, first)
    if not written:
        return part
    has_terms = any(isinstance(p, Partial) for p in first.placements)
    return write_terms(func, first, part) if has_terms else first.copy_(part)


def _dropout(func: Any, x: DTensor, p: float, train: bool | None) -> Any:
    """The mask does not depend on values, so that these stay where they are."""
    if train is False or p == 0:
        return func(x, p, train)
    _, drawn = func(empty_whole(x), p, train)
    mask = own_part(drawn, x)
    return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def empty_whole(value: DTensor) -> torch.Tensor:
    """A tensor of the whole batch: numbers are drawn in the order of memory."""
    device = _torch.local_tensor(value).device
    return torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device=device
    )


def own_part(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """The part of a tensor that every rank has, laid out like a DTensor where that fits."""
    placements = tuple(_placement(each, whole, like) for each in like.placements)
    mesh, part = like.device_mesh, whole
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            size, rest = divmod(part.shape[placement.dim], mesh.size(axis))
            if rest:
                raise NotImplementedError(
                    f"Random numbers for a DTensor of {tuple(whole.shape)} that is sharded "
                    f"unevenly over {mesh.size(axis)} ranks: there is no sharding strategy."
                )
            start = mesh.get_local_rank(axis) * size
            part = part.narrow(placement.dim, start, size)
    spec = _torch.build_spec(mesh, placements, tuple(whole.shape), whole.dtype)
    return _torch.wrap_local(part.contiguous(), spec)


def _placement(placement: Placement, whole: torch.Tensor, like: DTensor) -> Placement:
    """Sharded like the other tensor if that dim is the same in both."""
    if not isinstance(placement, Shard):
        return Replicate()
    same = whole.shape[: placement.dim + 1] == like.shape[: placement.dim + 1]
    return placement if same else Replicate()
