"""Values that are assumed of tensors whose values nobody knows.

Choices are spread evenly: a router sends as many tokens to each expert. What is counted,
sorted or selected by such choices is then computed from them, so that all answers agree:
sizes of splits with sums, offsets with sizes. Random numbers are below a bound as often as
they should be, and of a mask of data all is true, as without padding.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchspmd import _torch
from torchspmd.comm import Kind

__all__ = ["assume", "assume_received"]

_ALL_TRUE = "all of a mask are taken to be true"
_ALIKE = "other ranks are taken to send as this one does"
# Which of the results are the places that were chosen.
_CHOICES = {
    "topk": 1,
    "sort": 1,
    "max": 1,
    "min": 1,
    "argmax": 0,
    "argmin": 0,
    "multinomial": 0,
}
_SEVERAL = frozenset({"topk", "sort", "multinomial"})  # choices of each row
_COUNTING = frozenset({"bincount", "histc"})
_MOVES = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.BROADCAST)  # values as they are
_UNIFORM = frozenset({"rand", "rand_like"})


def assume(
    func: Any, base: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> None:
    """Give the result of an operator plausible values, where there are any."""
    named = {**dict(zip(_torch.argument_names(func), args, strict=False)), **kwargs}
    if base in _CHOICES and not isinstance(result, torch.Tensor):
        result = result[_CHOICES[base]]
    elif base in ("max", "min"):  # of all, or of two tensors
        return
    if not isinstance(result, torch.Tensor) or not _torch.may_follow(result):
        return
    if base in _CHOICES:
        _torch.set_known(
            result,
            _choices(base, named, result),
            f"{base} is taken to choose each as often",
        )
    elif base in _COUNTING and named.get("weights") is None:
        _torch.set_known(
            result,
            _shares(args[0].numel(), result),
            f"{base} is taken to count as many of each",
        )
    elif base == "sum" and args[0].dtype == torch.bool and result.numel():
        each = args[0].numel() // result.numel()
        real = torch.full(result.shape, each, dtype=result.dtype)
        _torch.set_known(result, real, _ALL_TRUE)
    elif base in _UNIFORM:
        result.is_uniform = True  # type: ignore[attr-defined]
    else:
        _assume_drawn(base, named, result)


def assume_received(
    kind: Kind,
    reduction: str,
    sent: Sequence[torch.Tensor],
    received: Sequence[torch.Tensor],
    num_ranks: int,
) -> None:
    """Give what ranks receive the values that ranks like this one would send.

    Args:
        kind: Of the communication.
        reduction: As in ``sum``; empty where it cannot be told.
        sent: What this rank gives.
        received: What it is given, in part or whole the same tensors.
        num_ranks: How many communicate.
    """
    is_told = kind in _MOVES or (kind is Kind.ALL_REDUCE and bool(reduction))
    factor = num_ranks if reduction == "sum" else 1
    found = [_torch.followed(each) if is_told else None for each in sent]
    for place, tensor in enumerate(received):
        # Of each tensor one, or of one tensor all that were gathered.
        known = found[place if len(sent) == len(received) else 0] if sent else None
        _forget(tensor)
        if known is None or not _torch.may_follow(tensor):
            continue
        times, rest = divmod(tensor.numel(), max(known.real.numel(), 1))
        if rest == 0 and times in (1, num_ranks):
            real = (known.real * factor if factor > 1 else known.real).reshape(-1)
            real = real.repeat(times).reshape(tensor.shape).to(tensor.dtype)
            alike = _ALIKE if kind is Kind.ALL_TO_ALL else ""
            why = "; ".join(dict.fromkeys(filter(None, (known.why, alike))))
            _torch.set_known(tensor, real, why)


def _forget(tensor: Any) -> None:
    _torch.forget_known(tensor)
    if hasattr(tensor, "known_value"):
        del tensor.known_value


def _assume_drawn(base: str, named: Mapping[str, Any], result: torch.Tensor) -> None:
    """Of random numbers as many are below a bound as should be."""
    part: object = None
    if base.startswith("bernoulli"):
        part = named.get("p", _single(named.get("self")))
    elif base in ("lt", "le", "gt", "ge") and hasattr(named["self"], "is_uniform"):
        part = _single(named["other"])
        if base.startswith("g") and isinstance(part, int | float):
            part = 1 - part
    if not isinstance(part, int | float):
        return
    part = min(max(part, 0.0), 1.0)
    edges = (part * torch.arange(result.numel() + 1, dtype=torch.float64)).round()
    real = (edges.diff() > 0).to(result.dtype).view(result.shape)
    _torch.set_known(
        result,
        real,
        f"{part:.3g} of random truths are taken to be true",
        writes=base.endswith("_"),
    )


def _single(value: object) -> object:
    """The number that all elements are."""
    if not isinstance(value, torch.Tensor):
        return value
    real = _torch.known_tensor(value)
    if real is None or not real.numel() or not bool((real == real.flatten()[0]).all()):
        return None
    return real.flatten()[0].item()


def _choices(base: str, named: Mapping[str, Any], result: torch.Tensor) -> torch.Tensor:
    """Each row begins with another choice, and goes on with the next ones."""
    source, shape = named["self"], result.shape
    dim = named.get("dim", -1 if base in _SEVERAL else None)
    count = max(source.numel() if dim is None else source.size(dim), 1)
    if base not in _SEVERAL or not shape:
        return torch.arange(result.numel()).remainder_(count).view(shape)
    along = shape[dim]
    rest = [size for place, size in enumerate(shape) if place != dim % len(shape)]
    rows = torch.arange(math.prod(rest))[:, None] + torch.arange(along)
    return rows.remainder_(count).view(*rest, along).movedim(-1, dim)


def _shares(total: int, result: torch.Tensor) -> torch.Tensor:
    bins = result.numel()
    even = torch.full((bins,), total // max(bins, 1), dtype=result.dtype)
    even[: total - int(even.sum())] += 1
    return even.view(result.shape)
