"""What ``torch.compile`` makes of its regions: which operators are one kernel.

A compiler reads a region as a graph, not as the list of operators that eager mode issues.
An operator goes into the kernel that made what it reads, or that reads the same, however
many products stand between them in the script, unless one of these needs that kernel and is
needed by the operator. A kernel reads what comes from outside and writes what others read.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torchspmd.predict.operators import Cost, Pricer
from torchspmd.predict.traffic import base_name, tensor_bytes
from torchspmd.rehearse.recording import (
    Alloc,
    Category,
    Comm,
    Event,
    Free,
    Mark,
    MarkKind,
    Node,
    Op,
    Phase,
    Recording,
    TensorSpec,
)

__all__ = [
    "price_captured",
    "price_regions",
    "tensors_taken",
    "with_compiled_backward",
]

_BACKWARD = frozenset({Phase.BACKWARD, Phase.RECOMPUTE})
_LASTING = frozenset(
    {
        Category.PARAMETER,
        Category.GRADIENT,
        Category.OPTIMIZER_STATE,
        Category.BUFFER,
    }
)


def with_compiled_backward(events: list[Event], places: range) -> list[Event]:
    """Backward of a compiled region is one, too: give its operators a region.

    What a checkpoint computes again is in it: the compiler has both in one graph.
    """
    regions: dict[str, Op] = {}
    for place in places:
        event = events[place]
        if isinstance(event, Op) and event.region is not None and event.repeats < 0:
            regions[event.site.module] = event
    if not regions:
        return events
    result = list(events)
    for place in places:
        event = events[place]
        if not isinstance(event, Op) or event.region is not None or event.repeats >= 0:
            continue
        if _hands_gradient(event):  # behind the region
            continue
        of = regions.get(event.site.module)
        if of is not None and event.site.phase in _BACKWARD:
            result[place] = event._replace(region=of.region, through=of.through)
    return result


def tensors_taken(events: Sequence[Event]) -> dict[int, int]:
    """How many tensors each region takes: its arguments, parameters and buffers.

    Each is guarded, fetched and checked in every call.
    """
    taken: defaultdict[int, set[int]] = defaultdict(set)
    made: defaultdict[int, set[int]] = defaultdict(set)
    for event in events:
        if not isinstance(event, Op) or event.region is None:
            continue
        if event.site.phase in _BACKWARD:
            continue
        reads = {spec.storage for spec in event.inputs if spec.storage >= 0}
        taken[event.region] |= reads - made[event.region]
        made[event.region] |= {spec.storage for spec in event.outputs} - reads
    return {region: len(storages) for region, storages in taken.items()}


def price_regions(
    events: Sequence[Event], places: range, recording: Recording, pricer: Pricer
) -> dict[int, Cost]:
    """Costs of kernels, by the place of the operator that each waits for last."""
    costs: dict[int, Cost] = {}
    readers: dict[int, list[int]] = defaultdict(list)
    for place in places:
        if isinstance(event := events[place], Op | Comm):
            for spec in event.inputs:
                readers[spec.storage].append(place)
    memory = _Memory.of(events, places)
    for run in _runs(events, places):
        ops = {place: op for place in run if isinstance(op := events[place], Op)}
        priced = {place: pricer.price(op) for place, op in ops.items()}
        for kernel in _kernels(ops, priced):
            cost = priced[kernel[0]]
            if cost.kind == "memory":
                of_kernel = {place: ops[place] for place in kernel}
                more = _read_again(list(of_kernel.values()))
                nbytes = _outside_bytes(of_kernel, readers, recording, memory)
                nbytes += sum(more)
                arithmetic = map(pricer.arithmetic, of_kernel.values())
                seconds = max(pricer.fused(nbytes), *arithmetic)
                seconds += len(more) * pricer.floor
                cost = Cost(seconds, nbytes, 0.0, "memory", 1 + len(more))
            costs[kernel[-1]] = cost
    return costs


def price_captured(
    events: list[Event], places: range, recording: Recording, pricer: Pricer
) -> dict[int, tuple[int, Cost | None]]:
    """What replays of CUDA graphs do of compiled regions.

    The capture tells it, where the memory of the region was allocated.

    Returns:
        By the number of a captured operator: its region, and the cost of the kernel that
        waits for it last.
    """
    found: dict[int, tuple[int, Cost | None]] = {}
    repeated = {
        event.repeats
        for place in places
        if isinstance(event := events[place], Op) and event.repeats >= 0
    }
    for capture in _captures(events) if repeated else ():
        compiled = with_compiled_backward(events, capture)
        costs = price_regions(compiled, capture, recording, pricer)
        for place in capture:
            op = compiled[place]
            if isinstance(op, Op) and op.region is not None and op.number in repeated:
                found[op.number] = op.region, costs.get(place)
    return found


def _captures(events: Sequence[Event]) -> Iterator[range]:
    begin = 0
    for place, event in enumerate(events):
        if isinstance(event, Mark) and event.kind is MarkKind.CAPTURE_BEGIN:
            begin = place
        elif isinstance(event, Mark) and event.kind is MarkKind.CAPTURE_END:
            yield range(begin, place)


def _runs(events: Sequence[Event], places: range) -> Iterator[list[int]]:
    """Places of operators of one region, with nothing between that is not of it."""
    run: list[int] = []
    region: int | None = None
    for place in places:
        event = events[place]
        if not isinstance(event, Op | Comm) or _hands_gradient(event):
            continue
        now = event.region if isinstance(event, Op) and event.repeats < 0 else None
        if run and now != region:
            yield run
            run = []
        region = now
        if isinstance(event, Op) and now is not None and not event.views:
            run.append(place)
    if run:
        yield run


@dataclass(slots=True, eq=False)
class _Kernel:
    """Operators that are computed together. Masks have a bit for each operator of a run.

    Attributes:
        places: Of its operators.
        own: Mask of its operators.
        before: Mask of all that must have ended.
        needs: Operators of other kernels that it reads from.
    """

    places: list[int]
    own: int
    before: int = 0
    needs: set[int] = field(default_factory=set)


def _kernels(ops: dict[int, Op], priced: dict[int, Cost]) -> list[list[int]]:
    """Places of operators, by kernel.

    Those that memory bounds join the kernels that made what they read, or that read the
    same for results of the same size. Casts of weights have nothing in common with what
    stands beside them, nor have counters.
    """
    kernels: list[_Kernel] = []  # of each operator
    made: dict[int, int] = {}  # storage to operator, the last one
    known: dict[object, list[int]] = defaultdict(list)  # what one may join to operators
    for place, op in ops.items():
        in_memory = priced[place].kind == "memory"
        if not in_memory and not priced[place].seconds:
            continue
        kernel, number = _Kernel([place], 1 << len(kernels)), len(kernels)
        reads = {spec.storage for spec in op.inputs}
        for needed in {made[storage] for storage in reads if storage in made}:
            kernel.needs.add(needed)
            kernel.before |= kernels[needed].own | kernels[needed].before
        kernels.append(kernel)
        results = {spec.storage for spec in op.outputs}
        made.update(dict.fromkeys(results, number))
        if not in_memory:
            continue
        size = max((math.prod(spec.shape) for spec in op.outputs), default=0)
        alike = {(storage, size) for storage in reads}
        near = {other for key in reads | alike for other in known.get(key, ())}
        for other in sorted(near, reverse=True):
            _join(kernels, kernels[other], kernels[number])
        for key in results | alike:
            known[key].append(number)
    found = {id(kernel): sorted(kernel.places) for kernel in kernels}
    return sorted(found.values())


def _join(kernels: list[_Kernel], one: _Kernel, other: _Kernel) -> None:
    """Make one kernel of two, unless a third stands between them."""
    if one is other:
        return
    for first, last in ((one, other), (other, one)):
        between = (kernels[needed] for needed in last.needs)
        if any(
            each is not first and each is not last and each.before & first.own
            for each in between
        ):
            return
    one.places += other.places
    one.own |= other.own
    one.needs |= other.needs
    one.before = (one.before | other.before) & ~one.own
    for number, each in enumerate(kernels):
        if each is other:
            kernels[number] = one
        elif each is not one and each.before & one.own:
            each.before |= one.before


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
    ops: dict[int, Op],
    readers: dict[int, list[int]],
    recording: Recording,
    memory: _Memory,
) -> int:
    made: dict[int, tuple[int, TensorSpec]] = {}
    read: dict[int, TensorSpec] = {}
    for place, op in ops.items():
        for wanted in op.inputs:
            if wanted.storage in made:
                continue
            for spec in memory.read(wanted, place):
                known = read.get(spec.storage)
                if known is None or tensor_bytes(spec) > tensor_bytes(known):
                    read[spec.storage] = spec
        for spec in op.outputs:
            made[spec.storage] = place, spec
    written = 0
    for storage, (place, spec) in made.items():
        info = recording.storages.get(storage)
        lasts = info is not None and info.category in _LASTING
        later = readers[storage][bisect_right(readers[storage], place) :]
        is_read = any(each not in ops for each in later)
        if lasts or storage < 0 or (is_read and memory.is_made(storage)):
            written += tensor_bytes(spec)
    return sum(map(tensor_bytes, read.values())) + written
