"""Passes of the trained model without gradients inside of a step: evaluation.

A script evaluates between two steps, in some of them. What it does there belongs to the
step that was rehearsed, and not to the others.
"""

from collections.abc import Sequence
from dataclasses import replace

from torchspmd.predict.program import Program
from torchspmd.rehearse.recording import Event, Mark, MarkKind, Op, Phase

__all__ = ["evaluated_places", "without_evaluation"]

_TRAINS = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE})


def evaluated_places(events: Sequence[Event], places: range) -> list[range]:
    """Places of evaluations, each from its first pass to the last."""
    found: list[range] = []
    begin: int | None = None
    goes_on = False  # whether nothing was trained since the last pass
    for place in places:
        event = events[place]
        if isinstance(event, Mark) and event.kind is MarkKind.EVALUATION_BEGIN:
            begin = place
        elif isinstance(event, Mark) and event.kind is MarkKind.EVALUATION_END:
            start = places.start if begin is None else begin
            if goes_on:
                start = found.pop().start
            found.append(range(start, place + 1))
            begin, goes_on = None, True
        elif begin is None and isinstance(event, Op) and event.site.phase in _TRAINS:
            goes_on = False
    return found


def without_evaluation(program: Program) -> Program | None:
    """The step without its evaluations; None where it has none."""
    events = program.recording.events
    places = range(program.start, len(events))
    ranges = evaluated_places(events, places)
    items = [
        item for item in program.items if not any(item.place in each for each in ranges)
    ]
    if len(items) == len(program.items):
        return None
    costs = {
        place: cost
        for place, cost in program.costs.items()
        if not any(place in each for each in ranges)
    }
    return replace(program, items=items, costs=costs)
