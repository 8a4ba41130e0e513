"""Where a difference begins: the first one in execution order that nothing puts right."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from torchspmd.verify.parity.match import Match
from torchspmd.verify.recording.files import Key, Kind
from torchspmd.verify.recording.names import module_of

_FORWARD = (Kind.INPUT, Kind.FORWARD)
_INSIDE = (*_FORWARD, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)
_NOISE = 0.1  # of the largest difference of an activation
_MOST = 0.8  # of all parameters: then it is not one module's fault


class Status(Enum):
    """What came out of one comparison."""

    AGREES = "agrees"
    DIFFERS = "differs"
    UNKNOWN = "unknown"  # the shapes allow no comparison


@dataclass(frozen=True, slots=True)
class Result:
    """One compared value."""

    key: Key
    order: float
    status: Status
    relative: float = 0.0
    allowed: float = 0.0
    match: Match | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Beginning:
    """The first difference and the place to look at."""

    result: Result
    place: str


def choose_first(
    results: Sequence[Result], *, is_later: bool = False
) -> Beginning | None:
    """The difference that the others follow from.

    In a later step, small differences of activations are left out beside large ones:
    rounding of earlier updates has come in.
    """
    ordered = sorted(results, key=lambda result: result.order)
    wrong = [
        result
        for result in ordered
        if result.status is Status.DIFFERS and not _is_put_right(result, ordered)
    ]
    if is_later:
        inside = [r.relative for r in wrong if r.key.kind in _INSIDE]
        floor = _NOISE * max((n for n in inside if n < math.inf), default=0.0)
        wrong = [r for r in wrong if r.key.kind not in _INSIDE or r.relative >= floor]
    if not wrong:
        return None
    first = wrong[0]
    place = None
    if not any(result.key.kind in _INSIDE for result in wrong):
        place = _common_place(first, ordered)
    if first.key.kind is Kind.GRAD_OUTPUT:
        place = _where_it_arrived(first, ordered)
    return Beginning(first, place or place_of(first.key))


def _where_it_arrived(first: Result, ordered: Sequence[Result]) -> str:
    """A gradient arrives wrong at a module: what went wrong is after it.

    One tensor may be the output of a module, of the one around it, and so on; hooks of
    the innermost run first.
    """
    backward = [
        result
        for result in ordered
        if result.key.kind in (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)
        and result.status is not Status.UNKNOWN
    ]
    place = backward.index(first)
    is_beginning = place == 0
    name = first.key.name
    for result in backward[place + 1 :]:
        is_around = not result.key.name or name.startswith(f"{result.key.name}.")
        if result.key.kind is not Kind.GRAD_OUTPUT or not is_around:
            break
        if result.status is Status.AGREES:
            break
        name = result.key.name
    if is_beginning or not name:
        return "(loss)"
    return f"{module_of(name) or '(model)'}, after {name}"


def _is_put_right(result: Result, ordered: Sequence[Result]) -> bool:
    """Whether a module around it gives the right value: then it was a term or a part.

    A layer inside a parallel layer of the user's own may well hold partial sums.
    """
    kind, name = result.key.kind, result.key.name
    if kind not in _INSIDE:
        return False
    wanted = Kind.FORWARD if kind in _FORWARD else Kind.GRAD_INPUT
    while name:
        name = module_of(name)
        later = (
            other
            for other in ordered
            if other.order > result.order and other.key[:2] == (wanted, name)
        )
        around = next(later, None)
        if around is not None and around.status is Status.AGREES:
            return True
    return False


def _common_place(first: Result, ordered: Sequence[Result]) -> str | None:
    """A place for a difference that nearly all parameters share."""
    kind = first.key.kind
    if kind not in (Kind.GRADIENT, Kind.PARAMETER, Kind.STATE):
        return None
    same = [result for result in ordered if result.key.kind is kind]
    wrong = [result for result in same if result.status is Status.DIFFERS]
    modules = {module_of(result.key.name) for result in wrong}
    if len(modules) < 2 or len(wrong) < _MOST * len(same):
        return None
    return "(all parameters)" if kind is Kind.GRADIENT else "(optimizer)"


def place_of(key: Key) -> str:
    """The module that a value belongs to, or a word in brackets.

    >>> place_of(Key(Kind.GRADIENT, "layers.0.up.weight"))
    'layers.0.up'
    """
    kind, name = key.kind, key.name
    if kind is Kind.LOSS or (kind is Kind.GRAD_OUTPUT and not name):
        return "(loss)"
    if kind is Kind.OUTPUT:
        return "(outputs of the step)"
    if kind is Kind.INPUT:
        # Computed between modules, in the code of the one around.
        around = module_of(name) or "(model)"
        return f"{around}, before {name}" if name else "(batch)"
    if kind is Kind.STATE:
        name = module_of(name)
    if kind in (Kind.GRADIENT, Kind.PARAMETER, Kind.BUFFER, Kind.STATE):
        name = module_of(name)
    return name or "(model)"
