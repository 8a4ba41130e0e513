"""Lists of tensors that are written while a step is traced count their writes.

Eager operators on lists (``_foreach_add_``) raise the version of each tensor that they
write; on tensors without values they do not. What was read from a tensor, or gathered from
it, is kept for as long as its version stays: it would be taken for the value of now.
"""

import functools
from collections.abc import Iterator
from typing import Any, final

import torch

from torchspmd import _torch
from torchspmd.step.capture.lost_effects import check_effect


@final
class WrittenLists(_torch.TorchDispatchMode):
    """Raises the version of every tensor in a list that an operator writes into."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        check_effect(func)
        result = func(*args, **kwargs)
        for place, name in _written(func):
            value = args[place] if place < len(args) else kwargs.get(name)
            if isinstance(value, (list, tuple)):
                torch.autograd.graph.increment_version(list(_parts(value)))
        return result


@functools.cache
def _written(operator: Any) -> tuple[tuple[int, str], ...]:
    # Kept for each operator: asked at every call of a traced step.
    places = _torch.written_arguments(operator)
    if not places:
        return ()
    return tuple(zip(places, _torch.signature_of(operator).written, strict=True))


def _parts(tensors: Any) -> Iterator[torch.Tensor]:
    """Each tensor, and of a DTensor its shard too, which has a version of its own."""
    for tensor in tensors:
        if tensor is None:  # optional ones
            continue
        yield tensor
        local = _torch.plain_tensor(tensor)
        if local is not tensor:
            yield local
