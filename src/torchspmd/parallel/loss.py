"""Cross entropy over logits whose classes are sharded, without gathering them.

Each rank works on its part of the classes; two small all-reduces (a maximum, then three
sums for each row) carry all that the ranks need to know of each other. Where the number of
classes is not given, the size of each rank's part is sent along with the maximum.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torchspmd import _torch
from torchspmd.errors import LayoutError, UsageError
from torchspmd.layout.names import format_mesh
from torchspmd.layout.shards import shard_bounds, shard_size
from torchspmd.parallel.axis import Axis, build_axis
from torchspmd.parallel.redistribute import all_reduce_max, begin_backward, unwrap

_CALL = "vocab_parallel_cross_entropy"
_MOST_CLASSES = 2**24  # of one rank: float32 holds every number up to it


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
            ``Shard(-1)``. Classes are the last dimension, in the order of the ranks; the
            parts may be uneven.
        target: The class of each row, ``(...)``, equal on every rank.
        mesh: The axis over which plain logits are sharded; a DTensor knows its own.
        num_classes: All classes, cut as ``torch.chunk`` does, to have each rank's part
            compared with them.
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
    local, axis = _unwrap_logits(logits, mesh)
    _check(local, target, reduction, label_smoothing)
    total = _known_classes(logits, local, axis, num_classes, weight)
    options = LossOptions(axis, total, ignore_index, label_smoothing)
    local_weight, weight_of_target, weight_sum = _weights(
        weight, target, options, local
    )
    rows: torch.Tensor = _RowLosses.apply(
        local, target, local_weight, weight_of_target, weight_sum, options
    )
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    return rows.sum() / weight_of_target.sum()


class LossOptions(NamedTuple):
    """What is fixed in one call; ``num_classes`` is None where the ranks will find it."""

    axis: Axis
    num_classes: int | None
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
        weight_sum: torch.Tensor | None,
        options: LossOptions,
    ) -> torch.Tensor:
        wide = logits.float() if logits.dtype.itemsize < 4 else logits
        largest, first, num_classes = _exchange_maximum(wide, options)
        shifted = wide - largest.unsqueeze(-1)
        exponents = shifted.exp()
        is_class = _known_targets(target, num_classes, options)
        index, is_mine = _local_target(target, first, options, wide.size(-1))
        of_target = _pick(shifted, index, is_mine)
        smooth = shifted if weight is None else shifted * weight
        sums = torch.stack((exponents.sum(-1), of_target, smooth.sum(-1)))
        sums = _torch.wait(_torch.start_all_reduce(sums, "sum", options.axis.group))
        sum_of_exponents, of_target, of_all = sums.unbind()
        log_sum = sum_of_exponents.log()
        losses = (1 - options.smoothing) * weight_of_target * (log_sum - of_target)
        all_weights = num_classes if weight_sum is None else weight_sum
        each = options.smoothing / num_classes
        if options.smoothing:
            losses = losses + each * (all_weights * log_sum - of_all)
        losses = losses.masked_fill(~is_class, torch.nan)
        ctx.save_for_backward(
            exponents.div_(sum_of_exponents.unsqueeze(-1)), index, is_mine, weight,
            weight_of_target, target != options.ignore_index,
        )  # fmt: skip
        ctx.options, ctx.dtype = options, logits.dtype
        ctx.each, ctx.all_weights = each, all_weights
        return losses.masked_fill(target == options.ignore_index, 0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        begin_backward(_CALL, gradient, None)
        share, index, is_mine, weight, weight_of_target, counts = ctx.saved_tensors
        options = ctx.options
        gradient = gradient.masked_fill(~counts, 0)  # also where it is infinite
        of_target = gradient * (1 - options.smoothing) * weight_of_target
        spread = gradient * ctx.each
        result = share * (of_target + spread * ctx.all_weights).unsqueeze(-1)
        if options.smoothing:
            each = spread.unsqueeze(-1)
            result = result - (each if weight is None else each * weight)
        if share.size(-1):
            mine = (of_target * is_mine).unsqueeze(-1)
            result = result.scatter_add(-1, index.unsqueeze(-1), -mine)
        return result.to(ctx.dtype), None, None, None, None, None


def _exchange_maximum(
    logits: torch.Tensor, options: LossOptions
) -> tuple[torch.Tensor, int | torch.Tensor, int | torch.Tensor]:
    """Each row's largest logit, where this rank's classes start, and how many all are."""
    size, axis = logits.size(-1), options.axis
    largest = (
        logits.amax(-1) if size else logits.new_full(logits.shape[:-1], -torch.inf)
    )
    if options.num_classes is not None:
        first, _ = shard_bounds(options.num_classes, axis.size, axis.rank)
        return all_reduce_max(largest, axis), first, options.num_classes
    # Every rank writes into its own place; read on the device, the host need not wait.
    places = (axis.rank, axis.size - 1 - axis.rank)
    sizes = F.pad(logits.new_full((1,), size), places)
    both = all_reduce_max(torch.cat((largest.flatten(), sizes)), axis)
    sizes = both[-axis.size :].long()
    largest = both[: -axis.size].view(largest.shape)
    return largest, sizes[: axis.rank].sum(), sizes.sum().to(logits.dtype)


def _known_targets(
    target: torch.Tensor, num_classes: int | torch.Tensor, options: LossOptions
) -> torch.Tensor:
    """Which targets are a class, or ignored; on the CPU, all of them or an error.

    The loss of any other is NaN: on a GPU, reading them here would wait for it.
    """
    ignored = target == options.ignore_index
    known = ignored | ((target >= 0) & (target < num_classes))
    has_values = type(target) is torch.Tensor and not torch.compiler.is_compiling()
    if has_values and target.device.type == "cpu" and not bool(known.all()):
        raise UsageError(
            f"{_CALL}: {int((~known).sum())} of {target.numel()} targets are no class. "
            f"Classes are 0 to {int(num_classes) - 1}; rows to leave out have the target "
            f"ignore_index={options.ignore_index}."
        )
    return known


def _local_target(
    target: torch.Tensor, first: int | torch.Tensor, options: LossOptions, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's class among this rank's, and whether it is one of them."""
    local = target - first
    is_mine = (local >= 0) & (local < size) & (target != options.ignore_index)
    return torch.where(is_mine, local, 0), is_mine


