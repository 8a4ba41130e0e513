"""Where a difference begins: the first in execution order that no later value corrects."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from torchspmd.verify.parity.match import Match
from torchspmd.verify.recording.files import Key, Kind, module_of

_FORWARD = (Kind.INPUT, Kind.FORWARD)
BACKWARD = (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)
INSIDE = (*_FORWARD, *BACKWARD)
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


def choose_first(
    results: Sequence[Result], *, is_later: bool = False
) -> tuple[Result, str] | None:
    """The difference that the others follow from, and the place to look at.

    In a later step, small differences of activations are left out beside large ones:
    rounding of earlier updates has come in.
    """
    ordered = sorted(results, key=lambda result: result.order)
    wrong = [
        result
        for result in ordered
        if result.status is Status.DIFFERS and not _is_corrected(result, ordered)
    ]
    if is_later:
        inside = [r.relative for r in wrong if r.key.kind in INSIDE]
        floor = _NOISE * max((n for n in inside if n < math.inf), default=0.0)
        wrong = [r for r in wrong if r.key.kind not in INSIDE or r.relative >= floor]
    if not wrong:
        return None
    first = wrong[0]
    place = None
    if not any(result.key.kind in INSIDE for result in wrong):
        place = _common_place(first, ordered)
    if first.key.kind is Kind.GRAD_OUTPUT:
        place = _where_it_arrived(first, ordered)
    return first, place or place_of(first.key)


def _where_it_arrived(first: Result, ordered: Sequence[Result]) -> str:
    """A gradient arrives wrong at a module: what went wrong is after it.

    One tensor may be the output of a module, of the one around it, and so on; hooks of
    the innermost run first.
    """
    backward = [
        result
        for result in ordered
        if result.key.kind in BACKWARD and result.status is not Status.UNKNOWN
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


def _is_corrected(result: Result, ordered: Sequence[Result]) -> bool:
    """Whether a module around it gives the right value: then it was partial or a shard.

    A layer inside a parallel layer of the user's own may well hold partial sums.
    """
    kind, name = result.key.kind, result.key.name
    if kind not in INSIDE:
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


# ----------------------------------------------------------------------------
# The place of each recorded value in the execution of a step.


def execution_order(keys: Iterable[Key]) -> dict[Key, float]:
    """A number for each value, smaller for what is computed earlier.

    Most are recorded when they are computed. Gradients of parameters are read before the
    update, but belong to the backward of their module; the loss is handed over last, but
    is there before backward begins.
    """
    orders: dict[Key, float] = {key: place for place, key in enumerate(keys)}
    arrived = {k.name: n for k, n in orders.items() if k.kind is Kind.GRAD_OUTPUT}
    first = min((n for k, n in orders.items() if k.kind in BACKWARD), default=None)
    moved: dict[Key, float] = {}
    for key in orders:
        if key.kind is Kind.GRADIENT:
            module = _nearest(module_of(key.name), arrived)
            if module in arrived:
                moved[key] = arrived[module] + 0.5
        elif key.kind is Kind.LOSS and first is not None:
            moved[key] = first - 0.5
    return orders | moved


def _nearest(module: str, known: dict[str, float]) -> str:
    """The module itself, or the nearest one around it whose backward was seen."""
    while module and module not in known:
        module = module_of(module)
    return module
