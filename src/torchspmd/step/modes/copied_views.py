"""Views of a sharded batch that are copies: a write into one does not reach the other.

``h[0]`` of a batch that lies over ranks has to be fetched from one of them, so that it is
no view of memory as on one device. Reading it is right; after a write it is not.
"""

from dataclasses import dataclass
from typing import Any, final

from torch.distributed.tensor import DTensor

from torchspmd import _torch
from torchspmd.errors import CaptureError
from torchspmd.step.capture.user_code import calling_line


@dataclass(slots=True)
class _Copy:
    operator: str
    of: int  # the memory that one device would have looked at
    line: str
    written_at: str = ""
    held: Any = None  # keeps the memory's number from being given to another


@final
class CopiedViews:
    """Notes such copies while a step is traced, and refuses writes that would be lost."""

    def __init__(self) -> None:
        self._copies: dict[int, _Copy] = {}

    def note(self, operator: Any, base: DTensor, made: Any) -> None:
        """Note what a view operator made, where it does not lie in its base's memory."""
        if not _torch.is_view(operator):
            return
        source = _memory(base)
        first = self._copies.get(source)
        for value in made if isinstance(made, (tuple, list)) else (made,):
            if not isinstance(value, DTensor):
                continue
            memory = _memory(value)
            if memory != source and memory not in self._copies:
                self._copies[memory] = _Copy(
                    _torch.packet_name(operator),
                    first.of if first else source,
                    calling_line(),
                    held=(_torch.local_tensor(base), _torch.local_tensor(value)),
                )

    def check(self, operator: Any, args: Any, kwargs: Any) -> None:
        """Refuse a call that writes a copy, or that reads one of what was written since."""
        if not self._copies:
            return
        for value in _torch.leaves_of(DTensor, (args, kwargs)):
            copy = self._copies.get(_memory(value))
            if copy is not None and copy.written_at:
                raise _stale(copy)
        for value in _torch.leaves_of(
            DTensor, _torch.written_values(operator, args, kwargs)
        ):
            copy = self._copies.get(_memory(value))
            if copy is not None:
                raise _lost(operator, copy)
            for each in self._copies.values():
                if each.of == _memory(value):
                    each.written_at = calling_line()


def _memory(value: DTensor) -> int:
    return _torch.storage_key(_torch.local_tensor(value))


_FIX = (
    "Choose with torch.where and a mask over the rows, or put the parts together with "
    "torch.cat. A write along another dim, h[:, 0] = 0, works."
)


def _lost(operator: Any, copy: _Copy) -> CaptureError:
    return CaptureError(
        f"compile: {_torch.packet_name(operator)} writes into a view along the batch\n\n"
        f"  * {calling_line()}\n    the view ({copy.operator}) is made at {copy.line}"
        "\n\nThe batch lies over ranks, so that such a view is a copy and the write would "
        f"not reach the tensor that it was taken from. {_FIX}\nWhere the part alone is "
        "meant, write into its clone()."
    )


def _stale(copy: _Copy) -> CaptureError:
    return CaptureError(
        "compile: the step uses a view along the batch after the tensor that it was taken "
        f"from was written\n\n  * {calling_line()}\n    the view ({copy.operator}) is "
        f"made at {copy.line}\n    the write is at {copy.written_at}\n\nThe batch lies "
        "over ranks, so that such a view is a copy and has the values of before. Take the "
        "view after the write, or clone() it before if the old values are meant."
    )
