"""Results of operators that ran before on tensors of the same layout.

Asking torch what an operator's result looks like takes a tenth of a millisecond and more,
its own cache not much less, and a model of 80 layers asks the same 80 times. Kept are the
layouts of results that are new tensors, views of the one tensor argument, or an argument
that was written into.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple, cast

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
        layouts: Of the tensors; None for other values.
        container: ``list`` or ``tuple`` around them; None for one alone.
        gives_first: Whether the result is the first argument.
    """

    layouts: tuple[_Layout | None, ...]
    container: type | None
    gives_first: bool = False


class _UncachedError(Exception):
    """This call, or its result, is of a kind that is not kept."""


class _Maker:
    """Makes the fake tensors of one mode, ten times as fast as torch."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode

    @cached_property
    def _attributes(self) -> dict[str, Any]:
        """What torch sets on each fake tensor that it makes, less its device."""
        with torch._C._DisableTorchDispatch():
            meta = torch.empty(0, device="meta")
            return dict(FakeTensor(self._mode, meta, torch.device("cpu")).__dict__)

    def new(self, layout: _Layout) -> torch.Tensor:
        """A tensor with memory of its own."""
        with torch._C._DisableTorchDispatch():  # no mode sees how it is made
            meta = torch.empty_strided(
                layout.shape, layout.stride, dtype=layout.dtype, device="meta"
            )
            return self._fake(meta, layout.device)

    def view(self, layout: _Layout, memory: torch.UntypedStorage) -> torch.Tensor:
        """A tensor in some memory."""
        with torch._C._DisableTorchDispatch():
            meta = torch.empty(0, dtype=layout.dtype, device="meta")
            meta.set_(memory, layout.offset, layout.shape, layout.stride)
            return self._fake(meta, layout.device)

    def _fake(self, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
        fake: Any = torch.Tensor._make_subclass(
            FakeTensor,
            meta,
            False,
            dispatch_device=True,
            device_for_backend_keys=device,
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        fake.__dict__.update(self._attributes)
        fake.fake_device = device
        return fake


class OperatorCache:
    """Answers repeated calls for one mode.

    Args:
        mode: That of the tensors.
        keep_collectives: Whether to remember collectives too: a recorder below the mode
            would not see repeated ones.
        maker: What makes its tensors.
    """

    def __init__(
        self,
        mode: FakeTensorMode,
        *,
        keep_collectives: bool = False,
        maker: _Maker | None = None,
    ) -> None:
        self._mode = mode
        self._keep_collectives = keep_collectives
        self._maker = maker or _Maker(mode)
        self._entries: dict[Any, _Entry | None] = {}

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
        if func.namespace == _COLLECTIVES and not self._keep_collectives:
            return run()
        try:
            key = (func, self._key(args), self._key(kwargs.items()) if kwargs else None)
            entry = self._entries.get(key, _UNSEEN)
        except (_UncachedError, TypeError):  # symbols have no hash
            return run()
        if entry is _UNSEEN:
            result = run()
            if len(self._entries) >= _MAX_ENTRIES:
                self._entries.clear()
            self._entries[key] = self._describe(args, result)
            return result
        if entry is None:
            return run()
        return self._build(entry, args)

    def _key(self, values: Iterable[Any]) -> tuple[Any, ...]:
        return tuple([self._part(value) for value in values])

    def _part(self, value: Any) -> Any:
        kind = type(value)
        if kind is FakeTensor:
            if value.fake_mode is not self._mode or value.constant is not None:
                raise _UncachedError  # torch has an error for that, or computes with it
            if value.layout is not torch.strided:
                raise _UncachedError
            return (
                tuple(value.shape),
                value.stride(),
                value.storage_offset(),
                value.dtype,
                value.fake_device,
                value.is_conj(),
                value.is_neg(),
                value.requires_grad,
            )
        if kind in _PLAIN_TYPES:
            return (kind, value)
        if kind is list or kind is tuple:
            return self._key(value)
        raise _UncachedError

    def _describe(self, args: Sequence[Any], result: Any) -> _Entry | None:
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
            if value.is_conj() or value.is_neg():
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
        if not layout.is_view:
            return self._maker.new(layout)
        first = args[0]
        offset = first.storage_offset() + layout.offset
        return self._maker.view(layout._replace(offset=offset), first.untyped_storage())


class CachingMode(FakeTensorMode):
    """Fake tensors whose mode remembers results: torch's own cache is slow.

    Args:
        keep_collectives: As for ``OperatorCache``.
        options: Those of torch's mode.
    """

    def __init__(self, *, keep_collectives: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self._keep_collectives = keep_collectives
        self._maker = _Maker(self)
        # Numbers in an operator may give its result the default dtype.
        self._caches: dict[torch.dtype, OperatorCache] = {}
        # The memory of fake tensors that stand for others, with what keeps the key valid.
        self._memory: dict[int, tuple[object, torch.UntypedStorage]] = {}

    def dispatch(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What an operator gives."""
        kwargs = kwargs or {}

        def run() -> Any:
            return FakeTensorMode.dispatch(self, func, types, args, kwargs)

        if not types:
            return run()
        dtype = torch.get_default_dtype()
        known = self._caches.get(dtype)
        if known is None:
            known = self._caches[dtype] = OperatorCache(
                self, keep_collectives=self._keep_collectives, maker=self._maker
            )
        return known.call(func, args, kwargs, run)

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A fake tensor for a real one; None where torch must look at it itself.

        Tensors that share memory have stand-ins that do.
        """
        if (
            type(tensor) not in (torch.Tensor, torch.nn.Parameter)
            or tensor.device.type not in ("cpu", "cuda")
            or _is_special(tensor)
            or tensor.is_quantized
            or tensor.is_inference()
            or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        ):
            return None
        real = tensor.untyped_storage()
        if real._cdata not in self._memory:
            memory = torch.UntypedStorage(real.nbytes(), device="meta")
            self._memory[real._cdata] = real, memory
        _, memory = self._memory[real._cdata]
        return self._maker.view(_layout(tensor, tensor.device), memory)

    def snapshot(self, fake: Any) -> torch.Tensor | None:
        """The same fake tensor detached; None where torch must do it."""
        with torch._C.DisableTorchFunction():  # no mode is to see what is asked here
            if type(fake) is not FakeTensor or _is_special(fake) or _has_symbols(fake):
                return None
            layout = _layout(fake, fake.fake_device)
            return self._maker.view(layout, fake.untyped_storage())


def _layout(tensor: torch.Tensor, device: torch.device) -> _Layout:
    shape, stride = tuple(tensor.shape), tensor.stride()
    offset = cast(int, tensor.storage_offset())
    return _Layout(shape, stride, offset, tensor.dtype, device, True)


def _is_special(tensor: torch.Tensor) -> bool:
    """Whether more than its layout tells about a tensor."""
    return tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg()


def _has_symbols(tensor: torch.Tensor) -> bool:
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return any(type(number) is not int for number in numbers)


_UNSEEN: Any = object()


@cache
def _is_regular(func: Any) -> bool:
    """Whether an operator's result depends on nothing but its arguments' layouts.

    Its result must be new, a view of its first argument, or the first argument.
    """
    if not isinstance(func, OpOverload) or func.namespace not in _NAMESPACES:
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


_COLLECTIVES = "_c10d_functional"
_NAMESPACES = ("aten", "prims", _COLLECTIVES)  # others may look at anything
_CHANGES_LAYOUT = frozenset({"aten::resize_", "aten::resize_as_", "aten::set_"})


def _gives_first(func: OpOverload) -> bool:
    schema = func._schema
    first = schema.arguments[0]
    return (
        len(schema.returns) == 1
        and first.alias_info is not None
        and first.alias_info.is_write
    )


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
