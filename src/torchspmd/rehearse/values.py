"""What a script is told that reads a value which does not exist.

Logging needs a number, any number. A branch needs the right one: where it cannot be told,
the script is refused, with its line. Whether all or any of some values are true is answered
as for data without padding and healthy training, with a note.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from torchspmd import _torch
from torchspmd.comm import Kind
from torchspmd.errors import UsageError

__all__ = ["READS_VALUE", "NoValueError", "Values"]

READS_VALUE = frozenset({"aten._local_scalar_dense.default"})
_CONSTANTS = {"zeros": 0, "zero_": 0, "ones": 1, "ones_like": 1, "zeros_like": 0}
_FILLS = frozenset({*_CONSTANTS, "full", "full_like", "fill_"})
_TESTS = {
    "isnan": False,
    "isinf": False,
    "isfinite": True,
    "isneginf": False,
    "_is_all_true": True,  # torch's own checks, as of a distribution's arguments
}
# Of masks of padding, which all tokens pass, and of tests that training stops by.
_PLAUSIBLE_TRUTHS = {"all": True, "any": False}
# Operators that hand on what is known of a single value.
_HAND_ON = frozenset(
    "_to_copy copy_ clone view reshape detach any all alias squeeze unsqueeze".split()
)
_COMBINE: dict[str, Callable[[Iterable[object]], bool]] = {
    **dict.fromkeys(("mul", "bitwise_and", "logical_and"), all),
    **dict.fromkeys(("bitwise_or", "logical_or"), any),
}
_KEEP = frozenset({"_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_"})
_UNKNOWN = ("empty", "rand", "bernoulli", "multinomial", "geometric", "new_empty")


class NoValueError(UsageError):
    """A script branches on a value that does not exist."""


class Values:
    """Plausible values, and notes that they were given.

    Small integers are followed, and masks by infinity: positions, lengths and masks decide
    which way a model goes, and are made by the script itself or come from its data.

    Args:
        notes: Where notes go.
    """

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def note(self, text: str) -> None:
        """Write a note, once."""
        if text not in self._notes:
            self._notes.append(text)

    def after(
        self,
        func: Any,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        """Remember what an operator's result is, where that is certain."""
        base = name.split(".")[1]
        if base in _KEEP:
            return
        if not base.startswith(_UNKNOWN) and _follow(func, args, kwargs, result):
            return
        if base == "copy_" and (real := _torch.known_tensor(args[1])) is not None:
            _forget(result)
            real = real.to(result.dtype).expand(result.shape)
            _torch.set_known(result, real, in_place=True)
            return
        if not isinstance(result, torch.Tensor):
            return
        known = _known(base, args)
        if known is not None:
            result.known_value = known  # type: ignore[attr-defined]
            if base in _FILLS and _torch.may_follow(result):
                # A mask of ones like a tensor of which nothing else is known.
                assert isinstance(known, int | float), known
                real = torch.tensor(known, dtype=result.dtype).expand(result.shape)
                # Takes no memory.
                _torch.set_known(result, real, in_place=base.endswith("_"))
            return
        if hasattr(result, "known_value"):
            del result.known_value
        _guess(base, args, result)

    def after_collective(
        self,
        kind: Kind,
        reduction: str,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        num_ranks: int,
    ) -> None:
        """Remember what ranks receive that all have what this one has.

        Args:
            kind: Of the communication.
            reduction: As in ``sum``; empty where it cannot be told.
            sent: What this rank gives.
            received: What it is given, in part or whole the same tensors.
            num_ranks: How many communicate.
        """
        if kind in (Kind.ALL_GATHER, Kind.BROADCAST):
            factor = 1
        elif kind is Kind.ALL_REDUCE and reduction:
            factor = num_ranks if reduction == "sum" else 1
        else:
            factor = 0  # not told
        reals = [_known_values(each) if factor else None for each in sent]
        for place, tensor in enumerate(received):
            # Of each tensor one, or of one tensor all that were gathered.
            real = reals[place if len(sent) == len(received) else 0] if sent else None
            _forget(tensor)
            if real is None or not _torch.may_follow(tensor):
                continue
            count, rest = divmod(tensor.numel(), max(real.numel(), 1))
            if rest == 0 and count in (1, num_ranks):
                whole = (real * factor if factor > 1 else real).reshape(-1)
                whole = whole.repeat(count).reshape(tensor.shape).to(tensor.dtype)
                _torch.set_known(tensor, whole)

    def number(self, tensor: torch.Tensor, line: str) -> object:
        """What ``.item()`` gives."""
        known = getattr(tensor, "known_value", None)
        if known is not None:
            return float(known) if tensor.dtype.is_floating_point else known
        if (real := _torch.known_tensor(tensor)) is not None:
            return real.item()
        plausible = getattr(tensor, "plausible_truth", None)
        if plausible is None:
            plausible = _plausible(tensor.dtype)
        self.note(f"{line or 'the script'} reads a value: {plausible} was given.")
        return plausible

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a copy on the host is: real, where its values are known."""
        real = _known_values(tensor)
        return tensor if real is None else real.clone()

    def write(self, real: torch.Tensor, source: torch.Tensor, line: str) -> None:
        """Copy into a real tensor of the host what is known, or plausible."""
        known = _known_values(source)
        if known is None:
            plausible = _plausible(real.dtype)
            known = torch.full((), plausible, dtype=real.dtype)
            self.note(
                f"{line or 'the script'} copies values to the host: {plausible} was given "
                "for each."
            )
        with torch.no_grad():
            real.copy_(known)

    def array(self, call: str, tensor: torch.Tensor, line: str) -> object:
        """What ``.tolist()`` and ``.numpy()`` give."""
        if (real := _torch.known_tensor(tensor)) is not None:
            return real.tolist() if call == "tolist" else real.numpy()
        plausible = _plausible(tensor.dtype)
        self.note(
            f"{line or 'the script'} reads values: {plausible} was given for each."
        )
        real = torch.full(tuple(tensor.shape), plausible, dtype=tensor.dtype)
        return real.tolist() if call == "tolist" else real.numpy()

    def truth(self, tensor: torch.Tensor, line: str, *, by_torch: bool) -> bool:
        """What ``if tensor:`` gives.

        Args:
            tensor: The condition.
            line: The user's line.
            by_torch: Whether torch itself asks, as to draw again what is out of bounds.

        Raises:
            NoValueError: Nobody can tell.
        """
        known = getattr(tensor, "known_value", None)
        if known is None and (real := _torch.known_tensor(tensor)) is not None:
            known = bool(real)
        if known is not None:
            return bool(known)
        plausible = getattr(tensor, "plausible_truth", None)
        if plausible is not None:
            what = "all" if plausible else "any"
            self.note(
                f"{line or 'the script'} asks whether {what} of some values are true: "
                f"{plausible} was given."
            )
            return bool(plausible)
        if by_torch:
            return False
        raise NoValueError(
            f"{line or 'the script'} branches on a value that a rehearsal does not have. "
            "Take the branch that training takes most of the time without looking at the "
            "tensor, or put it behind an option that a rehearsal leaves out; "
            "isnan, isinf and isfinite are answered as for healthy training."
        )


def _known_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """All values of a small tensor, where they are known."""
    known = getattr(tensor, "known_value", None)
    if known is not None and _torch.may_follow(tensor):
        return torch.full(tuple(tensor.shape), known, dtype=tensor.dtype)
    return _torch.known_tensor(tensor)


def _forget(tensor: Any) -> None:
    for name in ("known_value", "known_tensor"):
        if hasattr(tensor, name):
            delattr(tensor, name)


def _guess(base: str, args: Sequence[Any], result: Any) -> None:
    """Remember what is plausible where nothing is known: that no token is padding."""
    if base in _PLAUSIBLE_TRUTHS:
        result.plausible_truth = _PLAUSIBLE_TRUTHS[base]
    elif base == "sum" and args[0].dtype == torch.bool and result.dim() == 0:
        result.plausible_count = args[0].numel()
    elif base == "eq" and isinstance(args[1], int) and args[1] == _count(args[0]):
        result.plausible_truth = True  # as many as there are: another way to say all


def _count(value: object) -> int | None:
    return getattr(value, "plausible_count", None)


def _known(base: str, args: Sequence[Any]) -> object:
    """The single value that an operator gives; None where it cannot be told."""
    if base in _TESTS:
        return _TESTS[base]
    if base in _CONSTANTS:
        return _CONSTANTS[base]
    if base in ("full", "full_like", "fill_", "scalar_tensor"):
        value = args[0] if base == "scalar_tensor" else args[1]
        return value if isinstance(value, int | float) else None
    if base in ("eq", "ne"):
        return _compared(base, *args)
    values = [getattr(each, "known_value", None) for each in args]
    if base in _HAND_ON and values:
        return values[1 if base == "copy_" else 0]
    if base in ("logical_not", "bitwise_not") and values[0] is not None:
        return not values[0]
    if base in _COMBINE and isinstance(values[0], bool) and isinstance(values[1], bool):
        return _COMBINE[base](values)
    return None


def _compared(base: str, one: object, other: object) -> bool | None:
    """Healthy numbers equal themselves, and not infinity: what isfinite is made of."""
    if one is other:
        return base == "eq"
    if isinstance(other, float) and math.isinf(other):
        return base == "ne"
    return None


def _follow(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> bool:
    """Compute an operator on small tensors, where all of its arguments are known."""
    results = result if isinstance(result, list | tuple) else (result,)
    if not all(isinstance(x, torch.Tensor) and _torch.may_follow(x) for x in results):
        return False
    reals = _torch.compute_known(func, args, kwargs)
    # An operator whose result's size depends on values was given all of them.
    if reals is None or [x.shape for x in reals] != [x.shape for x in results]:
        return False
    if not all(map(_torch.is_worth_following, reals)):
        return False
    for fake, real in zip(results, reals, strict=True):
        _torch.set_known(fake, real)
    return True


def _plausible(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point or dtype.is_complex else 1
