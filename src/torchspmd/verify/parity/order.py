"""The place of each recorded value in the execution of a step."""

from collections.abc import Iterable

from torchspmd.verify.recording.files import Key, Kind
from torchspmd.verify.recording.names import module_of

_BACKWARD = (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)


def execution_order(keys: Iterable[Key]) -> dict[Key, float]:
    """A number for each value, smaller for what is computed earlier.

    Most are recorded when they are computed. Gradients of parameters are read before the
    update, but belong to the backward of their module; the loss is handed over last, but
    is there before backward begins.
    """
    orders: dict[Key, float] = {key: place for place, key in enumerate(keys)}
    arrived = {k.name: n for k, n in orders.items() if k.kind is Kind.GRAD_OUTPUT}
    first = min((n for k, n in orders.items() if k.kind in _BACKWARD), default=None)
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
