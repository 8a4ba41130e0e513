"""A steady step as a program for the simulated clock: each event with its price."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torchspmd.predict.collectives import price_comm
from torchspmd.predict.compiled_regions import (
    price_captured,
    price_regions,
    tensors_taken,
    with_compiled_backward,
)
from torchspmd.predict.host import HostModel
from torchspmd.predict.operators import Cost, Pricer
from torchspmd.predict.timeline import Item, Kind, mark_places
from torchspmd.rehearse.recording import (
    Comm,
    Event,
    Mark,
    MarkKind,
    Op,
    Recording,
    Synchronize,
)

__all__ = ["Program", "price_step"]

_OF_GRAPHS = frozenset({"graph", "replay"})  # CUDA graphs: kernels follow at once
_WARMS_UP = (
    "The step that is predicted captured a CUDA graph, ran on a side stream as before a "
    "capture, or is one of the first two of DistributedDataParallel(static_graph=True), "
    "which has no buckets yet: it is no steady one. Let the script make more steps, and go "
    "on to those behind with --skip."
)


@dataclass(slots=True)
class Program:
    """One steady step of one rank.

    Attributes:
        recording: It was taken from.
        items: In program order.
        costs: Of operators, by their place in the recording.
        start: Place of the first event.
        notes: What was assumed.
    """

    recording: Recording
    items: list[Item] = field(default_factory=list)
    costs: dict[int, Cost] = field(default_factory=dict)
    start: int = 0
    notes: list[str] = field(default_factory=list)


def steady_events(recording: Recording) -> tuple[range, list[str]]:
    """Places of the events between the last two steps' ends; and what was assumed."""
    ends = mark_places(recording.events, MarkKind.STEP_END)
    if len(ends) > 1:
        warms_up = [_WARMS_UP] if recording.warms_up else []
        return range(ends[-2] + 1, ends[-1] + 1), warms_up
    if not ends:
        return range(0), ["The script made no optimizer step: no time is predicted."]
    begins = mark_places(recording.events, MarkKind.STEP_BEGIN)
    note = (
        "Only one step was rehearsed: it stands for a steady one, although optimizers "
        "make their state in it. Rehearse two steps or more."
    )
    return range(begins[0] if begins else 0, ends[0] + 1), [note]


def price_step(
    recording: Recording,
    pricer: Pricer,
    *,
    fuse_all: bool = False,
    keep: Callable[[Event], bool] = lambda event: True,
) -> Program:
    """The steady step of a recording, priced.

    Args:
        recording: Of one rank.
        pricer: For the GPU.
        fuse_all: As if forward and backward were one ``torch.compile`` region.
        keep: Which events are there at all, to ask what would be without some.
    """
    places, notes = steady_events(recording)
    program = Program(recording, start=places.start, notes=notes)
    events = recording.events
    if fuse_all:
        events = [_in_region(event) for event in events]
    _price(program, events, places, pricer, keep)
    return program


def price_events(recording: Recording, pricer: Pricer, places: range) -> Program:
    """Any part of a recording, priced."""
    program = Program(recording)
    _price(program, recording.events, places, pricer, lambda event: True)
    return program


def _price(
    program: Program,
    events: list[Event],
    places: range,
    pricer: Pricer,
    keep: Callable[[Event], bool],
) -> None:
    recording = program.recording
    captured = price_captured(events, places, recording, pricer)
    events = with_compiled_backward(events, places)
    host = HostModel(pricer.figures, tensors_taken(events))
    fused = price_regions(events, places, recording, pricer)
    is_captured = is_replayed = False
    for place in places:
        event = events[place]
        if not keep(event):
            continue
        match event:
            case Mark(kind=MarkKind.CAPTURE_BEGIN | MarkKind.CAPTURE_END as kind):
                is_captured = kind is MarkKind.CAPTURE_BEGIN
            case Mark(kind=MarkKind.REPLAY_BEGIN | MarkKind.REPLAY_END as kind):
                is_replayed = kind is MarkKind.REPLAY_BEGIN
        if is_captured:  # a graph's work runs when it is replayed
            program.items.append(Item(host.seconds(event), None, place=place))
            continue
        if is_replayed and not isinstance(event, Op | Comm | Mark):
            program.items.append(Item(0.0, event, place=place))
            continue
        match event:
            case Op():
                cost = fused.get(place)
                if event.repeats in captured:
                    region, cost = captured[event.repeats]
                    event = event._replace(region=region)
                if event.region is not None and cost is None:
                    continue  # a view, or inside of a kernel
                cost = cost or pricer.price(event)
                program.costs[place] = cost
                program.items.append(_op_item(host, event, cost, place))
            case Comm():
                price = price_comm(
                    event, pricer.figures, recording.nodes, recording.rank
                )
                issue = 0.0 if is_replayed else host.seconds(event)
                program.items.append(
                    Item(issue, event, price.seconds, Kind.COMM, price.link, place)
                )
            case Synchronize():
                program.items.append(Item(0.0, event, place=place))
            case _:
                program.items.append(_order_item(host, event, place))
    program.items = [item for item in program.items if item.event or item.host]


def _op_item(host: HostModel, op: Op, cost: Cost, place: int) -> Item:
    issue = host.seconds(op, cost.kernels) if op.through != "thread" else 0.0
    if cost.seconds <= 0:
        return Item(issue, None, place=place)
    if cost.kind == "copy":
        return Item(issue, op, cost.seconds, Kind.COPY, place=place)
    gap = 0.0 if op.through in _OF_GRAPHS else host.figures.number("kernels.gap")
    return Item(issue, op, cost.seconds + gap, Kind.COMPUTE, place=place)


def _order_item(host: HostModel, event: Event, place: int) -> Item:
    seconds = host.seconds(event)
    return Item(seconds, event if seconds else None, place=place)


def _in_region(event: Event) -> Event:
    if isinstance(event, Op) and event.region is None:
        if event.site.phase.value in ("forward", "backward", "recompute"):
            return event._replace(region=0)
    return event
