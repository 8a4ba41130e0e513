"""Sizes of batches that change from call to call: one program for all of them.

A size that took a second value becomes a symbol of the graph. Whatever ranks decide by
sizes (buckets, an order of reductions) they decide by those of the first program, so that
ranks with batches of other lengths send the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torchspmd.step.capture.guards import Signature, TensorFact
from torchspmd.step.capture.inventory import Role


@final
class _Any:
    """In the place of a size that may be any."""

    def __repr__(self) -> str:
        return "*"


ANY = _Any()


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that a program takes as they come.

    Attributes:
        dims: Of each tensor argument, by name, the dims whose size may change.
        shapes: The shapes of all arguments that decisions are made by.
    """

    dims: Mapping[str, frozenset[int]]
    shapes: Mapping[str, tuple[int, ...]]

    def describe(self) -> str:
        """One line for ``explain()``."""
        texts = [
            f"{name} {_with_any(self.shapes[name], dims)}"
            for name, dims in self.dims.items()
        ]
        return f"one program for every size of {', '.join(texts)}"


def _with_any(shape: tuple[int, ...], dims: frozenset[int]) -> list[Any]:
    return [ANY if dim in dims else size for dim, size in enumerate(shape)]


def input_shapes(signature: Signature) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor argument."""
    return {name: fact.shape for name, fact in signature if _is_input(fact)}


def differing_sizes(
    first: Signature, second: Signature
) -> dict[str, frozenset[int]] | None:
    """The dims in which tensor arguments of two calls differ; None: more than that does.

    >>> one, two = (
    ...     (("x", TensorFact((n, 4), "f", (4, 1), "cpu", False, "input", None)),)
    ...     for n in (2, 3)
    ... )
    >>> differing_sizes(one, two), differing_sizes(one, (*two, ("y", 1)))
    ({'x': frozenset({0})}, None)
    """
    if len(first) != len(second):
        return None
    found = {}
    for (name, ours), (other, theirs) in zip(first, second, strict=True):
        if name != other:
            return None
        if ours == theirs:
            continue
        dims = _differing_dims(ours, theirs)
        if dims is None:
            return None
        found[name] = dims
    return found


def _differing_dims(ours: Any, theirs: Any) -> frozenset[int] | None:
    if not (_is_input(ours) and _is_input(theirs)):
        return None
    if len(ours.shape) != len(theirs.shape):
        return None
    if not (_is_contiguous(ours) and _is_contiguous(theirs)):
        return None
    if ours != theirs._replace(shape=ours.shape, stride=ours.stride):
        return None
    pairs = zip(ours.shape, theirs.shape, strict=True)
    return frozenset(dim for dim, (a, b) in enumerate(pairs) if a != b)


def sizes_of(
    signature: Signature,
    dims: Mapping[str, frozenset[int]],
    shapes: Mapping[str, tuple[int, ...]],
) -> Sizes | None:
    """Any size of these dims, with choices by these shapes; None where a call has others.

    A symbol is never 0 or 1: such a size is one of its own, with a program of its own.
    """
    found = dict(signature)
    if shapes.keys() != input_shapes(signature).keys():
        return None
    for name, shape in shapes.items():
        now, free = found[name].shape, dims.get(name, frozenset())
        others = [n for n in range(len(shape)) if n not in free]
        if len(now) != len(shape) or any(now[n] != shape[n] for n in others):
            return None
        if free and not _is_contiguous(found[name]):
            return None
    sizes = {
        name: tuple(
            max(size, 2) if dim in dims.get(name, ()) else size
            for dim, size in enumerate(shape)
        )
        for name, shape in shapes.items()
    }
    return Sizes({name: each for name, each in dims.items() if name in shapes}, sizes)


def with_any_size(
    signature: Signature, dims: Mapping[str, frozenset[int]]
) -> Signature:
    """A signature that is the same for all sizes of these dims."""
    return tuple(
        (name, _masked(fact, dims[name]) if name in dims else fact)
        for name, fact in signature
    )


def _masked(fact: Any, dims: frozenset[int]) -> Any:
    if not _is_input(fact) or not _is_contiguous(fact) or max(dims) >= len(fact.shape):
        return fact
    return fact._replace(shape=tuple(_with_any(fact.shape, dims)), stride=ANY)


def _is_input(fact: Any) -> bool:
    is_tensor = isinstance(fact, TensorFact)
    return is_tensor and fact.role == Role.INPUT.value and fact.layout is None


def _is_contiguous(fact: TensorFact) -> bool:
    """Whether the strides are those of a tensor that lies in order, or any."""
    shape, stride = fact.shape, fact.stride
    if stride is ANY:
        return True
    step = 1
    for size, found in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and found != step:
            return False
        step *= size
    return True
