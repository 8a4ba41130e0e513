"""Editing a captured graph: the collectives' operators, and fake values of new nodes."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

_functional = torch.ops._c10d_functional
ALL_REDUCE = _functional.all_reduce.default
ALL_GATHER = _functional.all_gather_into_tensor.default
ALL_GATHER_OUT = _functional.all_gather_into_tensor_out.default
REDUCE_SCATTER = _functional.reduce_scatter_tensor.default
WAIT = _functional.wait_tensor.default


def fake_result(target: Callable[..., Any], args: Any, **options: Any) -> Any:
    """What a function gives for fake or meta tensors, itself without values.

    Collectives are not called: whoever records communication would count them.
    """
    with torch.no_grad(), _fake_mode_of(args):
        if target is ALL_REDUCE:
            return torch.empty_like(args[0], memory_format=torch.contiguous_format)
        if target is ALL_GATHER:
            shard, size = args[0], args[1]
            return shard.new_empty((shard.shape[0] * size, *shard.shape[1:]))
        if target is REDUCE_SCATTER:
            whole, size = args[0], args[2]
            return whole.new_empty((whole.shape[0] // size, *whole.shape[1:]))
        return args[0] if target is WAIT else target(*args, **options)


@contextlib.contextmanager
def _fake_mode_of(args: Any) -> Iterator[None]:
    from torch.utils._pytree import tree_leaves

    modes = [leaf.fake_mode for leaf in tree_leaves(args) if hasattr(leaf, "fake_mode")]
    with modes[0] if modes else contextlib.nullcontext():
        yield
