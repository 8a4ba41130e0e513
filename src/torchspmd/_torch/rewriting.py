"""Editing a captured graph: the collectives' operators, and fake values of new nodes."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from torchspmd._torch.operators import argument_names, packet_name, signature_of
from torchspmd._torch.regions import leaves_of, map_tree

_functional = torch.ops._c10d_functional
ALL_REDUCE = _functional.all_reduce.default
ALL_GATHER = _functional.all_gather_into_tensor.default
ALL_GATHER_OUT = _functional.all_gather_into_tensor_out.default
REDUCE_SCATTER = _functional.reduce_scatter_tensor.default
WAIT = _functional.wait_tensor.default


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

    Collectives are not called: whoever records communication would count them. The result
    is None for one whose shape is not known here.
    """
    options = options or {}
    own = _fake_mode_of(leaves_of(torch.Tensor, (args, options))) or _fake_mode_of(near)
    with torch.no_grad(), own or _mode_for_plain_tensors(), _failures_not_logged():
        if isinstance(target, OpOverload) and target.namespace == _FUNCTIONAL:
            made = _of_collective(target, args, options)
        else:
            if isinstance(target, OpOverload) and signature_of(target).written:
                # An operator that works in place may change the strides of its operand.
                args, options = map_tree(_detached, (args, options))
            made = target(*args, **options)
    return made if own else map_tree(_without_mode, made)


def _fake_mode_of(values: Iterable[Any]) -> Any:
    return next((each.fake_mode for each in values if hasattr(each, "fake_mode")), None)


@cache
def _mode_for_plain_tensors() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def _failures_not_logged() -> Iterator[None]:
    """A call that fails raises; torch's log says no more."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled


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
