"""Shards to whole tensors and back, as plain collectives of a graph.

Rows that do not divide by the number of ranks are padded at the end, the same way on every
rank, so that the graphs of all ranks have the same nodes.
"""

import torch
import torch.nn.functional as F

from torchspmd import _torch
from torchspmd.step.capture.shard_cut import Cut


def gather_rows(local: torch.Tensor, cut: Cut) -> torch.Tensor:
    """The whole tensor from this rank's rows of it."""
    if not cut.is_sharded:
        return local.clone()  # small, and a write into it must not reach the parameter
    shard = local if cut.is_even else _pad_rows(local, cut.share - local.shape[0])
    whole = _torch.wait(_torch.start_all_gather(shard, *_group(cut)))
    return whole if cut.is_even else whole.narrow(0, 0, cut.rows)


def reduce_rows(gradient: torch.Tensor, cut: Cut, *, average: bool) -> torch.Tensor:
    """This rank's rows of the sum, or average, of all ranks' gradients."""
    if cut.is_sharded:
        total = _scattered(gradient.contiguous(), cut)
    else:
        total = _torch.sum_over(gradient, cut.mesh.get_group())
    # gloo has no average: the sum is scaled everywhere.
    return total / cut.mesh.size() if average else total


def _scattered(gradient: torch.Tensor, cut: Cut) -> torch.Tensor:
    whole = gradient
    if not cut.is_even:
        whole = _pad_rows(gradient, cut.mesh.size() * cut.share - cut.rows)
    scattered = _torch.wait(_torch.start_reduce_scatter(whole, *_group(cut)))
    if cut.is_even:
        return scattered
    first, last = cut.kept
    return scattered.narrow(0, 0, last - first)


def _pad_rows(tensor: torch.Tensor, count: int) -> torch.Tensor:
    return F.pad(tensor, [0, 0] * (tensor.ndim - 1) + [0, count])


def _group(cut: Cut) -> tuple[int, str]:
    return cut.mesh.size(), cut.mesh.get_group().group_name
