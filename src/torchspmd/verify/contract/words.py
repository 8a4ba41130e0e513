"""From the words of a contract to claims; whatever has no meaning is refused."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torchspmd.comm import Kind, Phase
from torchspmd.errors import UsageError
from torchspmd.verify.contract.claim import (
    Bound,
    Claim,
    Expected,
    Part,
    whole,
)


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
    return Part(
        None,
        _names(where.get("axis")),
        phases,
        _names(where.get("dtype")),
        where.get("module"),
        bool(where.get("within", True)),
        where.get("implicit"),
    )


def _names(value: str | Iterable[str] | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = (value,) if isinstance(value, str) else tuple(value)
    return tuple(str(name).removeprefix("torch.") for name in names)


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
