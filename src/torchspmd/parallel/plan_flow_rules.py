"""How torch functions pass on the features of Linears: one rule for a family.

A rule gets the trails of the inputs and gives one for each output, or raises ``Ended``
when the function needs the features of all ranks together.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch


class Trail(NamedTuple):
    """The Linears whose output features a tensor holds, and the dimension they lie in."""

    sources: frozenset[str]
    dim: int


class Ended(Exception):  # noqa: N818
    """A function needs the features whole; the text says which and why."""


Trails = Mapping[int, Trail]
Rule = Callable[
    [Trails, tuple[Any, ...], dict[str, Any], Sequence[torch.Tensor]], list[Trail]
]


def _elementwise(
    trails: Trails,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Sequence[torch.Tensor],
) -> list[Trail]:
    """Dimensions line up from the back; others must be broadcast over the features."""
    (output,) = outputs
    given = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
    found = {trails[id(t)].dim + output.ndim - t.ndim for t in given if id(t) in trails}
    if len(found) != 1:
        raise Ended("tensors with features in different dimensions meet")
    (dim,) = found
    for tensor in given:
        place = dim - (output.ndim - tensor.ndim)
        if id(tensor) not in trails and place >= 0 and tensor.shape[place] != 1:
            raise Ended("they meet a tensor that is whole in that dimension")
    sources = frozenset().union(
        *(trails[id(t)].sources for t in given if id(t) in trails)
    )
    return [Trail(sources, dim)]


def _reshape(
    trails: Trails,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Sequence[torch.Tensor],
) -> list[Trail]:
    """The features must stay the outer part of one dimension, as shards are cut."""
    (output,), tensor = outputs, args[0]
    trail = trails[id(tensor)]
    before = math.prod(tensor.shape[: trail.dim])
    size = tensor.shape[trail.dim]
    for dim, new in enumerate(output.shape):
        starts_here = math.prod(output.shape[:dim]) == before
        if starts_here and new > 1 and (new % size == 0 or size % new == 0):
            return [Trail(trail.sources, dim)]
    raise Ended(
        f"a reshape from {list(tensor.shape)} to {list(output.shape)} mixes dimension "
        f"{trail.dim} with the one before it"
    )


def _transpose(
    trails: Trails,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Sequence[torch.Tensor],
) -> list[Trail]:
    tensor, trail = args[0], trails[id(args[0])]
    first, second = (
        (*args[1:], *kwargs.values()) if len(args) + len(kwargs) > 1 else (-2, -1)
    )
    order = list(range(tensor.ndim))
    order[first], order[second] = order[second], order[first]
    return [Trail(trail.sources, order.index(trail.dim))]


def _permute(
    trails: Trails,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Sequence[torch.Tensor],
) -> list[Trail]:
    tensor, trail = args[0], trails[id(args[0])]
    given = kwargs.get("dims", args[1:])
    dims = (
        given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given
    )
    order = [dim % tensor.ndim for dim in dims]
    return [Trail(trail.sources, order.index(trail.dim))]


def _along(
    trails: Trails,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Sequence[torch.Tensor],
) -> list[Trail]:
    """Something done along one other dimension, which stays."""
    tensor, trail = args[0], trails[id(args[0])]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if type(dim) is not int or dim % tensor.ndim == trail.dim:
        raise Ended("they are compared or summed up")
    return [trail] * len(outputs)


def _split(
    trails: Trails,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Sequence[torch.Tensor],
) -> list[Trail]:
    tensor, trail = args[0], trails[id(args[0])]
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    if dim % tensor.ndim == trail.dim:
        raise Ended("they are split into parts, as those of a fused projection are")
    return [trail] * len(outputs)


def _index(
    trails: Trails,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Sequence[torch.Tensor],
) -> list[Trail]:
    """Whole slices keep a dimension, numbers drop one, None adds one."""
    tensor, index = args
    if id(tensor) not in trails:
        raise Ended("they are used as an index")
    trail = trails[id(tensor)]
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(part, (torch.Tensor, list)) for part in parts):
        raise Ended("they are indexed with a tensor")
    used = sum(part is not None and part is not Ellipsis for part in parts)
    if Ellipsis not in parts:
        parts.append(Ellipsis)
    place = parts.index(Ellipsis)
    parts[place : place + 1] = [slice(None)] * (tensor.ndim - used)
    old = new = 0
    for part in parts:
        if part is None:
            new += 1
            continue
        if old == trail.dim:
            if part != slice(None):
                raise Ended("a part of them is taken")
            return [Trail(trail.sources, new)]
        old, new = old + 1, new + isinstance(part, slice)
    raise AssertionError((tensor.shape, index))


def _expand(
    trails: Trails,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Sequence[torch.Tensor],
) -> list[Trail]:
    tensor, (output,), trail = args[0], outputs, trails[id(args[0])]
    dim = trail.dim + output.ndim - tensor.ndim
    if output.shape[dim] != tensor.shape[trail.dim]:
        raise Ended("they are repeated")
    return [Trail(trail.sources, dim)]


def _repeat_interleave(
    trails: Trails,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Sequence[torch.Tensor],
) -> list[Trail]:
    """Each feature beside its copies: shards of the result are made from shards."""
    if kwargs.get("dim", args[2] if len(args) > 2 else None) is None:
        raise Ended("they are flattened and repeated")
    return [trails[id(args[0])]]


def _concatenate(
    trails: Trails,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Sequence[torch.Tensor],
) -> list[Trail]:
    given = args[0] if args else kwargs["tensors"]
    # A cache that is still empty adds nothing.
    tensors = [t for t in given if t.numel() or id(t) in trails]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    found = {trails[id(t)].dim if id(t) in trails else -1 for t in tensors}
    if len(found) != 1 or dim % tensors[0].ndim in found:
        raise Ended("they are joined with other features")
    sources = frozenset().union(*(trails[id(t)].sources for t in tensors))
    return [Trail(sources, found.pop())]


def _matmul(
    trails: Trails,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Sequence[torch.Tensor],
) -> list[Trail]:
    """A product of one matrix for each head: both operands have the heads in front."""
    left, right = args
    both = [trails.get(id(left)), trails.get(id(right))]
    if both[0] is None or both[1] is None or both[0].dim != both[1].dim:
        raise Ended("they are multiplied with a whole matrix")
    if left.ndim != right.ndim or both[0].dim >= left.ndim - 2:
        raise Ended("they are summed over in a matrix product")
    return [Trail(both[0].sources | both[1].sources, both[0].dim)]


def _attention(
    trails: Trails,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Sequence[torch.Tensor],
) -> list[Trail]:
    """Heads of queries, keys and values are in one dimension, before tokens and size."""
    named = [kwargs[name] for name in ("query", "key", "value") if name in kwargs]
    parts = [*args[:3], *named][:3]
    found = [trails.get(id(part)) for part in parts]
    dims = {
        trail.dim - part.ndim for part, trail in zip(parts, found, strict=True) if trail
    }
    if None in found or dims != {-3}:
        raise Ended("attention needs the heads of queries, keys and values together")
    mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
    if mask is not None and mask.ndim > 2 and mask.shape[-3] != 1:
        raise Ended("the attention mask is another for each head")
    sources = frozenset().union(*(trail.sources for trail in found if trail))
    return [Trail(sources, outputs[0].ndim - 3)]


def _reduce(
    trails: Trails,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Sequence[torch.Tensor],
) -> list[Trail]:
    tensor, trail = args[0], trails[id(args[0])]
    given: Any = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if type(given) not in (int, tuple, list) or given in ((), []):
        raise Ended("they are summed up")
    dims = [d % tensor.ndim for d in ([given] if isinstance(given, int) else given)]
    if trail.dim in dims:
        raise Ended("they are summed up")
    is_kept = outputs[0].ndim == tensor.ndim
    dropped = 0 if is_kept else sum(dim < trail.dim for dim in dims)
    return [Trail(trail.sources, trail.dim - dropped)] * len(outputs)


def _same(
    trails: Trails,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Sequence[torch.Tensor],
) -> list[Trail]:
    """The features stay where they are."""
    return [trails[id(args[0])]]


def _complex(
    trails: Trails,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Sequence[torch.Tensor],
) -> list[Trail]:
    """Only the last dimension changes."""
    trail = trails[id(args[0])]
    if trail.dim == args[0].ndim - 1:
        raise Ended("they are turned into parts of complex numbers")
    return [trail]


_ELEMENTWISE = """
    __add__ __and__ __eq__ __ge__ __gt__ __iadd__ __imul__ __invert__ __isub__ __le__
    __lt__ __mul__ __ne__ __neg__ __or__ __pow__ __radd__ __rmul__ __rpow__ __rsub__
    __rtruediv__ __sub__ __truediv__ abs add add_ clamp cos div div_ dropout elu eq erf
    exp ge gelu gt hardswish le leaky_relu log logical_and logical_not logical_or lt
    masked_fill masked_fill_ maximum minimum mish mul mul_ ne neg pow relu relu6 relu_
    rsqrt rsub sigmoid silu sin softplus sqrt square sub sub_ tanh true_divide where
""".split()
_CONVERSIONS = """
    bfloat16 bool clone contiguous detach double float half requires_grad_ to type
    type_as
""".split()
RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_CONVERSIONS, _same),
    **dict.fromkeys(
        ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"), _reshape
    ),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transpose),
    "permute": _permute,
    **dict.fromkeys(("softmax", "log_softmax", "cumsum"), _along),
    **dict.fromkeys(("chunk", "split", "tensor_split"), _split),
    "__getitem__": _index,
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    "repeat_interleave": _repeat_interleave,
    **dict.fromkeys(("cat", "concat"), _concatenate),
    **dict.fromkeys(("matmul", "__matmul__", "bmm"), _matmul),
    **dict.fromkeys(("amax", "amin", "mean", "sum"), _reduce),
    **dict.fromkeys(("view_as_complex", "view_as_real"), _complex),
    "scaled_dot_product_attention": _attention,
}
