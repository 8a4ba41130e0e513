"""Operators of the default mode for which DTensor's rules do not give the global batch.

DTensor leaves a maximum, a product, a norm or an ``any`` as a partial value on each rank,
and operators behind it take the partial value for the value. Here such values are reduced
where they are made, the mean of a loss is its sum over its weights, and no dims mean all
dims. An operator without a rule is decomposed into some that have rules, or runs on values
that all ranks have. A random op runs for the global batch on every rank.
"""

from collections.abc import Callable
from typing import Any, final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torchspmd import _torch
from torchspmd.step.capture.optimizer_rules import is_spread
from torchspmd.step.capture.refusals import RefusalError
from torchspmd.step.capture.trace_modes import OperatorMode
from torchspmd.step.modes.copied_views import CopiedViews


@final
class GlobalBatchOperators(OperatorMode):
    """Computes on DTensors what one device would compute on the global batch."""

    def __init__(self) -> None:
        super().__init__()
        self._views = CopiedViews()

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator by its rule, or by the ways for those without one."""
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
            if not _is_about_partial(error):
                raise
            made = _on_reduced_values(func, args, kwargs)
        if isinstance(made, (tuple, list)):
            kind = list if isinstance(made, list) else tuple  # not one with names
            return kind(map(_reduce_other_partials, made))
        return _reduce_other_partials(made)

    def _without_rule(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """In parts that have rules, or on values that all ranks have."""
        parts = _torch.decomposition(func)
        if parts is not None:
            with self:
                return parts(*args, **kwargs)
        is_pure = not _torch.draws_random_numbers(func, args, kwargs)
        if is_pure and not _torch.written_arguments(func):
            return _on_replicated_values(func, args, kwargs)
        return NotImplemented


def _call(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    if func in _RULES and not _torch.written_arguments(func):
        args = _first_laid_out(args)
    if not args or not isinstance(args[0], DTensor):
        return _on_plain(func, args, kwargs)
    rule = _RULES.get(func)
    if rule is None and _torch.draws_random_numbers(func, args, kwargs):
        rule = run_random_op
    return func(*args, **kwargs) if rule is None else rule(func, args, kwargs)


def _first_laid_out(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A plain tensor before DTensors, such as a gradient, as one that every rank has."""
    meshes = [each.device_mesh for each in args if isinstance(each, DTensor)]
    if not meshes or not isinstance(args[0], torch.Tensor):
        return args
    return (as_replicated(args[0], meshes[0]), *args[1:])


