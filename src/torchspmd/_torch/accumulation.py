"""Gradients that autograd accumulates in place.

Where a tensor is used twice, the engine adds the second gradient into the first, unless
something else refers to that one; gradients of indexing are added into zeros. For tensor
subclasses, such as tensors without memory, it makes new tensors instead; this file decides
as the engine does for plain ones.
"""

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

_aten = torch.ops.aten
_ADD = _aten.add.Tensor
_INDEX_PUT = _aten.index_put.default
_IN_PLACE = {
    _ADD: _aten.add_.Tensor,
    _aten.index_add.default: _aten.index_add_.default,
    _INDEX_PUT: _aten.index_put_.default,
    _aten.scatter.src: _aten.scatter_.src,
    _aten.scatter_add.default: _aten.scatter_add_.default,
}
# Frames between a mode's own functions and the caller of the operator; the last two belong
# to a decorator of torch's.
_FRAMES_OF_A_MODE = frozenset({"_dispatch", "__torch_dispatch__", "_fn", "inner"})


class Accumulation:
    """Knows what autograd would do in place with CUDA tensors."""

    def __init__(self) -> None:
        # The reference counts of a gradient that only the engine holds; None: not learnt.
        self._alone: tuple[int, ...] | None = None
        self._is_learning = False

    def learn(self, on_device: Callable[[float], torch.Tensor]) -> None:
        """Count the references of a gradient that only the engine holds.

        How many there are depends on what is between the engine and here, so they are
        counted instead of stated.
        """
        self._is_learning = True
        try:
            with torch.enable_grad():
                leaf = on_device(1.0).requires_grad_()
                (leaf * leaf).backward()
        finally:
            self._is_learning = False

    def in_place(self, func: Any, args: Sequence[Any]) -> Any:
        """The operator that autograd would take for one that a dispatch mode was given.

        Args:
            func: The operator.
            args: Its arguments, in the tuple that came from C++.
        """
        replacement = _IN_PLACE.get(func)
        if (
            replacement is None
            or torch.is_grad_enabled()
            or torch._C._current_graph_task_id() == -1
            or not _is_called_by_engine()
        ):
            return func
        if self._is_learning:
            self._alone = _references(args)
            return func
        if func is _INDEX_PUT:  # into zeros of the node's own, where it adds
            return replacement if len(args) > 3 and args[3] else func
        if _references(args) != self._alone or not _is_dense(args[0]):
            return func
        if func is _ADD and not _has_shape_of(args[1], args[0]):
            return func
        return replacement


def _has_shape_of(value: object, other: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == other.shape


def _is_called_by_engine() -> bool:
    """Whether the engine itself, and no Python code, called the operator."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name in _FRAMES_OF_A_MODE:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _references(args: Sequence[Any]) -> tuple[int, ...]:
    """To the first argument: of Python, of C++, and to its memory."""
    storage = args[0].untyped_storage()
    return (
        sys.getrefcount(args[0]),
        args[0]._use_count(),
        torch._C._storage_Use_Count(storage._cdata),
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
