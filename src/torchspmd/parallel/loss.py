"""Cross entropy over logits whose classes are sharded, without gathering them.

Each rank works on its part of the classes; two small all-reduces (a maximum, then three
sums for each row) carry all that the ranks need to know of each other.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torchspmd import _torch
from torchspmd.errors import LayoutError, UsageError
from torchspmd.parallel.axis import (
    Axis,
    build_axis,
    describe_mesh,
    shard_offset,
    shard_size,
)
from torchspmd.parallel.exchange import all_reduce_max
from torchspmd.parallel.handover import refuse_double_backward, unwrap

_CALL = "vocab_parallel_cross_entropy"


def vocab_parallel_cross_entropy(  # noqa: PLR0913 - those of F.cross_entropy, and where
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    mesh: DeviceMesh | None = None,
    num_classes: int | None = None,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """``F.cross_entropy`` for logits whose last dimension is sharded over a mesh axis.

    The logits are never gathered, and their gradient is right for whatever is done with
    the loss. Label smoothing and class weights are those of all classes.

    Args:
        logits: This rank's part, ``(..., classes / ranks)``, or a DTensor that is
            ``Shard(-1)``. Classes are the last dimension.
        target: The class of each row, ``(...)``, equal on every rank.
        mesh: The axis over which plain logits are sharded; a DTensor knows its own.
        num_classes: All classes, where the ranks do not hold equal parts.
        weight: A weight for each of all classes; a plain tensor, or a DTensor.
        ignore_index: Rows with this target count nothing.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: Share of the target that is spread over all classes.

    Returns:
        The loss as a plain tensor, equal on every rank.

    Example:
        >>> from torchspmd.testing import fake_mesh
        >>> with fake_mesh(1, ("tp",)) as mesh:
        ...     vocab_parallel_cross_entropy(
        ...         torch.zeros(2, 4), torch.tensor([0, 3]), mesh=mesh
        ...     )
        tensor(1.3863)
    """
    local, axis, total = _open_logits(logits, mesh, num_classes)
    _check(local, target, reduction, label_smoothing)
    first = shard_offset(total, axis.size, axis.rank)
    rule = Rule(axis, first, total, ignore_index, label_smoothing)
    local_weight, weight_of_target, weight_sum = _weights(weight, target, rule, local)
    rows: torch.Tensor = _RowLosses.apply(
        local, target, local_weight, weight_of_target, weight_sum, rule
    )
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    return rows.sum() / weight_of_target.sum()


class Rule(NamedTuple):
    """What is fixed in one call: where this rank's classes start, and the options."""

    axis: Axis
    first: int
    num_classes: int
    ignore_index: int
    smoothing: float


class _RowLosses(torch.autograd.Function):
    """The loss of each row; zero where the row is ignored.

    ``(1 - s) * w[y] * (lse - z[y]) + s / C * sum_c w[c] * (lse - z[c])``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        weight_of_target: torch.Tensor,
        weight_sum: float | torch.Tensor,
        rule: Rule,
    ) -> torch.Tensor:
        wide = logits.float() if logits.dtype.itemsize < 4 else logits
        largest = (
            wide.amax(-1) if wide.size(-1) else wide.new_full(target.shape, -torch.inf)
        )
        largest = all_reduce_max(largest, rule.axis)
        shifted = wide - largest.unsqueeze(-1)
        exponents = shifted.exp()
        index, is_mine = _local_target(target, rule, wide.size(-1))
        of_target = _pick(shifted, index, is_mine)
        smooth = shifted if weight is None else shifted * weight
        terms = torch.stack((exponents.sum(-1), of_target, smooth.sum(-1)))
        terms = _torch.wait(_torch.start_all_reduce(terms, "sum", rule.axis.group))
        sum_of_exponents, of_target, of_all = terms.unbind()
        log_sum = sum_of_exponents.log()
        losses = (1 - rule.smoothing) * weight_of_target * (log_sum - of_target)
        if rule.smoothing:
            spread = weight_sum * log_sum - of_all
            losses = losses + rule.smoothing / rule.num_classes * spread
        ctx.save_for_backward(
            exponents.div_(sum_of_exponents.unsqueeze(-1)), index, is_mine, weight,
            weight_of_target, target != rule.ignore_index,
        )  # fmt: skip
        ctx.rule, ctx.weight_sum, ctx.dtype = rule, weight_sum, logits.dtype
        return losses.masked_fill(target == rule.ignore_index, 0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        refuse_double_backward(_CALL)
        share, index, is_mine, weight, weight_of_target, counts = ctx.saved_tensors
        rule = ctx.rule
        gradient = gradient * counts
        of_target = gradient * (1 - rule.smoothing) * weight_of_target
        spread = gradient * (rule.smoothing / rule.num_classes)
        result = share * (of_target + spread * ctx.weight_sum).unsqueeze(-1)
        if rule.smoothing:
            each = spread.unsqueeze(-1)
            result = result - (each if weight is None else each * weight)
        if share.size(-1):
            mine = (of_target * is_mine).unsqueeze(-1)
            result = result.scatter_add(-1, index.unsqueeze(-1), -mine)
        return result.to(ctx.dtype), None, None, None, None, None


def _local_target(
    target: torch.Tensor, rule: Rule, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's class among this rank's, and whether it is one of them."""
    local = target - rule.first
    is_mine = (local >= 0) & (local < size) & (target != rule.ignore_index)
    return torch.where(is_mine, local, 0), is_mine