def _on_plain(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """A call whose first argument is a number, a list, or a tensor that the step made."""
    if args and not isinstance(args[0], (torch.Tensor, list, tuple)):
        args = tuple(map(reduce_partial, args))  # rules take 3 / x for linear in x
    if args and isinstance(args[0], torch.Tensor) and _torch.written_arguments(func):
        # A tensor that the step made is the same on all ranks, and stays so.
        args, kwargs = _torch.map_tree(full_value, (args, kwargs))
    if _torch.LOSES_WRITES_OF_LISTS and args and _has_partial_values(func, args[0]):
        return _on_reduced_values(func, args, kwargs)
    return func(*args, **kwargs)


def _has_partial_values(func: Any, values: Any) -> bool:
    """Whether an operator writes into a list, some of whose values are partial."""
    return isinstance(values, list | tuple) and any(
        isinstance(p, Partial)
        for value in values
        if isinstance(value, DTensor) and _torch.written_arguments(func)
        for p in value.placements
    )


def _reduce_other_partials(value: Any) -> Any:
    """The value, reduced if it is partial in another way than as a sum or a mean."""
    if isinstance(value, DTensor) and any(map(_is_other_partial, value.placements)):
        return reduce_partial(value)
    return value


def _is_other_partial(placement: Placement) -> bool:
    # A norm's placement says "sum" and is of a class of its own.
    return isinstance(placement, Partial) and not (
        type(placement) is Partial and placement.reduce_op in ("sum", "avg")
    )


# ----------------------------------------------------------------------------
# DTensors in other layouts.


def redistributed(value: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """A DTensor in another layout, the communication waited for."""
    if value.placements == placements:
        return value
    moved = value.redistribute(placements=placements)
    local = _torch.finished(_torch.local_tensor(moved))
    made = _torch.wrap_local(local, _torch.spec(moved))
    assert isinstance(made, DTensor)
    return made


# ----------------------------------------------------------------------------
# Partial values and shards of the batch, made whole.
#
# DTensor refuses some calls on partial values: writes into a sum that are not linear in it,
# a sum beside a mean in one list. Such a call is made on reduced values, and what it writes
# is divided into partial values again.

# What DTensor says; where it says something else, the step is refused with that.
_ABOUT_PARTIAL = (
    "in-place operations that require placement changes",
    "Redistribution from one partial type",
)


def _is_about_partial(error: BaseException) -> bool:
    """Whether DTensor refused a call because an argument is a partial value."""
    return any(text in str(error) for text in _ABOUT_PARTIAL)


def reduce_partial(value: Any) -> Any:
    """A value whose partial values are reduced; its shards stay where they are."""
    if not isinstance(value, DTensor):
        return value
    placements = tuple(
        Replicate() if isinstance(p, Partial) else p for p in value.placements
    )
    return redistributed(value, placements)


def full_value(value: Any) -> Any:
    """The values of all ranks as a plain tensor; they are sent."""
    if not isinstance(value, DTensor):
        return value
    layout = (Replicate(),) * value.device_mesh.ndim
    return _torch.local_tensor(redistributed(value, layout))


def _on_reduced_values(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """A call on reduced values; what it writes is written into the partial ones."""
    whole_args, whole_kwargs = _torch.map_tree(reduce_partial, (args, kwargs))
    made = func(*whole_args, **whole_kwargs)
    if not _torch.written_arguments(func):
        return made
    before, after = (
        _torch.flatten_tree(_torch.written_values(func, *call))[0]
        for call in ((args, kwargs), (whole_args, whole_kwargs))
    )
    partials = {}
    for old, new in zip(before, after, strict=True):
        if old is not new:
            _write_partial(func, old, new)
            partials[id(new)] = old
    return _torch.map_tree(lambda leaf: partials.get(id(leaf), leaf), made)


def _on_replicated_values(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """An operator without a rule on values that all ranks have: so they do its result.

    ``NotImplemented`` where an argument lies over ranks.
    """
    whole_args, whole_kwargs = _torch.map_tree(reduce_partial, (args, kwargs))
    given = [*_torch.leaves_of(DTensor, (whole_args, whole_kwargs))]
    if not given or any(map(is_spread, given)):
        return NotImplemented
    local_args, local_kwargs = _torch.map_tree(full_value, (whole_args, whole_kwargs))
    made = func(*local_args, **local_kwargs)
    mesh = given[0].device_mesh
    return _torch.map_tree(lambda leaf: as_replicated(leaf, mesh), made)


def as_replicated(value: Any, mesh: DeviceMesh) -> Any:
    """A DTensor around a plain tensor that every rank has."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    layout = (Replicate(),) * mesh.ndim
    shape, stride = tuple(value.shape), value.stride()
    spec = _torch.strided_spec(mesh, layout, shape, stride, value.dtype)
    return _torch.wrap_local(value, spec)


def _write_partial(func: Any, target: DTensor, value: torch.Tensor) -> torch.Tensor:
    """Divide a value that every rank has into the partial values of a tensor."""
    if not (target.is_floating_point() or target.is_complex()):
        raise _refuse_partial_write(func)
    return target.copy_(value)


def _refuse_partial_write(func: Any) -> RefusalError:
    """The error for a write that integers cannot share among ranks."""
    return RefusalError(
        f"{_torch.packet_name(func)} on a sum over the batch of integers, or on a tensor "
        "made like one",
        "Each rank has a partial value of it, and these would be added: the value would "
        "have to be divided among the ranks.\nMake a new tensor (with torch.full or "
        "full_like, torch.randint), choose with torch.where, or write into a "
        "floating-point tensor.",
    )


# ----------------------------------------------------------------------------
# Attention on the CPU in the default mode: DTensor has no rule for its kernel.
#
# A row of the batch attends to itself alone, so each rank calls the kernel on its own rows,
# with those rows of the mask; heads that lie over ranks are handled alike.

_aten = torch.ops.aten
_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu.default",
    "_scaled_dot_product_flash_attention_for_cpu_backward.default",
)


def _attention(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """The kernel, or its backward, on this rank's part of the batch or of the heads."""
    first = int("backward" in func.name())  # which takes the gradient before
    given = args[first : first + 3]  # query, key, value
    query = next(value for value in (*given, *args) if isinstance(value, DTensor))
    layout = tuple(_part(axis, given) for axis in range(query.device_mesh.ndim))
    query = as_replicated(given[0], query.device_mesh)

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return _torch.local_tensor(_moved(value, query, layout))

    made = func(*map(own, args), **{name: own(value) for name, value in kwargs.items()})
    return tuple(_from_local(local, query, layout) for local in made)


def _part(axis: int, given: tuple[torch.Tensor, ...]) -> Placement:
    """What all of query, key and value are to be, so that little is sent."""
    found = [value.placements[axis] for value in given if isinstance(value, DTensor)]
    if Shard(0) in found:
        return Shard(0)
    # Heads that share keys with others do not lie where those are.
    same_heads = len({value.shape[1] for value in given}) == 1
    return Shard(1) if Shard(1) in found and same_heads else Replicate()


def _moved(
    value: torch.Tensor, query: DTensor, layout: tuple[Placement, ...]
) -> DTensor:
    """A tensor with the part that goes with the query's; what is for all rows, whole."""
    value = as_replicated(value, query.device_mesh)
    assert isinstance(value, DTensor), type(value)

    def place(placement: Placement) -> Placement:
        if not isinstance(placement, Shard):
            return placement
        dim = placement.dim
        has_rows = value.ndim >= 3 and value.shape[dim] == query.shape[dim]
        return placement if has_rows else Replicate()

    return redistributed(value, tuple(map(place, layout)))


def _from_local(
    local: torch.Tensor, whole: DTensor, layout: tuple[Placement, ...]
) -> torch.Tensor:
    """The DTensor that a rank's result is a part of, in the same order of memory.

    Its sharded dims are as long as those of ``whole``.
    """
    shape, stride = list(local.shape), list(local.stride())
    for placement in layout:
        if isinstance(placement, Shard):
            dim = placement.dim
            for other, step in enumerate(stride):
                if step > stride[dim]:
                    stride[other] = step // max(shape[dim], 1) * whole.shape[dim]
            shape[dim] = whole.shape[dim]
    spec = _torch.strided_spec(
        whole.device_mesh, layout, tuple(shape), tuple(stride), local.dtype
    )
    return _torch.wrap_local(local, spec)


# ----------------------------------------------------------------------------
# Random ops: those that one device would run on the global batch.
#
# If each rank drew for its own rows alone, ranks with one seed would all draw the same
# numbers. So every rank draws for the global batch and keeps its part: ranks with one seed
# draw what one device with that seed draws, others draw independently.


def run_random_op(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run a random op, whose first argument is a DTensor, for the global batch."""
    written = _torch.written_arguments(func)
    if "dropout_p" in _torch.argument_names(func) or any(written):
        raise NotImplementedError(
            f"Operator {func} draws random numbers inside its kernel and has no sharding "
            "strategy for them."
        )
    first = args[0]
    if func is _aten.native_dropout.default:
        return _dropout(func, *args)
    name = func.name().partition(".")[0]
    is_fill = bool(written) or name.endswith("_like")
    whole = empty_full(first) if is_fill else full_value(first)
    made = func(whole, *map(full_value, args[1:]), **kwargs)
    if not isinstance(made, torch.Tensor):
        raise NotImplementedError(
            f"Operator {func} draws several tensors and has no sharding strategy for them."
        )
    part = local_part(made, first)
    if not written:
        return part
    is_partial = any(isinstance(p, Partial) for p in first.placements)
    return _write_partial(func, first, part) if is_partial else first.copy_(part)


def _dropout(func: Any, x: DTensor, p: float, train: bool | None) -> Any:
    """The mask does not depend on values, so that these stay where they are."""
    if train is False or p == 0:
        return func(x, p, train)
    _, drawn = func(empty_full(x), p, train)
    mask = local_part(drawn, x)
    return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def empty_full(value: DTensor) -> torch.Tensor:
    """A tensor of the global batch: numbers are drawn in the order of memory."""
    device = _torch.local_tensor(value).device
    return torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device=device
    )


def local_part(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """The part of a tensor that every rank has, laid out like a DTensor where that fits."""
    placements = tuple(_placement(each, whole, like) for each in like.placements)
    mesh, part = like.device_mesh, whole
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            size, rest = divmod(part.shape[placement.dim], mesh.size(axis))
            if rest:
                raise NotImplementedError(
                    f"Random numbers for a DTensor of {tuple(whole.shape)} that is sharded "
                    f"unevenly over {mesh.size(axis)} ranks: there is no sharding strategy."
                )
            start = mesh.get_local_rank(axis) * size
            part = part.narrow(placement.dim, start, size)
    spec = _torch.build_spec(mesh, placements, tuple(whole.shape), whole.dtype)
    return _torch.wrap_local(part.contiguous(), spec)


def _placement(placement: Placement, whole: torch.Tensor, like: DTensor) -> Placement:
    """Sharded like the other tensor if that dim is the same in both."""
    if not isinstance(placement, Shard):
        return Replicate()
    same = whole.shape[: placement.dim + 1] == like.shape[: placement.dim + 1]
    return placement if same else Replicate()


# ----------------------------------------------------------------------------
# Rules: what is called instead of an operator whose first argument is a DTensor.

_MEAN, _SUM = 1, 2  # the numbers of reductions in aten's losses


def _any_or_all(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """``any`` and ``all``: reduced as numbers, since no rule fits booleans."""
    made = func(reduce_partial(args[0]), *args[1:], **kwargs)
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
    partial: Any = _torch.wrap_local(numbers, spec)
    return reduce_partial(partial).to(made.dtype)


def _over_all_dims(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """A reduction over a list of dims; DTensor takes an empty one for no reduction."""
    place = 2 if func is _aten.linalg_vector_norm.default else 1
    value = args[0]
    if func is _aten.nansum.default:  # a NaN in a partial value is not one to leave out
        value = reduce_partial(value)
    dims = list(args[place]) if len(args) > place and args[place] is not None else None
    if dims == [] or (dims is None and "dim" in kwargs and not kwargs["dim"]):
        kwargs = {key: value for key, value in kwargs.items() if key != "dim"}
        missing = (2,) if len(args) < place else ()
        every = list(range(value.ndim))
        return func(
            value, *args[1:place], *missing, every, *args[place + 1 :], **kwargs
        )
    return func(value, *args[1:], **kwargs)


def _loss_mean(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """The sum over the labels that count, divided by their weight on all ranks."""
    value, target, weight, reduction, *rest = args
    if reduction != _MEAN:
        return func(*args, **kwargs)
    total, weights = func(value, target, weight, _SUM, *rest, **kwargs)
    weights = reduce_partial(weights)
    return reduce_partial(total) / weights, weights


def _row_by_row(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """What handles each row of the batch by itself: each rank its own rows."""
    first = reduce_partial(args[0])
    layout = tuple(p if p == Shard(0) else Replicate() for p in first.placements)

    def own_rows(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        return _torch.local_tensor(redistributed(value, layout))

    return _from_local(func(*map(own_rows, args), **kwargs), first, layout)


def _on_reduced(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """What adds a bias, or multiplies two partial values: not for each rank's part."""
    args, kwargs = _torch.map_tree(reduce_partial, (args, kwargs))
    return func(*args, **kwargs)


def _copy(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """What is left of a slice that another tensor is written to: its shape and dtype."""
    old, new = args[0], args[1]
    return new.to(old.dtype).expand(old.shape).clone()


def _fill(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """``fill_``: each rank would fill its partial value with the whole value."""
    old, value = args[0], args[1]
    is_zero = isinstance(value, (int, float)) and value == 0
    if is_zero or not _has_sums(old):
        return func(*args, **kwargs)
    if not isinstance(value, torch.Tensor):
        value = torch.full((), value, dtype=old.dtype, device=old.device)
    return _write_partial(func, old, reduce_partial(value).expand(old.shape))


def _has_sums(value: DTensor) -> bool:
    return any(
        isinstance(p, Partial) and p.reduce_op != "avg" for p in value.placements
    )


def _add_number(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """``+`` and ``-``: each rank would add a number to its partial value."""
    is_written = bool(_torch.written_arguments(func))
    if isinstance(args[1], torch.Tensor) or (is_written and not _has_sums(args[0])):
        return func(*args, **kwargs)
    return _on_reduced_values(func, args, kwargs)


def _divide(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """By the sum of all ranks: torch 2.11 lets each rank divide by its own part of it."""
    return func(args[0], reduce_partial(args[1]), **kwargs)


def _copy_into(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """``copy_``: DTensor divides what is written by the ranks, which integers cannot."""
    old, new = args[0], args[1]
    is_same = isinstance(new, DTensor) and new.placements == old.placements
    if is_same or old.is_floating_point() or old.is_complex() or not _has_sums(old):
        return func(*args, **kwargs)
    raise _refuse_partial_write(func)


def _embedding(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Rows of an embedding, unless its gradient needs the counts of the global batch."""
    by_freq = args[3] if len(args) > 3 else kwargs.get("scale_grad_by_freq", False)
    if by_freq and is_spread(args[1]):
        raise RefusalError(
            "an embedding with scale_grad_by_freq=True",
            "Its gradient is divided by how often a row is used in the global batch, and "
            "each rank counts its own part. Pass scale_grad_by_freq=False.",
        )
    return func(*args, **kwargs)


def _index_put(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
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
_OPERATORS: dict[_Rule, tuple[str, ...]] = {
    _any_or_all: (
        *("any.default", "any.dim", "any.dims"),
        *("all.default", "all.dim", "all.dims"),
    ),
    _over_all_dims: (
        *("sum.dim_IntList", "mean.dim", "nansum.default"),
        *("amax.default", "amin.default", "linalg_vector_norm.default"),
        *("var.correction", "std.correction"),
        *("var_mean.correction", "std_mean.correction"),
    ),
    _row_by_row: (
        *("hardshrink_backward.default", "softshrink_backward.default"),
        *("avg_pool2d_backward.default", "avg_pool3d_backward.default"),
        *(f"adaptive_max_pool{n}d_backward.default" for n in (2, 3)),
        "_adaptive_avg_pool3d_backward.default",
        "max_pool3d_with_indices_backward.default",
        *(f"replication_pad{n}d_backward.default" for n in (1, 2, 3)),
    ),
    _on_reduced: ("convolution.default", "convolution_backward.default"),
    _attention: _ATTENTION,
    _copy: ("copy.default",),
    _embedding: ("embedding.default",),
    _index_put: ("index_put.default", "index_put_.default"),
    _add_number: ("add.Tensor", "add_.Tensor", "sub.Tensor", "sub_.Tensor"),
    _divide: ("div.Tensor", "div_.Tensor"),
    _copy_into: ("copy_.default",),
    _fill: ("fill_.Scalar", "fill_.Tensor"),
    _loss_mean: ("nll_loss_forward.default", "nll_loss2d_forward.default"),
}


def _operator(name: str) -> Any:
    packet, overload = name.split(".")
    return getattr(getattr(_aten, packet), overload)


_RULES: dict[Any, _Rule] = {
    _operator(name): rule for rule, names in _OPERATORS.items() for name in names
}
