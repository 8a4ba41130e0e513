"""Operators of the default mode whose rules in DTensor lose the meaning of one device.

DTensor leaves a maximum, a product, a norm or an ``any`` as one term on each rank, and
operators behind it take the term for the value. Here such values are finished where they
are made, the mean of a loss is its sum over its weights, and no dims mean all dims. An
operator that has no rule is taken apart into some that have, or computed row by row.
"""

from collections.abc import Callable
from typing import Any, final

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torchspmd import _torch
from torchspmd.step.capture.copied_views import CopiedViews
from torchspmd.step.capture.finishing import finished
from torchspmd.step.capture.refusals import RefusalError, is_spread
from torchspmd.step.capture.whole_batch_attention import ATTENTION, attention
from torchspmd.step.capture.whole_batch_draws import draw_for_all
from torchspmd.step.capture.whole_values import (
    everything,
    is_about_terms,
    mapped,
    on_all_ranks,
    on_equal_values,
    on_whole_values,
    refused_terms,
    without_terms,
    write_terms,
)

_aten = torch.ops.aten
_MEAN, _SUM = 1, 2  # the numbers of reductions in aten's losses


@final
class WholeBatchOperators(_torch.TorchDispatchMode):
    """Computes on DTensors what one device would compute on the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self._views = CopiedViews()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._views.check(func, args, kwargs)
        made = self._computed(func, args, kwargs)
        if args and isinstance(args[0], DTensor):
            self._views.note(func, args[0], made)
        return made

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        try:
            made = _call(func, args, kwargs)
        except NotImplementedError:
            made = self._without_rule(func, args, kwargs)
            if made is NotImplemented:
                raise
        except (AssertionError, RuntimeError) as error:
            if not is_about_terms(error):
                raise
            made = on_whole_values(func, args, kwargs)
        if isinstance(made, (tuple, list)):
            kind = list if isinstance(made, list) else tuple  # not one with names
            return kind(map(_without_other_terms, made))
        return _without_other_terms(made)

    def _without_rule(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """In parts that have rules, or on values that all ranks have."""
        parts = _torch.decomposition(func)
        if parts is not None:
            with self:
                return parts(*args, **kwargs)
        is_pure = not _torch.draws_random_numbers(func, args, kwargs)
        if is_pure and not _torch.written_arguments(func):
            return on_equal_values(func, args, kwargs)
        return NotImplemented


def _call(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    if func in _OWN and not _torch.written_arguments(func):
        args = _first_laid_out(args)
    if not args or not isinstance(args[0], DTensor):
        return _on_plain(func, args, kwargs)
    own = _OWN.get(func)
    if own is None and _torch.draws_random_numbers(func, args, kwargs):
        own = draw_for_all
    return func(*args, **kwargs) if own is None else own(func, args, kwargs)


def _first_laid_out(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A plain tensor before DTensors, such as a gradient, as one that every rank has."""
    meshes = [each.device_mesh for each in args if isinstance(each, DTensor)]
    if not meshes or not isinstance(args[0], torch.Tensor):
        return args
    return (on_all_ranks(args[0], meshes[0]), *args[1:])