def _pick(
    values: torch.Tensor, index: torch.Tensor, is_mine: torch.Tensor
) -> torch.Tensor:
    if values.size(-1) == 0:
        return values.new_zeros(index.shape)
    return values.gather(-1, index.unsqueeze(-1)).squeeze(-1) * is_mine


def _weights(
    weight: torch.Tensor | None,
    target: torch.Tensor,
    options: LossOptions,
    logits: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """This rank's class weights, each row's weight, and the sum of all weights.

    Without weights the sum is None: it is the number of all classes.
    """
    dtype = torch.float32 if logits.dtype.itemsize < 4 else logits.dtype
    counts = target != options.ignore_index
    if weight is None or options.num_classes is None:
        return None, counts.to(dtype), None
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
    if whole.shape != (options.num_classes,):
        raise LayoutError(
            f"{_CALL}: weight has shape {tuple(whole.shape)}; pass one weight for each "
            f"of the {options.num_classes} classes, not of this rank's."
        )
    whole = whole.detach().to(dtype)
    of_target = whole[torch.where(counts, target, 0)] * counts
    first, _ = shard_bounds(options.num_classes, options.axis.size, options.axis.rank)
    return whole.narrow(0, first, logits.size(-1)), of_target, whole.sum()


def _unwrap_logits(
    logits: torch.Tensor, mesh: DeviceMesh | None
) -> tuple[torch.Tensor, Axis]:
    """This rank's logits, and the axis of their classes."""
    if isinstance(logits, DTensor):
        own = logits.device_mesh
        if own.ndim != 1 or logits.placements[0] not in (
            Shard(logits.ndim - 1),
            Shard(-1),
        ):
            raise LayoutError(
                f"{_CALL}: the logits are {logits.placements} on the "
                f"mesh {format_mesh(own)}; their last dimension, the classes, must be "
                f"sharded over one axis: (Shard({logits.ndim - 1}),)."
            )
        axis = build_axis(own, _CALL)
        return unwrap(logits, axis), axis
    if mesh is None:
        raise LayoutError(
            f"{_CALL}: plain logits of shape {tuple(logits.shape)} do not say over which "
            'ranks their classes are sharded. Pass mesh=, such as mesh["tp"].'
        )
    return logits, build_axis(mesh, _CALL)


def _known_classes(
    logits: torch.Tensor,
    local: torch.Tensor,
    axis: Axis,
    num_classes: int | None,
    weight: torch.Tensor | None,
) -> int | None:
    """The number of all classes, if the caller has said it; else the ranks exchange it.

    The size that a DTensor claims is not enough: ``from_local`` without ``shape=`` takes
    all parts for equal, on each rank by its own.
    """
    size = local.size(-1)
    if num_classes is None and weight is None:
        if size > _MOST_CLASSES:
            raise LayoutError(
                f"{_CALL}: the logits have {size} classes on this rank, too many to be "
                "sent to the others as a float32. Pass num_classes=."
            )
        return None
    claimed = logits.size(-1) if isinstance(logits, DTensor) else num_classes
    if num_classes is not None and num_classes != claimed:
        raise LayoutError(
            f"{_CALL}: num_classes={num_classes}, but the logits are a DTensor of "
            f"{claimed} classes. Leave num_classes out, or build the DTensor with "
            "from_local(..., shape=, stride=) if its parts are uneven."
        )
    if claimed is not None:
        _check_part(size, claimed, axis, f"num_classes={claimed}")
        return claimed
    assert weight is not None
    _check_part(size, weight.numel(), axis, f"the {weight.numel()} classes of weight")
    return weight.numel()


def _check_part(size: int, total: int, axis: Axis, said: str) -> None:
    expected = shard_size(total, axis.size, axis.rank)
    if size != expected:
        raise LayoutError(
            f"{_CALL}: the logits have {size} classes on this rank; of {said} on the "
            f"{axis} it holds {expected}. Both count the classes of all ranks."
        )


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
