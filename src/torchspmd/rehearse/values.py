"""What a script is told that reads a value which does not exist.

Logging needs a number, any number. A branch needs the right one: where it cannot be told,
the script is refused, with its line. Whether all or any of some values are true is answered
as for data without padding and healthy training, with a note; so is what follows from
assumed values (``assumed.py``).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from torchspmd import _torch
from torchspmd.errors import UsageError
from torchspmd.rehearse.assumed import assume

__all__ = ["KEEPS_VALUES", "READS_VALUE", "NoValueError", "Values"]

# The second in inference mode, where operators come as they are called.
READS_VALUE = frozenset({"aten._local_scalar_dense.default", "aten.item.default"})
# Write what healthy training does not change.
KEEPS_VALUES = frozenset(
    {
        "aten._amp_foreach_non_finite_check_and_unscale_.default",
        "aten._amp_update_scale_.default",
    }
)
_CONSTANTS = {
    **dict.fromkeys(("zeros", "zero_", "zeros_like", "new_zeros"), 0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), 1),
}
# And which of their arguments is the value.
_VALUED = {"scalar_tensor": 0, "full": 1, "full_like": 1, "fill_": 1, "new_full": 2}
_FILLS = frozenset({*_CONSTANTS, *_VALUED})
_TESTS = {
    "isnan": False,
    "isinf": False,
    "isfinite": True,
    "isneginf": False,
    "_is_all_true": True,  # torch's own checks, as of a distribution's arguments
}
# Of masks of padding, which all tokens pass, and of tests that training stops by.
_PLAUSIBLE_TRUTHS = {"all": True, "any": False}
# Of unknown numbers, such as a norm that something is divided by and zero.
_EQUALITIES = {"eq": False, "ne": True}
# Operators that hand on what is known of a single value.
_HAND_ON = frozenset(
    "_to_copy copy_ clone view reshape detach any all alias squeeze unsqueeze".split()
)
_COMBINE: dict[str, Callable[[Iterable[object]], bool]] = {
    **dict.fromkeys(("mul", "bitwise_and", "logical_and"), all),
    **dict.fromkeys(("bitwise_or", "logical_or"), any),
}
_TORCHS = frozenset({"aten", "prims"})
_UNKNOWN = ("empty", "rand", "bernoulli", "multinomial", "geometric", "new_empty")


class NoValueError(UsageError):
    """A script branches on a value that does not exist."""


class Values:
    """Plausible values, and notes that they were given.

    Integers are followed, masks by infinity, and a few numbers of any type: positions,
    lengths, masks and rates decide what a model does, and are made by the script itself or
    come from its data.

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
        if name in KEEPS_VALUES:
            return
        space, base = name.split(".")[:2]
        results = result if isinstance(result, list | tuple) else (result,)
        if not all(isinstance(each, torch.Tensor) for each in results):
            return
        if not base.startswith(_UNKNOWN):
            if _torch.follow_operator(func, args, kwargs, results):
                return
        if space not in _TORCHS:  # whatever it is called, it may do something else
            return
        if isinstance(result, torch.Tensor):
            _remember(base, args, result)
        assume(func, base, args, kwargs, result)

    def number(
        self, tensor: torch.Tensor, line: str, *, by_torch: bool = False
    ) -> object:
        """What ``.item()`` gives; that torch itself asks, to draw again, is not noted."""
        if (followed := _torch.followed(tensor)) is not None:
            value: object = followed.real.item()
            if followed.why:
                self.note(f"{line or 'the script'} reads {value}: {followed.why}.")
            return value
        known = getattr(tensor, "known_value", None)
        if known is not None:
            return float(known) if tensor.dtype.is_floating_point else known
        plausible = getattr(tensor, "plausible_truth", None)
        if plausible is None:
            plausible = _plausible(tensor.dtype)
        if not by_torch:
            self.note(f"{line or 'the script'} reads a value: {plausible} was given.")
        return plausible

    def on_host(
        self, tensor: torch.Tensor, line: str, *, by_torch: bool
    ) -> torch.Tensor:
        """What a copy on the host is: real, where its values are known or assumed."""
        if _torch.followed(tensor) is None:
            return tensor
        return self._read(tensor, line, noted=not by_torch).clone()

    def array(self, call: str, tensor: torch.Tensor, line: str) -> object:
        """What ``.tolist()`` and ``.numpy()`` give."""
        real = self._read(tensor, line)
        return real.tolist() if call == "tolist" else real.clone().numpy()

    def fill(
        self, host: torch.Tensor, tensor: torch.Tensor, line: str, *, by_torch: bool
    ) -> None:
        """Write into a tensor of the host what whoever reads another one is told.

        Args:
            host: Takes the values.
            tensor: On the device.
            line: The user's line.
            by_torch: Whether torch itself copies, as what it offloads: that is not noted.
        """
        host.copy_(self._read(tensor, line, noted=not by_torch))

    def _read(
        self, tensor: torch.Tensor, line: str, *, noted: bool = True
    ) -> torch.Tensor:
        followed = _torch.followed(tensor)
        plausible = _plausible(tensor.dtype)
        why = f"{plausible} was given for each" if followed is None else followed.why
        if why and noted:
            self.note(f"{line or 'the script'} reads values: {why}.")
        if followed is not None:
            return followed.real
        value = torch.tensor(plausible, dtype=tensor.dtype)
        return value.expand(tuple(tensor.shape)).contiguous()

    def truth(
        self,
        tensor: torch.Tensor,
        line: str,
        *,
        by_torch: bool,
        by_optimizer: bool = False,
    ) -> bool:
        """What ``if tensor:`` gives.

        Args:
            tensor: The condition.
            line: The user's line.
            by_torch: Whether torch itself asks, as to draw again what is out of bounds.
            by_optimizer: Whether it is an optimizer of torch's, as LBFGS does.

        Raises:
            NoValueError: Nobody can tell.
        """
        if (followed := _torch.followed(tensor)) is not None:
            is_true = bool(followed.real)
            if followed.why:
                self.note(
                    f"{line or 'the script'} branches on a value: {is_true} was given, as "
                    f"{followed.why}."
                )
            return is_true
        known = getattr(tensor, "known_value", None)
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
        differs = getattr(tensor, "differs", None)
        if differs is not None:
            self.note(
                f"{line or 'the script'} asks whether unknown numbers are equal: they were "
                "taken to differ."
            )
            return bool(differs)
        if by_torch:
            if by_optimizer:
                self.note(
                    f"{line or 'the script'}: its optimizer branches on values, which a "
                    "rehearsal does not have, such as whether it has converged or how long "
                    "a step should be. False was given to each, so iterations inside of a "
                    "step, and what they keep, may be far fewer than on a GPU."
                )
            return False
        raise NoValueError(
            f"{line or 'the script'} branches on a value that a rehearsal does not have. "
            "Take the branch that training takes most of the time without looking at the "
            "tensor, or put it behind an option that a rehearsal leaves out; "
            "isnan, isinf and isfinite are answered as for healthy training."
        )


