"""Placements and layouts: the dims that they shard, and as they are written in code."""

from collections.abc import Sequence
from typing import Final, TypeAlias

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

Layout: TypeAlias = tuple[Placement, ...]

# For code that torch.compile traces: torch 2.11 does not know the type of those made there.
REPLICATE: Final = Replicate()
PARTIAL: Final = Partial()
_SHARDS: Final = tuple(map(Shard, range(64)))  # of every dim that a tensor can have


def shard(dim: int) -> Shard:
    """``Shard(dim)``, for code that torch.compile traces."""
    return _SHARDS[dim]


def shard_dim(placement: Placement) -> int | None:
    """The tensor dim that a placement shards, of a plain or a strided shard."""
    if placement.is_replicate() or placement.is_partial():
        return None
    return getattr(placement, "dim")  # noqa: B009  (not on the base class)


def reduce_op(placement: Placement) -> str | None:
    """``sum``, ``avg`` and so on of a partial placement; None for others."""
    return str(placement.reduce_op) if isinstance(placement, Partial) else None


def positive_dim(placement: Placement, ndim: int) -> Placement:
    """The same placement with a shard dimension that counts from the front.

    >>> positive_dim(Shard(-1), 3)
    Shard(dim=2)
    """
    if type(placement) is Shard and placement.dim < 0:
        return shard(placement.dim + ndim)
    return placement


def positive_dims(layout: Sequence[Placement], ndim: int) -> Layout:
    """The same layout with tensor dims counted from the front.

    >>> positive_dims((Shard(-1), Shard(0)), 3)
    (Shard(dim=2), Shard(dim=0))
    """
    return tuple(positive_dim(placement, ndim) for placement in layout)


def format_placement(placement: Placement) -> str:
    """A placement as it is written in code.

    >>> format_placement(Shard(1)), format_placement(Partial("avg"))
    ('Shard(1)', "Partial('avg')")
    """
    if isinstance(placement, Partial):
        op = str(placement.reduce_op)
        return "Partial()" if op == "sum" else f"Partial({op!r})"
    if type(placement) is Shard:
        return f"Shard({placement.dim})"
    return "Replicate()" if placement.is_replicate() else repr(placement)


def format_layout(layout: Sequence[Placement]) -> str:
    """A layout as it is written in code.

    >>> format_layout((Partial(), Shard(1)))
    '[Partial(), Shard(1)]'
    """
    return f"[{', '.join(format_placement(entry) for entry in layout)}]"