def _on_plain(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """A call whose first argument is a number, a list, or a tensor that the step made."""
    if args and not isinstance(args[0], (torch.Tensor, list, tuple)):
        args = tuple(map(without_terms, args))  # rules take 3 / x for linear in x
    if args and isinstance(args[0], torch.Tensor) and _torch.written_arguments(func):
        # A tensor that the step made is the same on all ranks, and stays so.
        args, kwargs = mapped(everything, (args, kwargs))
    return func(*args, **kwargs)


def _without_other_terms(value: Any) -> Any:
    """The value, its terms joined unless they are those of a sum or a mean."""
    if isinstance(value, DTensor) and any(map(_is_other_term, value.placements)):
        return without_terms(value)
    return value


def _is_other_term(placement: Placement) -> bool:
    # A norm's terms say "sum" and are of a class of their own.
    return isinstance(placement, Partial) and not (
        type(placement) is Partial and placement.reduce_op in ("sum", "avg")
    )


def _truth(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """``any`` and ``all``: their terms are joined as numbers, no rule fits booleans."""
    made = func(without_terms(args[0]), *args[1:], **kwargs)
    if not any(isinstance(p, Partial) for p in made.placements):
        return made
    joins = "max" if "any" in func.name() else "min"
    placements = tuple(
        Partial(joins) if isinstance(p, Partial) else p for p in made.placements
    )
    numbers = _torch.local_tensor(made).to(torch.uint8)
    spec = _torch.build_spec(
        made.device_mesh, placements, tuple(made.shape), torch.uint8
    )
    terms: Any = _torch.wrap_local(numbers, spec)
    return without_terms(terms).to(made.dtype)


def _over_all_dims(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """A reduction over a list of dims; DTensor takes an empty one for no reduction."""
    place = 2 if func is _aten.linalg_vector_norm.default else 1
    value = args[0]
    if func is _aten.nansum.default:  # a NaN in one term is not one to leave out
        value = without_terms(value)
    dims = list(args[place]) if len(args) > place and args[place] is not None else None
    if dims == [] or (dims is None and "dim" in kwargs and not kwargs["dim"]):
        kwargs = {key: value for key, value in kwargs.items() if key != "dim"}
        missing = (2,) if len(args) < place else ()
        every = list(range(value.ndim))
        return func(
            value, *args[1:place], *missing, every, *args[place + 1 :], **kwargs
        )
    return func(value, *args[1:], **kwargs)


def _mean_of_loss(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """The sum over the labels that count, divided by their weight on all ranks."""
    value, target, weight, reduction, *rest = args
    if reduction != _MEAN:
        return func(*args, **kwargs)
    total, weights = func(value, target, weight, _SUM, *rest, **kwargs)
    weights = without_terms(weights)
    return without_terms(total) / weights, weights


def _row_by_row(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """What handles each row of the batch by itself: each rank its own rows."""
    first = without_terms(args[0])
    layout = tuple(p if p == Shard(0) else Replicate() for p in first.placements)

    def own_rows(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        return _torch.local_tensor(finished(value, layout))

    local = func(*map(own_rows, args), **kwargs)
    shape = (first.shape[0], *local.shape[1:])
    spec = _torch.build_spec(first.device_mesh, layout, shape, local.dtype)
    return _torch.wrap_local(local, spec)


def _copied(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """What is left of a slice that another tensor is written to: its shape and dtype."""
    old, new = args[0], args[1]
    return new.to(old.dtype).expand(old.shape).clone()


def _filled(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """``fill_``: each rank would fill its term of a sum with the whole value."""
    old, value = args[0], args[1]
    is_zero = isinstance(value, (int, float)) and value == 0
    if is_zero or not _has_sums(old):
        return func(*args, **kwargs)
    if not isinstance(value, torch.Tensor):
        value = torch.full((), value, dtype=old.dtype, device=old.device)
    return write_terms(func, old, without_terms(value).expand(old.shape))


def _has_sums(value: DTensor) -> bool:
    return any(
        isinstance(p, Partial) and p.reduce_op != "avg" for p in value.placements
    )


def _added(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """``+`` and ``-``: each rank would add a number to its own term."""
    is_written = bool(_torch.written_arguments(func))
    if isinstance(args[1], torch.Tensor) or (is_written and not _has_sums(args[0])):
        return func(*args, **kwargs)
    return on_whole_values(func, args, kwargs)


def _written_over(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """``copy_``: DTensor divides what is written by the ranks, which integers cannot."""
    old, new = args[0], args[1]
    is_same = isinstance(new, DTensor) and new.placements == old.placements
    if is_same or old.is_floating_point() or old.is_complex() or not _has_sums(old):
        return func(*args, **kwargs)
    raise refused_terms(func)


def _looked_up(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Rows of an embedding, unless its gradient needs the counts of the whole batch."""
    by_freq = args[3] if len(args) > 3 else kwargs.get("scale_grad_by_freq", False)
    if by_freq and is_spread(args[1]):
        raise RefusalError(
            "an embedding with scale_grad_by_freq=True",
            "Its gradient is divided by how often a row is used in the whole batch, and "
            "each rank counts its own part. Pass scale_grad_by_freq=False.",
        )
    return func(*args, **kwargs)


def _put(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """``x[mask] = number``: each rank writes its own rows."""
    target, indices, value, *rest = args
    mask = indices[0] if len(indices) == 1 else None
    adds = rest[0] if rest else kwargs.get("accumulate", False)
    is_number = isinstance(value, torch.Tensor) and value.numel() == 1
    if adds or mask is None or mask.dtype is not torch.bool or not is_number:
        if _torch.written_arguments(func) and is_spread(target):
            raise RefusalError(
                f"{_torch.packet_name(func)} on the batch, as in x[indices] = values",
                "Each rank has some rows, and the indices may name those of others.\nUse "
                "torch.where, x[mask] = number, masked_fill_ or scatter.",
            )
        return func(*args, **kwargs)
    mask = mask.reshape(*mask.shape, *[1] * (target.ndim - mask.ndim))
    number = value.reshape(()).to(target.dtype)
    made = _aten.where.self(mask, number, target)
    return target.copy_(made) if _torch.written_arguments(func) else made


_Rule = Callable[[Any, tuple[Any, ...], Any], Any]
_OWN: dict[Any, _Rule] = {
    **dict.fromkeys(
        (
            _aten.any.default,
            _aten.any.dim,
            _aten.any.dims,
            _aten.all.default,
            _aten.all.dim,
            _aten.all.dims,
        ),
        _truth,
    ),
    **dict.fromkeys(
        (
            _aten.sum.dim_IntList,
            _aten.mean.dim,
            _aten.nansum.default,
            _aten.amax.default,
            _aten.amin.default,
            _aten.linalg_vector_norm.default,
            _aten.var.correction,
            _aten.std.correction,
            _aten.var_mean.correction,
            _aten.std_mean.correction,
        ),
        _over_all_dims,
    ),
    **dict.fromkeys(
        (
            _aten.hardshrink_backward.default,
            _aten.softshrink_backward.default,
            _aten.avg_pool2d_backward.default,
            _aten.avg_pool3d_backward.default,
            _aten.adaptive_max_pool2d_backward.default,
            _aten.adaptive_max_pool3d_backward.default,
            _aten._adaptive_avg_pool3d_backward.default,
            _aten.max_pool3d_with_indices_backward.default,
            _aten.replication_pad1d_backward.default,
            _aten.replication_pad2d_backward.default,
            _aten.replication_pad3d_backward.default,
        ),
        _row_by_row,
    ),
    **dict.fromkeys(ATTENTION, attention),
    _aten.copy.default: _copied,
    _aten.embedding.default: _looked_up,
    _aten.index_put.default: _put,
    _aten.index_put_.default: _put,
    _aten.add.Tensor: _added,
    _aten.add_.Tensor: _added,
    _aten.sub.Tensor: _added,
    _aten.sub_.Tensor: _added,
    _aten.copy_.default: _written_over,
    _aten.fill_.Scalar: _filled,
    _aten.fill_.Tensor: _filled,
    _aten.nll_loss_forward.default: _mean_of_loss,
    _aten.nll_loss2d_forward.default: _mean_of_loss,
}