def _known(base: str, args: Sequence[Any]) -> object:
    """The single value that an operator gives; None where it cannot be told."""
    if base in _TESTS:
        return _TESTS[base]
    if base in _CONSTANTS:
        return _CONSTANTS[base]
    if base in _VALUED:
        value = args[_VALUED[base]]
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


def _remember(base: str, args: Sequence[Any], result: Any) -> None:
    """The single value of a tensor, where there is one."""
    known = _known(base, args)
    if known is None:
        _forget(result)
        if base in _PLAUSIBLE_TRUTHS:
            result.plausible_truth = _PLAUSIBLE_TRUTHS[base]
        elif base in _EQUALITIES and args[0].dtype.is_floating_point:
            result.differs = _EQUALITIES[base]
        return
    result.known_value = known
    if base in _FILLS:
        assert isinstance(known, int | float), known
        _fill(result, known, writes=base.endswith("_"))


def _fill(tensor: torch.Tensor, value: float, *, writes: bool) -> None:
    """As of a mask of ones like a tensor of which nothing else is known."""
    if not _torch.may_follow(tensor):
        return
    real = torch.tensor(value, dtype=tensor.dtype).expand(tensor.shape)
    if _torch.is_worth_following(real):
        real = real.contiguous()  # can be written; else takes no memory
    _torch.set_known(tensor, real, writes=writes)


def _forget(tensor: torch.Tensor) -> None:
    """What was known of a tensor before it was written."""
    for name in ("known_value", "is_uniform", "differs"):
        if hasattr(tensor, name):
            delattr(tensor, name)


def _compared(base: str, one: object, other: object) -> bool | None:
    """Healthy numbers equal themselves, and not infinity: what isfinite is made of."""
    if one is other:
        return base == "eq"
    if isinstance(other, float) and math.isinf(other):
        return base == "ne"
    return None


def _plausible(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point or dtype.is_complex else 1
