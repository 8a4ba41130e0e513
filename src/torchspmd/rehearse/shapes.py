"""Results of operators whose shape torch cannot tell.

Some exist on CUDA only. Others choose elements by their values: where those are not known,
all are taken to be chosen. Lengths of sequences are mostly known: the host has them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from torchspmd import _torch

__all__ = ["CHOOSES", "SHAPES", "choosing", "is_told_its_size"]


def _accumulated(tensor: torch.Tensor) -> torch.dtype:
    """What CUDA adds up in."""
    short = tensor.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if short else tensor.dtype


def _channels(tensor: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    return tuple(
        tensor.new_empty(tensor.shape[1], dtype=_accumulated(tensor))
        for _ in range(count)
    )


def _batch_norm_stats(input: torch.Tensor, eps: float) -> tuple[torch.Tensor, ...]:
    return _channels(input, 2)


def _batch_norm_gather_stats(
    input: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, ...]:
    return _channels(input, 2)


def _normalized(input: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.empty_like(input)


def _batch_norm_backward_reduce(
    grad: torch.Tensor, input: torch.Tensor, *args: Any
) -> tuple[torch.Tensor | None, ...]:
    *_, for_input, for_weight, for_bias = args
    sums = _channels(input, 4)
    wanted = (for_input, for_input, for_weight, for_bias)
    return tuple(
        each if is_wanted else None
        for each, is_wanted in zip(sums, wanted, strict=True)
    )


def _normalized_backward(
    grad: torch.Tensor, input: torch.Tensor, *args: Any
) -> torch.Tensor:
    return torch.empty_like(input)


def _sum_with_product(
    input: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
    **factors: Any,
) -> torch.Tensor:
    """Torch gives the type of the result to its own function as a factor."""
    if out is not None:
        return out
    return left.new_empty((*left.shape[:-1], right.shape[-1]), dtype=out_dtype)


def _efficient_attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Without dropout there is no seed and no offset."""
    operator = torch.ops.aten._scaled_dot_product_efficient_attention.default
    output, sums, *random = operator(*args, **kwargs)
    dropout = args[5] if len(args) > 5 else kwargs.get("dropout_p", 0.0)
    if not dropout:
        random = [each.new_empty(0) for each in random]
    return output, sums, *random


def _pack_padded_sequence(
    input: torch.Tensor, lengths: torch.Tensor, batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """All time steps, and how many sequences have each of them; the host reads these."""
    batch, steps = input.shape[:2] if batch_first else input.shape[1::-1]
    known = _torch.known_tensor(lengths)
    ends = torch.full((batch,), steps) if known is None else known.cpu()
    sizes = (ends[None] > torch.arange(int(ends.max()))[:, None]).sum(1)
    return input.new_empty((int(ends.sum()), *input.shape[2:])), sizes


def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss for each sequence, and the probabilities of its targets and blanks."""
    steps, batch, _ = log_probs.shape
    longest = targets.shape[-1] if targets.dim() > 1 else -(-targets.numel() // batch)
    alpha = log_probs.new_empty((batch, steps, 2 * longest + 1))
    return log_probs.new_empty(batch), alpha


# ----------------------------------------------------------------------------
# As many elements as are chosen; where their values are not known, as there are

_MASKS = (torch.bool, torch.uint8)


def _nonzero(input: torch.Tensor) -> torch.Tensor:
    return input.new_empty((input.numel(), input.dim()), dtype=torch.int64)


def _masked_select(input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    return input.new_empty(_chosen(mask, shape))


def _index(input: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor:
    return torch.ops.aten.index.Tensor(input, [*_places(indices)])


def _places(indices: list[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
    """Masks as the places where they are true."""
    for index in indices:
        if index is not None and index.dtype in _MASKS:
            for _ in range(index.dim()):
                count = _chosen(index, index.shape)
                yield index.new_empty(count, dtype=torch.int64)
        else:
            yield index


def _chosen(mask: torch.Tensor, shape: Sequence[int]) -> int:
    """Elements of a shape that a mask chooses."""
    known = _torch.followed(mask)
    if known is None:
        return prod(shape)
    return int(known.real.count_nonzero()) * prod(shape) // max(mask.numel(), 1)


def _unique(input: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    values = input.new_empty(input.numel())
    inverse = input.new_empty(input.shape, dtype=torch.int64)
    return values, inverse, values.new_empty(input.numel(), dtype=torch.int64)


def _repeat_interleave(
    repeats: torch.Tensor, output_size: int | None = None
) -> torch.Tensor:
    return repeats.new_empty(output_size or repeats.numel(), dtype=torch.int64)


def _bincount(
    input: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> torch.Tensor:
    dtype = torch.int64 if weights is None else torch.float64
    return input.new_empty(max(minlength, 1), dtype=dtype)


def _equal(input: torch.Tensor, other: torch.Tensor) -> bool:
    return True


CHOOSES: dict[str, Callable[..., Any]] = {
    "aten.nonzero.default": _nonzero,
    "aten.masked_select.default": _masked_select,
    "aten.index.Tensor": _index,
    "aten._unique2.default": _unique,
    "aten.unique_consecutive.default": _unique,
    "aten.unique_dim.default": _unique,
    "aten.repeat_interleave.Tensor": _repeat_interleave,
    "aten.bincount.default": _bincount,
    "aten.equal.default": _equal,
}


def is_told_its_size(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether nothing of the device is read: the caller says how large the result is."""
    return (
        name == "aten.repeat_interleave.Tensor"
        and kwargs.get("output_size") is not None
    )


def choosing(
    func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[[], Any], str]:
    """What makes the results of an operator that chooses, and what that assumes."""
    computed = _torch.compute_known(func, args, kwargs)
    if computed is not None:
        return partial(_like, args[0], computed.real), computed.why
    masks = args[1] if name == "aten.index.Tensor" else args[1:]
    known = [
        _torch.followed(each)
        for each in masks
        if isinstance(each, torch.Tensor) and each.dtype in _MASKS
    ]
    whys = [_ALL if each is None else each.why for each in known] or [_ALL]
    why = _ALL if _ALL in whys else "; ".join(filter(None, dict.fromkeys(whys)))
    return partial(CHOOSES[name], *args, **kwargs), why


_ALL = "all are chosen"


def _like(input: torch.Tensor, computed: Sequence[Any]) -> Any:
    results = tuple(
        input.new_empty(real.shape, dtype=real.dtype)
        if isinstance(real, torch.Tensor)
        else real
        for real in computed
    )
    return results[0] if len(results) == 1 else results


SHAPES: dict[str, Callable[..., Any]] = {
    "aten._ctc_loss.default": _ctc_loss,
    "aten._ctc_loss.Tensor": _ctc_loss,
    "aten._ctc_loss_backward.default": _normalized_backward,
    "aten._ctc_loss_backward.Tensor": _normalized_backward,
    "aten._pack_padded_sequence.default": _pack_padded_sequence,
    "aten._scaled_dot_product_efficient_attention.default": _efficient_attention,
    "aten.addmm.dtype": _sum_with_product,
    "aten.addmm.dtype_out": _sum_with_product,
    "aten.baddbmm.dtype": _sum_with_product,
    "aten.baddbmm.dtype_out": _sum_with_product,
    "aten.batch_norm_stats.default": _batch_norm_stats,
    "aten.batch_norm_gather_stats_with_counts.default": _batch_norm_gather_stats,
    "aten.batch_norm_elemt.default": _normalized,
    "aten.batch_norm_backward_reduce.default": _batch_norm_backward_reduce,
    "aten.batch_norm_backward_elemt.default": _normalized_backward,
}
