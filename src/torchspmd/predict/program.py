"""A steady step as a program for the simulated clock: each event with its price.

Operators of one ``torch.compile`` region that follow each other are one kernel: it reads
what comes from outside and writes what somebody else reads.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torchspmd.predict.collectives import price_comm
from torchspmd.predict.host import HostModel
from torchspmd.predict.operators import Cost, Pricer
from torchspmd.predict.timeline import Item, Kind, mark_places
from torchspmd.predict.traffic import base_name, tensor_bytes
from torchspmd.rehearse.recording import (
    Alloc,
    Category,
    Comm,
    Event,
    Free,
    MarkKind,
    Node,
    Op,
    Phase,
    Recording,
    Synchronize,
    TensorSpec,
)

__all__ = ["Program", "price_step"]

_BACKWARD = frozenset({Phase.BACKWARD, Phase.RECOMPUTE})
_OF_GRAPHS = frozenset({"graph", "replay"})  # CUDA graphs: kernels follow at once
_LASTING = frozenset(
    {
        Category.PARAMETER,
        Category.GRADIENT,
        Category.OPTIMIZER_STATE,
        Category.BUFFER,
    }
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
        return range(ends[-2] + 1, ends[-1] + 1), []
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
    events = _with_compiled_backward(events, places)
    host = HostModel(pricer.figures)
    fused = _fused(events, places, recording, pricer)
    for place in places:
        event = events[place]
        if not keep(event):
            continue
        match event:
            case Op():
                if event.region is not None and place not in fused:
                    continue  # a view, or inside of a kernel
                cost = fused.get(place) or pricer.price(event)
                program.costs[place] = cost
                program.items.append(_op_item(host, event, cost, place))
            case Comm():
                price = price_comm(
                    event, pricer.figures, recording.gpus_per_node, recording.rank
                )
                issue = host.seconds(event)
                program.items.append(
                    Item(issue, event, price.seconds, Kind.COMM, price.link, place)
                )
            case Synchronize():
                program.items.append(Item(0.0, event, place=place))
            case _:
                program.items.append(_order_item(host, event, place))
    program.items = [item for item in program.items if item.event or item.host]


def _op_item(host: HostModel, op: Op, cost: Cost, place: int) -> Item:
    issue = host.seconds(op, cost.kernels)
    if cost.seconds <= 0:
        return Item(issue, None, place=place)
    if cost.kind == "copy":
        return Item(issue, op, cost.seconds, Kind.COPY, place=place)
    gap = 0.0 if op.through in _OF_GRAPHS else host.figures.number("kernels.gap")
    return Item(issue, op, cost.seconds + gap, Kind.COMPUTE, place=place)


def _order_item(host: HostModel, event: Event, place: int) -> Item:
    seconds = host.seconds(event)
    return Item(seconds, event if seconds else None, place=place)


# ----------------------------------------------------------------------------
# Kernels of torch.compile


def _in_region(event: Event) -> Event:
    if isinstance(event, Op) and event.region is None:
        if event.site.phase.value in ("forward", "backward", "recompute"):
            return event._replace(region=0)
    return event


def _with_compiled_backward(events: list[Event], places: range) -> list[Event]:
    """Backward of a compiled region is one, too: give its operators a region.

    What a checkpoint computes again is in it: the compiler has both in one graph.
    """
    regions: dict[str, Op] = {}
    for place in places:
        event = events[place]
        if isinstance(event, Op) and event.region is not None:
            regions[event.site.module] = event
    if not regions:
        return events
    result = list(events)
    for place in places:
        event = events[place]
        if not isinstance(event, Op) or event.region is not None:
            continue
        if _hands_gradient(event):  # behind the region
            continue
        of = regions.get(event.site.module)
        if of is not None and event.site.phase in _BACKWARD:
            result[place] = event._replace(region=of.region, through=of.through)
    return result


def _fused(
    events: Sequence[Event], places: range, recording: Recording, pricer: Pricer
) -> dict[int, Cost]:
    """Costs by the place of the operator that stands for a kernel."""
    costs: dict[int, Cost] = {}
    last_use = {
        spec.storage: place
        for place in places
        if isinstance(event := events[place], Op | Comm)
        for spec in event.inputs
    }
    memory = _Memory.of(events, places)
    for run in _runs(events, places, pricer):
        for kernel in _connected(events, run):
            ops = [event for place in kernel if isinstance(event := events[place], Op)]
            cost = pricer.price(ops[0])
            if cost.kind == "memory":
                nbytes = _outside_bytes(ops, kernel, last_use, recording, memory)
                more = _read_again(ops)
                nbytes += sum(more)
                seconds = max(pricer.fused(nbytes), *map(pricer.arithmetic, ops))
                seconds += len(more) * pricer.floor
                cost = Cost(seconds, nbytes, 0.0, "memory", 1 + len(more))
            costs[kernel[0]] = cost
    return costs


def _connected(events: Sequence[Event], run: Sequence[int]) -> list[list[int]]:
    """A run, divided into kernels: of operators that read what another one made or reads.

    Casts of weights have nothing in common with what stands beside them, nor have
    counters. What only reads the same has to be of the same size.
    """
    kernels: list[tuple[list[int], set[object]]] = []
    for place in run:
        op = events[place]
        assert isinstance(op, Op)
        size = max((math.prod(spec.shape) for spec in op.outputs), default=0)
        made = {spec.storage for spec in op.outputs}
        known: set[object] = {(spec.storage, size) for spec in op.inputs}
        wanted: set[object] = {spec.storage for spec in op.inputs} | known
        members = [place]
        for each in [each for each in kernels if each[1] & wanted]:
            kernels.remove(each)
            members, known = each[0] + members, known | each[1]
        kernels.append((members, known | made))
    return sorted(sorted(members) for members, _ in kernels)


def _read_again(ops: Sequence[Op]) -> list[int]:
    """Bytes that kernels beside the first read: of each one.

    Sums over rows need kernels of their own: of biases, and of weights of norms. Batch
    norms need the sums of a whole channel before their result, and its gradient. Such sums
    are made of parts, which a small kernel adds up.
    """
    if not ops[0].inputs:
        return []
    first = tensor_bytes(ops[0].inputs[0])
    names = [base_name(op.name) for op in ops]
    sums = sum(name == "sum" for name in names)
    more = [first, 0] * sums
    if sums and names[0] == "sum":  # it is the first kernel
        del more[0]
    for op, name in zip(ops, names, strict=True):
        if "batch_norm" in name:
            before = op.inputs[: 1 + ("backward" in name)]
            more += [sum(map(tensor_bytes, before)), 0]
        elif "norm_backward" in name:
            weights = max(1, sum(len(spec.shape) == 1 for spec in op.outputs))
            more += [first, *[0] * weights]
    return more


def _runs(
    events: Sequence[Event], places: range, pricer: Pricer
) -> Iterator[list[int]]:
    """Places of operators that memory bounds, with no other kernel between, or of one."""
    run: list[int] = []
    region: int | None = None
    for place in places:
        event = events[place]
        if not isinstance(event, Op | Comm) or _hands_gradient(event):
            continue
        now = event.region if isinstance(event, Op) else None
        if run and (now is None or now != region):
            yield run
            run = []
        region = now
        if not isinstance(event, Op) or region is None or event.views:
            continue
        cost = pricer.price(event)
        if cost.kind == "memory":
            run.append(place)
        elif cost.seconds:
            if run:
                yield run
                run = []
            yield [place]
    if run:
        yield run


def _hands_gradient(event: Op | Comm) -> bool:
    return isinstance(event, Op) and event.node is Node.GRADIENT


def _in_forward(op: Op) -> bool:
    return not op.views and op.site.phase not in _BACKWARD


@dataclass(frozen=True, slots=True)
class _Memory:
    """What forward of compiled regions has in memory; backward computes the rest again.

    Attributes:
        makers: The operator of a region's forward that made a storage.
        lives: Places between which a storage of those is in memory.
    """

    makers: dict[int, Op]
    lives: dict[int, tuple[int, float]]

    @classmethod
    def of(cls, events: Sequence[Event], places: range) -> "_Memory":
        makers: dict[int, Op] = {}
        lives: dict[int, tuple[int, float]] = {}
        for place in places:
            match events[place]:
                case Op(region=int()) as op if _in_forward(op):
                    read = {spec.storage for spec in op.inputs}
                    for spec in op.outputs:
                        if spec.storage not in read:  # no view, and not in place
                            makers.setdefault(spec.storage, op)
                case Alloc(storage=storage):
                    lives[storage] = (place, math.inf)
                case Free(storage=storage) if storage in lives:
                    lives[storage] = (lives[storage][0], place)
        return cls(makers, lives)

    def has(self, storage: int, place: int) -> bool:
        if storage not in self.makers:
            return True
        begin, end = self.lives.get(storage, (math.inf, math.inf))
        return begin <= place <= end

    def is_made(self, storage: int) -> bool:
        """Whether it is in memory at all."""
        return storage not in self.makers or storage in self.lives

    def read(self, spec: TensorSpec, place: int) -> Iterator[TensorSpec]:
        """What a kernel reads that wants a tensor: it, or what it is computed from."""
        seen, wanted = set(), [spec]
        while wanted:
            each = wanted.pop()
            if self.has(each.storage, place):
                yield each
            elif each.storage not in seen:
                seen.add(each.storage)
                wanted += self.makers[each.storage].inputs


def _outside_bytes(
    ops: Sequence[Op],
    run: Sequence[int],
    last_use: dict[int, int],
    recording: Recording,
    memory: _Memory,
) -> int:
    made: dict[int, TensorSpec] = {}
    read: dict[int, TensorSpec] = {}
    for op in ops:
        for wanted in op.inputs:
            if wanted.storage in made:
                continue
            for spec in memory.read(wanted, run[0]):
                known = read.get(spec.storage)
                if known is None or tensor_bytes(spec) > tensor_bytes(known):
                    read[spec.storage] = spec
        for spec in op.outputs:
            made[spec.storage] = spec
    written = 0
    for storage, spec in made.items():
        info = recording.storages.get(storage)
        lasts = info is not None and info.category in _LASTING
        is_read = last_use.get(storage, -1) > run[-1]
        if lasts or storage < 0 or (is_read and memory.is_made(storage)):
            written += tensor_bytes(spec)
    return sum(map(tensor_bytes, read.values())) + written
