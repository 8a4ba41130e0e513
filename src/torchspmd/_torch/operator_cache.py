"""Results of operators that ran before on tensors of the same layout.

Asking torch what an operator's result looks like takes a tenth of a millisecond and more,
its own cache not much less, and a model of 80 layers asks the same 80 times. Kept are the
layouts of results that are new tensors, views of the one tensor argument, or an argument
that was written into.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout)
_PLAIN_TYPES = frozenset(
    {*_PLAIN, torch.memory_format, torch.Size} - {torch.Size}  # sizes are sequences
)
_MAX_ENTRIES = 1 << 16


class _Layout(NamedTuple):
    """One tensor of a result.

    Attributes:
        shape: Its size.
        stride: In elements.
        offset: Into its memory; of a view: from that of its argument.
        dtype: Element type.
        device: As Python sees it.
        is_view: Whether it lies in the memory of the tensor argument.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    is_view: bool


class _Entry(NamedTuple):
    """What a call gave.

    Attributes:
        layouts: Of the tensors; None for what was no tensor.
        container: ``list`` or ``tuple`` around them; None for one alone.
        gives_first: Whether the result is the first argument.
    """

    layouts: tuple[_Layout | None, ...]
    container: type | None
    gives_first: bool = False


class _UncachedError(Exception):
    """This call, or its result, is of a kind that is not kept."""


class OperatorCache:
    """Answers repeated calls for one mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._entries: dict[Any, _Entry | None] = {}
        # What torch sets on each fake tensor that it makes, less its device.
        self._attributes: dict[str, Any] | None = None

    def call(
        self,
        func: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        run: Callable[[], Any],
    ) -> Any:
        """What the operator gives: from a call of before, or from ``run``."""
        if not _is_regular(func):
            return run()
        try:
            key = (func, _key(args), _key(tuple(kwargs.items())) if kwargs else None)
        except _UncachedError:
            return run()
        entry = self._entries.get(key, _UNSEEN)
        if entry is _UNSEEN:
            result = run()
            if len(self._entries) >= _MAX_ENTRIES:
                self._entries.clear()
            self._entries[key] = self._describe(func, args, result)
            return result
        if entry is None:
            return run()
        return self._build(entry, args)

    def _describe(
        self, func: OpOverload, args: Sequence[Any], result: Any
    ) -> _Entry | None:
        first = args[0] if args else None
        if result is None:
            return _Entry((None,), None)
        if result is first:
            return _Entry((), None, gives_first=True)
        container = type(result) if isinstance(result, list | tuple) else None
        if container is not None and container not in (list, tuple):
            return None
        values = [result] if container is None else result
        memory = _memory(first)
        seen = {memory}
        layouts: list[_Layout | None] = []
        for value in values:
            if value is None:
                layouts.append(None)
                continue
            if type(value) is not FakeTensor or value.layout is not torch.strided:
                return None
            own = _memory(value)
            is_view = own == memory
            if not is_view and (own in seen or not _is_whole(value)):
                return None  # lies in other memory than that of the first argument
            if is_view and type(first) is not FakeTensor:
                return None
            seen.add(own)
            offset = int(value.storage_offset())
            if is_view and first is not None:
                offset -= int(first.storage_offset())
            layouts.append(
                _Layout(
                    tuple(value.shape),
                    value.stride(),
                    offset,
                    value.dtype,
                    value.fake_device,
                    is_view,
                )
            )
            if self._attributes is None:
                self._attributes = dict(value.__dict__)
        return _Entry(tuple(layouts), container)

    def _build(self, entry: _Entry, args: Sequence[Any]) -> Any:
        if entry.gives_first:
            return args[0]
        tensors = [
            None if layout is None else self._tensor(layout, args)
            for layout in entry.layouts
        ]
        return tensors[0] if entry.container is None else entry.container(tensors)

    def _tensor(self, layout: _Layout, args: Sequence[Any]) -> torch.Tensor:
        if layout.is_view:
            first = args[0]
            meta = torch.empty(0, dtype=layout.dtype, device="meta")
            with torch._C._DisableTorchDispatch():
                meta.set_(
                    first.untyped_storage(),
                    first.storage_offset() + layout.offset,
                    layout.shape,
                    layout.stride,
                )
        else:
            meta = torch.empty_strided(
                layout.shape, layout.stride, dtype=layout.dtype, device="meta"
            )
        fake: Any = torch.Tensor._make_subclass(
            FakeTensor,
            meta,
            False,
            dispatch_device=True,
            device_for_backend_keys=layout.device,
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        assert self._attributes is not None, "a kept layout is that of a fake tensor"
        fake.__dict__.update(self._attributes)
        fake._fake_device = layout.device
        return fake  # type: ignore[no-any-return]


_UNSEEN: Any = object()


@cache
def _is_regular(func: Any) -> bool:
    """Whether an operator's result depends on nothing but its arguments' layouts.

    Its result must be new, a view of its first argument, or the first argument.
    """
    if not isinstance(func, OpOverload) or func.namespace not in ("aten", "prims"):
        return False
    if torch.Tag.data_dependent_output in func.tags:
        return False
    if torch.Tag.dynamic_output_shape in func.tags:
        return False
    if torch.Tag.inplace_view in func.tags or func._schema.name in _CHANGES_LAYOUT:
        return False
    arguments = func._schema.arguments
    written = [
        a for a in arguments if a.alias_info is not None and a.alias_info.is_write
    ]
    if not written:
        return True
    returns = func._schema.returns
    if not returns:  # as those of lists of tensors: they write and give nothing
        return True
    return len(written) == 1 and written[0] is not None and _gives_first(func)


_CHANGES_LAYOUT = frozenset({"aten::resize_", "aten::resize_as_", "aten::set_"})


def _gives_first(func: OpOverload) -> bool:
    schema = func._schema
    first = schema.arguments[0]
    return (
        len(schema.returns) == 1
        and first.alias_info is not None
        and first.alias_info.is_write
    )


def _key(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple([_part(value) for value in values])


def _part(value: Any) -> Any:
    kind = type(value)
    if kind is FakeTensor:
        if value.layout is not torch.strided or value.constant is not None:
            raise _UncachedError
        return (
            tuple(value.shape),
            value.stride(),
            value.dtype,
            value._fake_device,
            value.is_conj(),
            value.is_neg(),
        )
    if kind in _PLAIN_TYPES:
        return (kind, value)
    if kind is list or kind is tuple:
        return _key(value)
    raise _UncachedError


def _memory(value: Any) -> int | None:
    if isinstance(value, torch.Tensor):
        return int(value.untyped_storage()._cdata)
    return None


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor has its memory to itself, and all of it."""
    if tensor.storage_offset():
        return False
    needed = 1 + sum(
        (size - 1) * stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    if not tensor.numel():
        needed = 0
    return tensor.untyped_storage().nbytes() == needed * tensor.element_size()
