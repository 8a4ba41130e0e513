"""Values of tensors without memory, where they are known or assumed.

Positions, lengths, masks and counts decide which way a model goes, and are made by the
script itself or come from its data. Operators on them are computed on small tensors of the
host. What is assumed, such as which expert a token is sent to, is followed in the same way
and says what it rests on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

_MOST_BYTES = 8 << 20  # as of tensors of the host that are real
_CONVERT = torch.ops.aten._to_copy.default
_FEW = 1 << 12  # numbers that a script may read: rates of layers, schedules


class Known(NamedTuple):
    """Values.

    Attributes:
        real: On the host.
        why: What was assumed; empty where they are certain.
    """

    real: torch.Tensor
    why: str = ""


@dataclass(slots=True)
class _Memory:
    """What views share.

    Attributes:
        version: Up to which write their values hold; None: up to one that is under way,
            which autograd counts when it has returned, or not at all.
        why: What was assumed.
    """

    version: int | None
    why: str


def may_follow(tensor: torch.Tensor) -> bool:
    """Whether a tensor is small enough, and of real numbers."""
    return (
        tensor.numel() * tensor.element_size() <= _MOST_BYTES
        and tensor.layout is torch.strided
        and not tensor.dtype.is_complex
    )


def is_worth_following(real: torch.Tensor) -> bool:
    """Whether values may decide what a model does: few, integers, or masks by infinity."""
    if real.is_meta:
        return False
    if real.numel() <= _FEW or not real.dtype.is_floating_point:
        return True
    return bool(torch.isinf(real).any())


def set_known(
    tensor: Any, real: torch.Tensor, why: str = "", *, writes: bool = False
) -> None:
    """Attach values to a tensor without memory; they hold until it is written.

    Args:
        tensor: Without memory.
        real: Its values.
        why: What was assumed; empty where they are certain.
        writes: Whether an operator that is under way writes them.
    """
    _, memory = getattr(tensor, "known_tensor", (None, None))
    if not writes:
        tensor.known_tensor = (real, _Memory(_writes(tensor), why))
    elif memory is None or memory.version is not None:  # else views share them
        tensor.known_tensor = (real, _Memory(None, why))


def followed(tensor: Any) -> Known | None:
    """The values of a tensor without memory, where they are known or assumed."""
    real, memory = getattr(tensor, "known_tensor", (None, None))
    if real is None or memory is None:
        return None
    if memory.version is None:
        memory.version = _writes(tensor)
    if memory.version != _writes(tensor):
        return None
    return Known(real, memory.why)


def _writes(tensor: torch.Tensor) -> int:
    """How often it was written, itself or by another name of its memory."""
    if not tensor.is_inference():
        return tensor._version
    # torch counts none of what inference mode made: ``write_known`` does.
    return getattr(tensor.untyped_storage(), "torchspmd_writes", 0)


def forget_known(tensor: Any) -> None:
    """The values of a tensor, and of its views, hold no more."""
    if hasattr(tensor, "known_tensor"):
        tensor.known_tensor[1].version = -1


def hand_on_known(tensor: Any, other: Any) -> None:
    """Let another tensor have the same values."""
    if (known := followed(tensor)) is not None:
        set_known(other, known.real, known.why)


def share_known(tensor: Any, other: Any) -> None:
    """Another tensor has the memory of this one from now on, and no values of its own."""
    if hasattr(tensor, "known_tensor"):
        other.known_tensor = tensor.known_tensor
    elif hasattr(other, "known_tensor"):
        del other.known_tensor


def known_tensor(tensor: Any) -> torch.Tensor | None:
    """The values of a tensor without memory, where they are certain."""
    known = followed(tensor)
    return None if known is None or known.why else known.real


def follow_operator(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any]
) -> bool:
    """Give the results of an operator their values, where those of all arguments are known.

    Returns:
        Whether it did.
    """
    is_view = isinstance(func, OpOverload) and func.is_view
    if not is_view and not all(map(may_follow, results)):
        return func is _CONVERT and _follow_truths(args[0], results[0])
    found = compute_known(func, args, kwargs)
    # An operator whose result's size depends on values may have been given all of them.
    if found is None or [x.shape for x in found.real] != [x.shape for x in results]:
        return False
    if not all(map(is_worth_following, found.real)):
        return False
    for result, real in zip(results, found.real, strict=True):
        if func._schema.returns[0].alias_info is None:
            set_known(result, real, found.why)
        else:  # a view: a write into it is one into the other
            result.known_tensor = (real, args[0].known_tensor[1])
    return True


def _follow_truths(source: torch.Tensor, result: torch.Tensor) -> bool:
    """Truths that become numbers too large to follow: as numbers of one byte."""
    known = followed(source)
    if known is None or known.real.dtype != torch.bool:
        return False
    set_known(result, known.real.to(torch.int8), known.why)
    return True


class Computed(NamedTuple):
    """What an operator gives.

    Attributes:
        real: Its results, on the host; a truth of an operator that gives one.
        why: What was assumed; empty where they are certain.
    """

    real: Sequence[Any]
    why: str


def compute_known(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Computed | None:
    """What an operator gives for known values; None where one of them is not known."""
    if not isinstance(func, OpOverload) or func._schema.is_mutable:
        return None
    return _compute(func, args, kwargs)


def write_known(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    keeps: bool = False,
    forgets: bool = False,
) -> None:
    """An operator writes arguments: their values change with it, or hold no more.

    Args:
        func: Mutates some of its arguments.
        args: As it is called.
        kwargs: The same.
        keeps: Whether they are taken to be what they were.
        forgets: Whether nothing is known of them any more.
    """
    if not isinstance(func, OpOverload):
        return
    written: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written += value if isinstance(value, list | tuple) else [value]
    is_copy = func is torch.ops.aten.copy_.default
    if is_copy and not forgets and followed(args[0]) is None:
        _overwrite(args[0], followed(args[1]))
    else:
        known = [each for each in written if hasattr(each, "known_tensor")]
        found = None
        is_one = len(known) == 1 and not forgets
        if is_one and is_worth_following(known[0].known_tensor[0]):
            found = _compute(func, args, kwargs)
        for tensor in known:
            memory = tensor.known_tensor[1]
            holds = found is not None or (keeps and followed(tensor) is not None)
            memory.version = None if holds else -1  # of no tensor
            if found is not None:
                memory.why = found.why
    if torch.is_inference_mode_enabled():
        for tensor in written:
            if isinstance(tensor, torch.Tensor) and tensor.is_inference():
                storage: Any = tensor.untyped_storage()
                storage.torchspmd_writes = _writes(tensor) + 1


def _overwrite(tensor: torch.Tensor, source: Known | None) -> None:
    """All of a tensor is copied from another one, whatever was known of it."""
    if source is None or not may_follow(tensor):
        return
    real = source.real.to(tensor.dtype).expand(tensor.shape).clone()
    if is_worth_following(real):
        set_known(tensor, real, source.why, writes=True)


def _compute(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Computed | None:
    if torch.Tag.nondeterministic_seeded in func.tags:
        return None
    reasons: dict[str, None] = {}

    def real(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            known = followed(value)
            if known is None:
                raise KeyError
            if known.why:
                reasons[known.why] = None
            return known.real
        if isinstance(value, list | tuple):
            return type(value)(map(real, value))
        return torch.device("cpu") if isinstance(value, torch.device) else value

    try:
        result = func(
            *map(real, args), **{name: real(each) for name, each in kwargs.items()}
        )
    except Exception:  # not known, or no kernel of the host: then it has no values
        return None
    results = result if isinstance(result, list | tuple) else (result,)
    return Computed(results, "; ".join(reasons))
