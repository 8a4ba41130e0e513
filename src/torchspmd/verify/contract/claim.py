"""What is expected, as values: bounds, and claims about a part of a ledger."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torchspmd.comm import Key, Total
from torchspmd.errors import UsageError
from torchspmd.verify.contract.layers import matches


@dataclass(frozen=True, slots=True)
class Bound:
    """The numbers that are accepted; None for no limit."""

    low: int | None
    high: int | None

    def __contains__(self, number: int) -> bool:
        return (self.low is None or number >= self.low) and (
            self.high is None or number <= self.high
        )

    def __str__(self) -> str:
        if self.low == self.high:
            return str(self.low)
        if self.low is None:
            return f"at most {self.high}"
        return (
            f"at least {self.low}"
            if self.high is None
            else f"{self.low} to {self.high}"
        )


# A number, a bound, or a function of the model that gives one of them.
Expected: TypeAlias = int | float | Bound | Callable[[Any], Any]


def at_most(number: float) -> Bound:
    """An upper bound, for ``expect(ledger).count(all_reduce=at_most(8))``.

    >>> print(at_most(8))
    at most 8
    """
    return Bound(None, whole(number, "at_most"))


def at_least(number: float) -> Bound:
    """A lower bound, for ``expect(ledger).count(all_gather=at_least(1))``."""
    return Bound(whole(number, "at_least"), None)


def whole(value: object, what: str) -> int:
    """A whole number that is not negative, or an error that says what it was for."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(
            f"{what}: {value!r} is not a number; give a whole number, at_most(...), "
            "at_least(...) or a function of the model."
        )
    if value < 0 or value != int(value):
        raise UsageError(f"{what}: {value!r} is not a whole number from 0 on.")
    return int(value)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a ledger: what lies in it is what fits every field that is not None."""

    kind: str | None = None
    axis: tuple[str, ...] | None = None
    phase: tuple[str, ...] | None = None
    dtype: tuple[str, ...] | None = None
    module: str | None = None
    within: bool = True
    implicit: bool | None = None

    def holds(self, key: Key) -> bool:
        """Whether a row of a ledger lies in it."""
        return (
            (self.kind is None or key.kind == self.kind)
            and (self.axis is None or key.axis in self.axis)
            and (self.phase is None or key.phase in self.phase)
            and (self.dtype is None or key.dtype in self.dtype)
            and (self.implicit is None or key.implicit is self.implicit)
            and (
                self.module is None
                or matches(key.module, self.module, within=self.within)
            )
        )

    def __str__(self) -> str:
        words = [self.kind or "communication"]
        if self.implicit is not None:
            words.insert(0, "implicit" if self.implicit else "explicit")
        for names, before in (
            (self.dtype, "of"),
            (self.axis, "over"),
            (self.phase, "in"),
        ):
            if names is not None:
                words += [before, " or ".join(names)]
        if self.module is not None:
            words += ["of" if self.within else "of itself", self.module]
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Claim:
    """A measure (``count``, ``payload_bytes``, ``wire_bytes``) of a part, and its bound."""

    measure: str
    part: Part
    bound: Bound

    def read(self, rows: Iterable[tuple[Key, Total]]) -> int:
        """The number that came."""
        return sum(
            getattr(total, self.measure) for key, total in rows if self.part.holds(key)
        )
