"""What operators give for tensors without values."""

import contextlib
import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from torchspmd._torch.operators import argument_names, kept, packet_name, signature_of
from torchspmd._torch.regions import leaves_of, map_tree

_FUNCTIONAL = "_c10d_functional"
_IN_PLACE = ("all_reduce_", "all_reduce_coalesced_", "broadcast_", "wait_tensor")


def fake_result(
    target: Callable[..., Any],
    args: Any,
    options: Mapping[str, Any] | None = None,
    *,
    near: Iterable[Any] = (),
) -> Any:
    """What a call gives for tensors without values.

    It runs in the fake mode of its own tensors, or, where they have none, in that of the
    tensors ``near``. Where these have none either, its results have none.

    Collectives are not called: a ledger that records would count them. The result is None
    for one whose shape is not known here.
    """
    if target is operator.getitem and isinstance(args[0], (list, tuple)):
        return args[0][args[1]]
    options = options or {}
    own = _fake_mode_of(leaves_of(torch.Tensor, (args, options))) or _fake_mode_of(near)
    if own is None:
        return _run_without_values(target, args, options, None)
    # Layers are alike: what one call gives is what the same call gives in the next one.
    known: dict[Any, Any] = vars(own).setdefault("torchspmd_results", {})
    is_list = isinstance(target, OpOverload) and _is_item_by_item(target)
    items = _calls_by_item(args, options) if is_list else []
    calls = items or [(args, options)]
    keys = [
        _form_of((target, *(_without_symbols(each) if items else each)))
        for each in calls
    ]
    if None in keys:
        return _run_without_values(target, args, options, own)
    for key, call in zip(keys, calls, strict=True):
        if key not in known:
            known[key] = _run_without_values(target, *call, own)
    return [known[key][0] for key in keys] if items else known[keys[0]]


@kept
def _is_item_by_item(operator: OpOverload) -> bool:
    """Whether each item that an operator gives depends on the same items of its lists."""
    schema = operator._schema
    is_packed = any(
        argument.name == "scalars" and isinstance(argument.type, torch.TensorType)
        for argument in schema.arguments
    )
    return (
        schema.name.startswith("aten::_foreach_")
        and len(schema.returns) == 1
        and not is_packed
        and not schema.is_mutable
    )


def _calls_by_item(
    args: Sequence[Any], options: Mapping[str, Any]
) -> list[tuple[Any, Mapping[str, Any]]]:
    """The calls for each item of an operator's lists; nothing where lengths differ.

    The items of a list with hundreds of tensors have few forms.
    """
    given = (*args, *options.values())
    lengths = {len(each) for each in given if isinstance(each, (list, tuple))}
    if len(lengths) != 1:
        return []

    def item(value: Any, index: int) -> Any:
        return [value[index]] if isinstance(value, (list, tuple)) else value

    return [
        (
            tuple(item(each, index) for each in args),
            {name: item(each, index) for name, each in options.items()},
        )
        for index in range(lengths.pop())
    ]


def _without_symbols(value: Any) -> Any:
    """Arguments with a word for each symbolic number, which changes no item's form."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_without_symbols, value))
    if isinstance(value, Mapping):
        return {name: _without_symbols(each) for name, each in value.items()}
    return "a symbol" if isinstance(value, torch.SymFloat) else value


def _form_of(value: Any) -> Any:
    """What a call's result depends on, without values; None where that is not known."""
    if isinstance(value, torch.Tensor):
        if not hasattr(value, "fake_mode") or value.layout is not torch.strided:
            return None
        if value._has_symbolic_sizes_strides:
            return None
        return (value.shape, value.stride(), value.dtype, value.device, value.is_conj())
    if isinstance(value, (list, tuple)):
        found = tuple(map(_form_of, value))
        return None if None in found else (type(value), found)
    if isinstance(value, Mapping):
        found = _form_of(tuple(value.values()))
        return None if found is None else (*value, found)
    if isinstance(value, OpOverload):
        return None if signature_of(value).written else value
    is_plain = value is None or type(value) in _PLAIN
    return (type(value), value) if is_plain else None


_PLAIN = (
    *(bool, int, float, str, torch.dtype, torch.device, torch.layout),
    torch.memory_format,
)

_UPDATES = [
    f"_fused_{kind}_{overload}"
    for kind in ("adagrad", "adam", "adamw", "sgd")
    for overload in ("", ".tensor_lr")
]


@contextlib.contextmanager
def fused_updates_without_values() -> Iterator[None]:
    """Give fused optimizers kernels for tensors without values, where torch has none.

    Without one, torch runs the real kernel, on memory for all states.
    """
    with torch.library._scoped_library("aten", "IMPL", "Meta") as library:
        for name in _UPDATES:
            if _is_without_meta(f"aten::{name}"):
                library.impl(name, lambda *args, **kwargs: None)
        yield


def _is_without_meta(name: str) -> bool:
    return torch._C._dispatch_has_kernel(
        name
    ) and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta")


def _run_without_values(
    target: Callable[..., Any], args: Any, options: Mapping[str, Any], own: Any
) -> Any:
    with torch.no_grad(), own or _mode_for_plain_tensors(), failures_not_logged():
        if isinstance(target, OpOverload) and target.namespace == _FUNCTIONAL:
            made = _of_collective(target, args, options)
        else:
            if isinstance(target, OpOverload) and signature_of(target).written:
                # An operator that works in place may change the strides of its operand.
                args, options = map_tree(_detached, (args, options))
            with _kernels_for(target):
                made = target(*args, **options)
    return made if own else map_tree(_without_mode, made)


def _kernels_for(target: Any) -> contextlib.AbstractContextManager[None]:
    is_update = getattr(target, "_opname", "").startswith("_fused_")
    return fused_updates_without_values() if is_update else contextlib.nullcontext()


def _fake_mode_of(values: Iterable[Any]) -> Any:
    return next((each.fake_mode for each in values if hasattr(each, "fake_mode")), None)


@cache
def _mode_for_plain_tensors() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def failures_not_logged() -> Iterator[None]:
    """Keep torch from logging the trace of an operator that fails: the error says it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def passes(record: logging.LogRecord) -> bool:
        return "failed while attempting to run meta" not in str(record.msg)

    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


def _of_collective(target: OpOverload, args: Any, options: Mapping[str, Any]) -> Any:
    kind = packet_name(target).removeprefix(f"{_FUNCTIONAL}::")
    if kind in _IN_PLACE:
        return args[0]
    given = {**dict(zip(argument_names(target), args, strict=False)), **options}
    size = given.get("group_size", 1)
    if kind.endswith("_coalesced"):
        kind = kind.removesuffix("_coalesced")
        return [_reshaped(kind, each, size) for each in given["inputs"]]
    return _reshaped(kind, given["input"], size) if "input" in given else None


def _reshaped(kind: str, sent: torch.Tensor, group_size: int) -> torch.Tensor | None:
    if kind in ("all_reduce", "broadcast"):
        return torch.empty_like(sent, memory_format=torch.contiguous_format)
    if kind == "all_gather_into_tensor":
        return sent.new_empty((sent.shape[0] * group_size, *sent.shape[1:]))
    if kind == "reduce_scatter_tensor":
        return sent.new_empty((sent.shape[0] // group_size, *sent.shape[1:]))
    return None


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _without_mode(value: Any) -> Any:
    if not hasattr(value, "fake_mode"):
        return value
    return torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device=value.device
    )
