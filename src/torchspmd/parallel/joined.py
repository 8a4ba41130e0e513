"""The joined weight of a fused layer: a copy to read, which says so when it is written.

The layer's parameters are its parts. Code that writes into ``layer.weight``, freezes it or
asks for its gradient means the parts, and would change a temporary copy instead.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchspmd.errors import LayoutError

_Tensor: Any = torch.Tensor  # its attributes as descriptors

# Uses that only a parameter allows, and a copy does not; ``data`` may be read.
_WRITES = {
    _Tensor.data.__set__: "setting .data",
    _Tensor.grad.__get__: "reading .grad",
    _Tensor.grad.__set__: "setting .grad",
    _Tensor.requires_grad.__set__: "setting .requires_grad",
    _Tensor.__setitem__: "setting items",
    _Tensor.register_hook: "register_hook",
    _Tensor.register_post_accumulate_grad_hook: "register_post_accumulate_grad_hook",
}
# Views of a copy: a write into one is meant for the layer as well. They are known by name,
# as DTensor may have copied the memory.
_VIEW_NAMES = frozenset(
    "chunk detach flatten narrow permute reshape select split squeeze t tensor_split "
    "transpose unbind unflatten unsqueeze view view_as __getitem__".split()
)
_VIEW_ATTRIBUTES = (_Tensor.data.__get__, _Tensor.T.__get__)


class _Copy(torch.Tensor):
    """A tensor that refuses to be written, and knows whose copy it is."""

    __slots__ = ()  # the same layout in memory as the class that it takes over
    layer: str  # how errors name it
    parameter: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run calls that only read; others are an error that names the parameters."""
        kwargs = kwargs or {}
        write = _describe_write(func, "out" in kwargs)
        written = _written(args, kwargs) if write else None
        if write and written is not None:
            raise _lost(written, write)
        # DTensor's own method returns results of their usual class, for plain tensors too.
        result = DTensor.__torch_function__(func, types, args, kwargs)
        source = args[0] if args else None
        if isinstance(source, _Copy) and _is_view(func):
            for part in result if isinstance(result, (list, tuple)) else [result]:
                mark_copy(part, source.layer, source.parameter)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().clone().__reduce_ex__(protocol)


class JoinedShard(_Copy):
    """This rank's shard of a joined copy, in the same memory."""

    __slots__ = ()


class JoinedCopy(_Copy, DTensor):
    """The DTensor that is joined from the parts."""

    __slots__ = ()

    def to_local(self, **options: Any) -> torch.Tensor:
        """This rank's shard; it may only be read, too."""
        shard = super().to_local(**options)
        # Torch itself refuses writes into tensors of inference mode.
        if shard.is_inference():
            return shard
        return mark_copy(shard, self.layer, self.parameter)


def _describe_write(func: Callable[..., Any], has_out: bool) -> str | None:
    """What a call does to its first argument; None where it only reads."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return name if has_out or in_place else _WRITES.get(func)


def _is_view(func: Callable[..., Any]) -> bool:
    return getattr(func, "__name__", "") in _VIEW_NAMES or func in _VIEW_ATTRIBUTES


def _written(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Copy | None:
    """The copy that a writing call writes into; None where it writes elsewhere."""
    target = kwargs.get("out", next(iter((*args, *kwargs.values())), None))
    several = target if isinstance(target, (list, tuple)) else [target]
    return next((value for value in several if isinstance(value, _Copy)), None)


def _lost(copy: _Copy, write: str) -> LayoutError:
    name, parts = copy.parameter, f"{copy.parameter}_parts"
    return LayoutError(
        f"{copy.layer}: its {name} is a copy that is joined for reading, and "
        f"{write} would not reach the layer. Its parameters are those in {parts}, "
        f"one for each part: use them (`for p in layer.{parts}`), or load a whole "
        f"{name} with load_state_dict."
    )


def mark_copy(joined: Any, layer: str, name: str) -> torch.Tensor:
    """The same tensor, as a copy of what that layer calls ``name``."""
    joined.__class__ = JoinedCopy if isinstance(joined, DTensor) else JoinedShard
    joined.layer, joined.parameter = layer, name
    return joined
