"""Whether two values have the same bits, and by how much they differ: never the values."""

import ctypes
import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(value: Any) -> str:
    """A text that is equal for values with equal bits, shape and dtype.

    >>> digest(torch.zeros(2)) == digest(torch.zeros(2)), digest(torch.zeros(1) * -1)[:10]
    (True, 'float32[1]')
    >>> digest(torch.tensor(0.0)) == digest(torch.tensor(-0.0))
    False
    """
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(map(digest, value)) + ")"
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value!r}"
    data = value.detach().contiguous().cpu()
    size = data.numel() * data.element_size()
    # The bytes where they lie: a copy, or numpy, is not needed.
    memory = (ctypes.c_char * size).from_address(data.data_ptr()) if size else b""
    bits = hashlib.blake2b(memory, digest_size=16).hexdigest()
    return f"{describe_type(value)} {bits}"


def describe_type(value: Any) -> str:
    """As in ``float32[2, 3]``."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def is_vacuous(value: Any) -> bool:
    """Whether a tensor could hide a mistake: all NaN, or all zero.

    >>> [is_vacuous(v) for v in (torch.zeros(2), torch.ones(2), torch.zeros(0), 0)]
    [True, False, False, False]
    """
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return False
    return bool((value == 0).all()) or bool(torch.isnan(value).all())


@dataclass(frozen=True, slots=True)
class Difference:
    """How two values of one node differ.

    Attributes:
        before: Shape, dtype, minimum, maximum and mean of the first.
        after: The same of the second.
        share: The part of the elements that have other bits; 1 for other shapes.
        ulp: The largest distance in units of the last place; None where that means
            nothing.
    """

    before: str
    after: str
    share: float
    ulp: int | None

    def __str__(self) -> str:
        """Three lines."""
        far = "" if self.ulp is None else f", at most {self.ulp} ulp apart"
        return (
            f"before: {self.before}\nafter:  {self.after}\n"
            f"{self.share:.2%} of the elements differ{far}"
        )


def find_difference(before: Any, after: Any) -> Difference:
    """Describe how two values differ.

    >>> one = torch.ones(4)
    >>> other = one.clone()
    >>> other[0] = torch.nextafter(one[0], torch.tensor(2.0))
    >>> print(find_difference(one, other))
    before: float32[4], min 1, max 1, mean 1
    after:  float32[4], min 1, max 1, mean 1
    25.00% of the elements differ, at most 1 ulp apart
    """
    before, after = _first_unequal(before, after)
    facts = _summary(before), _summary(after)
    if not _comparable(before, after):
        return Difference(*facts, 1.0, None)
    kind = _INTEGERS[before.element_size()]
    bits = [value.contiguous().reshape(-1).view(kind) for value in (before, after)]
    share = float((bits[0] != bits[1]).double().mean())
    ulp = _ulp(bits[0], bits[1]) if before.is_floating_point() else None
    return Difference(*facts, share, ulp)


def gap_between(before: Any, after: Any) -> float:
    """The largest distance of two elements, as a part of the largest one.

    Infinite where that means nothing: other shapes, integers that differ, NaN in one.

    >>> gap_between(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 3.0]))
    0.25
    """
    if isinstance(before, (list, tuple)) and isinstance(after, (list, tuple)):
        pairs = zip(before, after, strict=False)
        return max((gap_between(*pair) for pair in pairs), default=0.0)
    if digest(before) == digest(after):
        return 0.0
    if not _comparable(before, after) or not before.is_floating_point():
        return math.inf
    one, other = before.double(), after.double()
    if not torch.equal(one.isfinite(), other.isfinite()):
        return math.inf
    keep = one.isfinite()
    apart = torch.where(keep, (one - other).abs(), 0.0).max()
    largest = torch.where(keep, one.abs(), 0.0).max()
    return float(apart / largest) if largest else math.inf


def _first_unequal(before: Any, after: Any) -> tuple[Any, Any]:
    """Of two lists, the first items that differ."""
    are_lists = isinstance(before, (list, tuple)) and isinstance(after, (list, tuple))
    if not are_lists:
        return before, after
    for one, other in zip(before, after, strict=False):
        if digest(one) != digest(other):
            return _first_unequal(one, other)
    return None, None


def _comparable(before: Any, after: Any) -> bool:
    return (
        isinstance(before, torch.Tensor)
        and isinstance(after, torch.Tensor)
        and before.shape == after.shape
        and before.dtype == after.dtype
        and before.element_size() in _INTEGERS
        and before.numel() > 0
    )


def _ulp(left: torch.Tensor, right: torch.Tensor) -> int:
    """The largest distance of two floats, counted in floats between them."""
    lowest = torch.iinfo(left.dtype).min
    # Bits of negative floats fall where the floats rise: mirrored, all rise.
    one, other = (
        torch.where(bits < 0, lowest - bits.long(), bits.long())
        for bits in (left, right)
    )
    same_side = (one < 0) == (other < 0)
    near = torch.where(same_side, one - other, 0).abs().max()
    # Across zero the distance of two doubles may be too long for an integer.
    far = torch.where(same_side, 0.0, one.double().abs() + other.double().abs()).max()
    return max(int(near), int(far))


def _summary(value: Any) -> str:
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return describe_type(value)
    if value.is_complex() or value.dtype is torch.bool:
        return describe_type(value)
    wide = value.double()
    text = f"min {wide.min():.6g}, max {wide.max():.6g}, mean {wide.mean():.6g}"
    num_nan = int(torch.isnan(wide).sum())
    return f"{describe_type(value)}, {text}" + (f", {num_nan} NaN" if num_nan else "")
