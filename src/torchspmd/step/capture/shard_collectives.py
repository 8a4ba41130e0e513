"""Shards to whole tensors and back, as plain collectives of a graph.

Rows that do not divide by the number of ranks are padded at the end, the same way on every
rank, so that the graphs of all ranks have the same nodes.
"""

from typing import Any

import torch
import torch.nn.functional as F

from torchspmd import _torch


def gather_rows(local: torch.Tensor, layout: Any) -> torch.Tensor:
    """The whole tensor from this rank's rows of it."""
    if not is_sharded(layout):
        return local.clone()  # small, and a write into it must not reach the parameter
    rows, share = layout.shape[0], rows_per_rank(layout)
    started = _torch.start_all_gather(
        _padded(local, rows, share, layout.mesh.size()), *_group(layout)
    )
    whole = _torch.wait(started)
    return whole if _is_even(rows, layout) else whole.narrow(0, 0, rows)


def reduce_rows(gradient: torch.Tensor, layout: Any, *, average: bool) -> torch.Tensor:
    """This rank's rows of the sum, or average, of all ranks' gradients."""
    if is_sharded(layout):
        total = _scattered(gradient.contiguous(), layout)
    else:
        total = _torch.sum_over(gradient, layout.mesh.get_group())
    # gloo has no average: the sum is scaled everywhere.
    return total / layout.mesh.size() if average else total


def _scattered(gradient: torch.Tensor, layout: Any) -> torch.Tensor:
    rows, size = layout.shape[0], layout.mesh.size()
    share = rows_per_rank(layout)
    whole = gradient
    if not _is_even(rows, layout):
        whole = _pad_rows(gradient, size * share - rows)
    scattered = _torch.wait(_torch.start_reduce_scatter(whole, *_group(layout)))
    if _is_even(rows, layout):
        return scattered
    first = min(layout.mesh.get_local_rank() * share, rows)
    return scattered.narrow(0, 0, min(share, rows - first))


def is_sharded(layout: Any) -> bool:
    """Whether ranks hold rows of the tensor, not all of it."""
    return bool(layout.placements[0].is_shard())


def rows_per_rank(layout: Any) -> int:
    """The rows of the first ranks; the last ones may have fewer, or none."""
    share: int = -(-layout.shape[0] // layout.mesh.size())
    return share


def _is_even(rows: int, layout: Any) -> bool:
    return rows % int(layout.mesh.size()) == 0


def _padded(local: torch.Tensor, rows: int, share: int, size: int) -> torch.Tensor:
    if rows % size == 0:
        return local
    return _pad_rows(local, share - local.shape[0])


def _pad_rows(tensor: torch.Tensor, count: int) -> torch.Tensor:
    return F.pad(tensor, [0, 0] * (tensor.ndim - 1) + [0, count])


def _group(layout: Any) -> tuple[int, str]:
    return layout.mesh.size(), layout.mesh.get_group().group_name
