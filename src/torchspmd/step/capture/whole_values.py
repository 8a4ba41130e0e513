"""Values of the batch of which each rank has a term, or some rows, made whole.

DTensor refuses some calls on terms: writes into a sum that are not linear in it, a sum
beside a mean in one list. Such a call is made on the whole values, and what it writes is
spread over the terms again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from torchspmd import _torch
from torchspmd.step.capture.finishing import finished
from torchspmd.step.capture.refusals import RefusalError, is_spread

# What DTensor says; where it says something else, the step is refused with that.
_ABOUT_TERMS = (
    "in-place operations that require placement changes",
    "Redistribution from one partial type",
)


def is_about_terms(error: BaseException) -> bool:
    """Whether DTensor refused a call because an argument is terms of a value."""
    return any(text in str(error) for text in _ABOUT_TERMS)


def without_terms(value: Any) -> Any:
    """A value whose terms are added up; rows that lie over ranks stay there."""
    if not isinstance(value, DTensor):
        return value
    return finished(value, tuple(_joined(p) for p in value.placements))


def _joined(placement: Placement) -> Placement:
    return Replicate() if isinstance(placement, Partial) else placement


def everything(value: Any) -> Any:
    """The values of all ranks as a plain tensor; they are sent."""
    if not isinstance(value, DTensor):
        return value
    layout = (Replicate(),) * value.device_mesh.ndim
    return _torch.local_tensor(finished(value, layout))


def on_whole_values(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """A call without terms; what it writes is written into the terms."""
    whole_args, whole_kwargs = mapped(without_terms, (args, kwargs))
    made = func(*whole_args, **whole_kwargs)
    if not _torch.written_arguments(func):
        return made
    before = _torch.flatten_tree(_written(func, args, kwargs))[0]
    after = _torch.flatten_tree(_written(func, whole_args, whole_kwargs))[0]
    terms = {}
    for old, new in zip(before, after, strict=True):
        if old is not new:
            write_terms(func, old, new)
            terms[id(new)] = old
    return mapped(lambda leaf: terms.get(id(leaf), leaf), made)


def on_equal_values(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """An operator without a rule on values that all ranks have: so they do its result.

    ``NotImplemented`` where an argument lies over ranks.
    """
    whole_args, whole_kwargs = mapped(without_terms, (args, kwargs))
    given = [
        leaf
        for leaf in _torch.flatten_tree((whole_args, whole_kwargs))[0]
        if isinstance(leaf, DTensor)
    ]
    if not given or any(map(is_spread, given)):
        return NotImplemented
    local_args, local_kwargs = mapped(everything, (whole_args, whole_kwargs))
    made = func(*local_args, **local_kwargs)
    mesh = given[0].device_mesh
    return mapped(lambda leaf: on_all_ranks(leaf, mesh), made)


def on_all_ranks(value: Any, mesh: DeviceMesh) -> Any:
    """A DTensor around a plain tensor that every rank has."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    layout = (Replicate(),) * mesh.ndim
    shape, stride = tuple(value.shape), value.stride()
    spec = _torch.strided_spec(mesh, layout, shape, stride, value.dtype)
    return _torch.wrap_local(value, spec)


def write_terms(func: Any, terms: DTensor, value: torch.Tensor) -> torch.Tensor:
    """Spread a value that every rank has over the terms of a tensor."""
    if not (terms.is_floating_point() or terms.is_complex()):
        raise refused_terms(func)
    return terms.copy_(value)


def refused_terms(func: Any) -> RefusalError:
    """The error for a write that integers cannot share among ranks."""
    return RefusalError(
        f"{_torch.packet_name(func)} on a sum over the batch of integers, or on a tensor "
        "made like one",
        "Each rank has a term of it, and the terms would be added: the value would have to "
        "be divided among the ranks.\nMake a new tensor (with torch.full or full_like, "
        "torch.randint), choose with torch.where, or write into a floating-point tensor.",
    )


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    names = _torch.signature_of(func).written
    return [
        args[place] if place < len(args) else kwargs.get(name)
        for place, name in zip(_torch.written_arguments(func), names, strict=True)
    ]


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """A tree with a function applied to every leaf."""
    leaves, structure = _torch.flatten_tree(tree)
    return _torch.unflatten_tree(list(map(function, leaves)), structure)
