"""In-place collectives that autograd does not see.

``dist.all_reduce`` writes into its argument, and the recorded graph says nothing of it:
what depends on other ranks seems to depend on this one alone. Only watching calls tells.
That costs some microseconds for each operator, so the first call of each kind is watched,
and further ones only where the function has called in-place collectives at all.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from torchspmd import _torch
from torchspmd.local.evidence import group_axes
from torchspmd.local.frame import Frame
from torchspmd.local.gradient import Axis
from torchspmd.local.messages import Problem

_IN_PLACE = "c10d::"
_NOTHING_WRITTEN = ("c10d::send", "c10d::barrier", "c10d::monitored_barrier_")


class Unseen(NamedTuple):
    """An in-place collective over an axis (by number), on a tensor with a gradient."""

    axis: int
    operator: str


class Watch:
    """The in-place collectives of one call.

    Attributes:
        has_written: Some were called.
        unseen: Those that wrote into memory that a tensor with a gradient reads.
    """

    def __init__(self, frame: Frame) -> None:
        self.has_written = False
        self.unseen: set[Unseen] = set()
        self._axes = {axis.index for axis in frame.axes if axis.size > 1}
        self._mesh = frame.mesh
        self._caller: CodeType | None = None
        # By memory; the tensor is held, so that the memory stays its own.
        self._written: dict[int, tuple[torch.Tensor, frozenset[Unseen]]] = {}

    @contextmanager
    def watching(self, caller: CodeType) -> Iterator[None]:
        """Watch what runs inside, called from this code."""
        self._caller = caller
        with _torch.observe_calls(self._note):
            yield

    def look_at(self, values: Any) -> None:
        """Tell of tensors with a gradient that lie in memory written before."""
        if not self._written:
            return
        for tensor in _tensors(values):
            if not tensor.requires_grad or isinstance(tensor, DTensor):
                continue
            target, writes = self._written.get(
                _torch.storage_key(tensor), (None, frozenset())
            )
            # A received tensor may become a leaf of the function's own.
            if target is not None and not target.requires_grad:
                self.unseen |= writes

    def _note(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.look_at((args, kwargs))
        name = _torch.packet_name(op)
        if not name.startswith(_IN_PLACE) or name in _NOTHING_WRITTEN:
            return
        self.has_written = True
        given = dict(zip(_torch.argument_names(op), args, strict=False), **kwargs)
        group = _torch.resolve_group(given.get("process_group"))
        # A custom function has its own backward, and is opaque to the rules as a whole.
        if group is None or _torch.is_in_custom_function(self._caller):
            return
        axes = group_axes(self._mesh, group) & self._axes
        writes = frozenset(Unseen(axis, name) for axis in axes)
        for tensor in _tensors(next(iter(given.values()))):
            if tensor.requires_grad:
                self.unseen |= writes
            elif writes:
                self._written[_torch.storage_key(tensor)] = tensor, writes


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, Mapping):
        yield from _tensors(list(values.values()))


def describe_unseen(
    unseen: Sequence[Unseen], axes: Sequence[Axis]
) -> dict[int, list[Problem]]:
    """The problem with each in-place collective, by axis number."""
    names = {axis.index: axis.name for axis in axes}
    problems: dict[int, list[Problem]] = {}
    for index, operator in unseen:
        name = names[index]
        problem = Problem(
            f"{operator} over {name!r}: was called in place on a tensor with a "
            "gradient; autograd does not see it",
            "Reduce by a collective with a backward (functional collectives, or "
            f"torch.distributed.nn), or return the term as Partial() over {name!r} "
            "and let DTensor reduce it. If no gradient is to pass, reduce a copy: "
            "t.detach().clone(). If its backward passes the gradient on as it is, write "
            "in_grad_placements=... for every argument, or out_grad_placements=... for "
            "every output.",
        )
        problems.setdefault(index, []).append(problem)
    return problems
