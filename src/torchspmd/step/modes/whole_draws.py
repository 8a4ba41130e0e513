"""Random numbers for shards: those of the whole tensor, of which each rank keeps its rows.

If each rank drew for its own rows alone, ranks with one seed would draw the same numbers.
"""

from collections.abc import Iterable
from typing import Any, final

import torch

from torchspmd import _torch
from torchspmd.step.capture.trace_modes import OperatorMode
from torchspmd.step.modes.shard_layout import Sharding


@final
class WholeDraws(OperatorMode):
    """Fills shards, and tensors like them, with what one device would draw."""

    def __init__(self, shardings: Iterable[Sharding]) -> None:
        super().__init__()
        self._known = {each.layout: each for each in shardings}

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator; one that draws for a shard, on a whole tensor."""
        layout = _torch.layout_of(args[0]) if args and _is_tensor(args[0]) else None
        if layout is None or not _torch.draws_random_numbers(func, args, kwargs):
            return func(*args, **kwargs)
        sharding = self._known.get(layout)
        is_fill = _torch.written_arguments(func) == (0,) or _is_like(func)
        if sharding is None or sharding.whole is not None or not is_fill:
            return func(*args, **kwargs)
        if any(map(_is_tensor, args[1:])):
            return func(*args, **kwargs)
        return _fill(func, args, kwargs, sharding)


def _fill(func: Any, args: Any, kwargs: Any, sharding: Sharding) -> Any:
    shard = _torch.plain_tensor(args[0])
    whole = shard.new_empty(tuple(args[0].shape))
    drawn = func(whole, *args[1:], **kwargs)
    rows = drawn[slice(*sharding.kept)] if sharding.is_sharded else drawn
    if _torch.written_arguments(func):
        shard.copy_(rows)
        return args[0]
    shape = tuple(args[0].shape)
    layout = sharding.layout
    spec = _torch.build_spec(layout.mesh, layout.placements, shape, drawn.dtype)
    return _torch.wrap_local(rows.contiguous(), spec)


def _is_like(func: Any) -> bool:
    return bool(func.name().partition(".")[0].endswith("_like"))


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)