def _pick(
    values: torch.Tensor, index: torch.Tensor, is_mine: torch.Tensor
) -> torch.Tensor:
    if values.size(-1) == 0:
        return values.new_zeros(index.shape)
    return values.gather(-1, index.unsqueeze(-1)).squeeze(-1) * is_mine


def _weights(
    weight: torch.Tensor | None, target: torch.Tensor, rule: Rule, logits: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor, float | torch.Tensor]:
    """This rank's class weights, each row's weight, and the sum of all weights."""
    dtype = torch.float32 if logits.dtype.itemsize < 4 else logits.dtype
    counts = target != rule.ignore_index
    if weight is None:
        return None, counts.to(dtype), float(rule.num_classes)
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
    if whole.shape != (rule.num_classes,):
        raise LayoutError(
            f"{_CALL}: weight has shape {tuple(whole.shape)}; pass one weight for each "
            f"of the {rule.num_classes} classes, not of this rank's."
        )
    whole = whole.detach().to(dtype)
    of_target = whole[torch.where(counts, target, 0)] * counts
    return whole.narrow(0, rule.first, logits.size(-1)), of_target, whole.sum()


def _open_logits(
    logits: torch.Tensor, mesh: DeviceMesh | None, num_classes: int | None
) -> tuple[torch.Tensor, Axis, int]:
    """This rank's logits, the axis of their classes, and the number of all classes."""
    if isinstance(logits, DTensor):
        own = logits.device_mesh
        if own.ndim != 1 or logits.placements[0] not in (
            Shard(logits.ndim - 1),
            Shard(-1),
        ):
            raise LayoutError(
                f"{_CALL}: the logits are {logits.placements} on the "
                f"{describe_mesh(own)}; their last dimension, the classes, must be "
                f"sharded over one axis: (Shard({logits.ndim - 1}),)."
            )
        axis = build_axis(own, _CALL)
        return unwrap(logits, axis), axis, logits.size(-1)
    if mesh is None:
        raise LayoutError(
            f"{_CALL}: plain logits of shape {tuple(logits.shape)} do not say over which "
            'ranks their classes are sharded. Pass mesh=, such as mesh["tp"].'
        )
    axis = build_axis(mesh, _CALL)
    total = logits.size(-1) * axis.size if num_classes is None else num_classes
    expected = shard_size(total, axis.size, axis.rank)
    if logits.size(-1) != expected:
        raise LayoutError(
            f"{_CALL}: the logits have {logits.size(-1)} classes on this rank; of "
            f"num_classes={total} on the {axis} it holds {expected}."
        )
    return logits, axis, total


def _check(
    logits: torch.Tensor, target: torch.Tensor, reduction: str, smoothing: float
) -> None:
    problems = []
    if isinstance(target, DTensor):
        problems.append("target is a DTensor; pass its full_tensor()")
    elif target.is_floating_point():
        problems.append("target has class probabilities; only class indices are known")
    if target.shape != logits.shape[:-1]:
        problems.append(
            f"target has shape {tuple(target.shape)}, the logits have rows of "
            f"{tuple(logits.shape[:-1])}"
        )
    if reduction not in ("mean", "sum", "none"):
        problems.append(f"reduction is {reduction!r}; it is 'mean', 'sum' or 'none'")
    if not 0 <= smoothing <= 1:
        problems.append(f"label_smoothing is {smoothing}; it is between 0 and 1")
    if problems:
        raise UsageError(f"{_CALL}: " + "; ".join(problems) + ".")
