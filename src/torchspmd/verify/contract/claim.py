"""What is expected, as values: bounds, and claims about a part of a ledger."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from torchspmd.comm import Key, Kind, Phase, Total
from torchspmd.errors import UsageError

# ----------------------------------------------------------------------------
# Names of modules: patterns that match them, and the order of their numbers.


def matches(module: str, pattern: str, *, within: bool) -> bool:
    """Whether a module path fits a pattern; ``*`` stands for one part of the path.

    The root module's class may be left out: ``layers.*.mlp`` fits ``GPT.layers.0.mlp``.

    >>> matches("GPT.layers.0.mlp.down", "layers.*.mlp", within=True)
    True
    >>> matches("GPT.layers.0.mlp.down", "layers.*.mlp", within=False)
    False
    """
    wanted, parts = pattern.split("."), module.split(".")
    return _fits(parts, wanted, within) or _fits(parts[1:], wanted, within)


def _fits(parts: list[str], wanted: list[str], within: bool) -> bool:
    if len(parts) < len(wanted) or (not within and len(parts) != len(wanted)):
        return False
    return all(want in ("*", part) for part, want in zip(parts, wanted, strict=False))


def natural(path: str) -> tuple[tuple[int, str], ...]:
    """A key that sorts numbered parts as numbers: ``layers.2`` before ``layers.10``."""
    return tuple((_leading_number(part), part) for part in path.split("."))


def _leading_number(part: str) -> int:
    digits = re.match(r"\[?(\d+)", part)
    return int(digits[1]) if digits else -1


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
    """A lower bound, for ``expect(ledger).count(all_gather=at_least(1))``.

    >>> print(at_least(1))
    at least 1
    """
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
    """A selection of a ledger's rows: those that fit every field that is not None."""

    kind: str | None = None
    axis: tuple[str, ...] | None = None
    phase: tuple[str, ...] | None = None
    dtype: tuple[str, ...] | None = None
    module: str | None = None
    within: bool = True
    implicit: bool | None = None

    def holds(self, key: Key) -> bool:
        """Whether a row of a ledger belongs to it."""
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

    @property
    def says_nothing_is_sent(self) -> bool:
        """Whether it is zero for everything together."""
        return self.part == Part() and self.bound.high == 0

    def read(self, rows: Iterable[tuple[Key, Total]]) -> int:
        """The number that was recorded."""
        return sum(
            getattr(total, self.measure) for key, total in rows if self.part.holds(key)
        )


# ----------------------------------------------------------------------------
# From the words of a contract to claims; whatever has no meaning is refused.


def read_claims(
    measure: str, total: Expected | None, words: dict[str, Any], model: object
) -> list[Claim]:
    """The claims in one call: one for each kind, one for all kinds together."""
    kinds = {word: words[word] for word in words if word in list(Kind)}
    where = {word: value for word, value in words.items() if word not in kinds}
    part = _read_part(measure, where)
    wanted: list[tuple[str | None, Expected]] = [*kinds.items()]
    if total is not None:
        wanted.insert(0, (None, total))
    claims = []
    for kind, value in wanted:
        bound = _as_bound(value, f"{measure} of {kind or 'all kinds'}", model)
        claims.append(Claim(measure, replace(part, kind=kind), bound))
    if not claims:
        raise UsageError(
            f"expect().{measure}() says no number: give one for all kinds, "
            f"{measure}(0), or one for a kind, {measure}(all_reduce=8)."
        )
    return claims


def _read_part(measure: str, where: dict[str, Any]) -> Part:
    known = ("axis", "phase", "dtype", "module", "within", "implicit")
    unknown = sorted(set(where) - set(known))
    if unknown:
        raise UsageError(
            f"expect().{measure}(): {', '.join(unknown)} is neither a kind "
            f"({', '.join(Kind)}) nor one of {', '.join(known)}."
        )
    phases = _names(where.get("phase"))
    wrong = [phase for phase in phases or () if phase not in list(Phase)]
    if wrong:
        raise UsageError(
            f"expect().{measure}(): {wrong[0]!r} is no phase; choose among "
            f"{', '.join(Phase)}."
        )
    dtypes = _names(where.get("dtype"))
    unknown = [name for name in dtypes or () if not _is_dtype(name)]
    if unknown:
        raise UsageError(
            f"expect().{measure}(): {unknown[0]!r} is no dtype of torch; give one such as "
            "torch.float32, or its name, 'float32' ('mixed' for several at once)."
        )
    return Part(
        None,
        _names(where.get("axis")),
        phases,
        dtypes,
        where.get("module"),
        bool(where.get("within", True)),
        where.get("implicit"),
    )


def _names(value: Any) -> tuple[str, ...] | None:
    """One name or several; a dtype may stand for its name."""
    if value is None:
        return None
    names = (value,) if isinstance(value, (str, torch.dtype)) else tuple(value)
    return tuple(str(name).removeprefix("torch.") for name in names)


def _is_dtype(name: str) -> bool:
    """Whether an event can have it; ``none`` and ``mixed`` are of no and of any tensors."""
    return name in ("none", "mixed") or isinstance(
        getattr(torch, name, None), torch.dtype
    )


def _as_bound(value: Expected, what: str, model: object) -> Bound:
    if callable(value):
        if model is None:
            raise UsageError(
                f"{what} is a function of the model: give the model, as in "
                "expect(ledger, model=model)."
            )
        value = value(model)
    if isinstance(value, Bound):
        return value
    number = whole(value, what)
    return Bound(number, number)
