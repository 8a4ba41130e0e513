"""What would make a step faster: each change with the seconds that it gains.

A change is made to the recorded step, and the step is simulated again: what only uncovers
the next bottleneck is not praised for more than it brings.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torchspmd.comm import format_bytes, of_axis
from torchspmd.predict.account import Part, account_for
from torchspmd.predict.collectives import price_comm
from torchspmd.predict.prediction import TimePrediction, simulate_programs
from torchspmd.predict.products import rate_name
from torchspmd.predict.program import Program, price_step
from torchspmd.predict.timeline import Item
from torchspmd.predict.traffic import base_name
from torchspmd.rehearse.recording import (
    Category,
    Comm,
    Event,
    Op,
    Phase,
    Recording,
    Synchronize,
    TensorSpec,
)
from torchspmd.report.views.prediction import exposed_by_layers

__all__ = ["Gain", "suggest_faster"]

_WORTH = 0.01  # of the step: less is not told
_MOST = 3
_LARGELY = 0.25  # of what could be gained at most
# What wrappers send: of gradients in buckets, of shards that were copied together. Layers
# send activations.
_GRADIENTS = frozenset({Category.COMMUNICATION, Category.GRADIENT})
_SHARDS = frozenset({Category.COMMUNICATION, Category.PARAMETER})


class Change(NamedTuple):
    """A change to the script, before it is known what it brings.

    Attributes:
        text: What to do.
        program: The step as it then is.
        how: What was simulated.
        axes: Those whose communication it changes.
        is_bound: Whether nobody can do it: it says how much there is to gain.
        needs: Bytes of the device, for good or for a while.
    """

    text: str
    program: Program
    how: str
    axes: frozenset[str] = frozenset()
    is_bound: bool = False
    needs: int = 0


class Gain(NamedTuple):
    """A change to the script, and what it brings."""

    seconds: float
    text: str
    how: str


def suggest_faster(prediction: TimePrediction, room: float = math.inf) -> list[Gain]:
    """The three changes that gain most, the best first.

    Args:
        prediction: Of the step as it is.
        room: Bytes of the device that are left: changes that need more are not told.
    """
    account = prediction.account
    if account is None or prediction.run is None or len(prediction.run.tasks) > 1:
        return []  # of a pipeline, one stage's change moves the others'
    gains: list[tuple[Gain, Change]] = []
    for change in _changes(prediction):
        if change.needs > room:
            continue
        run, _ = simulate_programs([change.program], prediction.figures)
        seconds = account.seconds - account_for(run).seconds
        if seconds >= _WORTH * account.seconds:
            gains.append((Gain(seconds, change.text, change.how), change))
    told = [gain for gain, change in gains if not _is_outdone(change, gain, gains)]
    return sorted(told, reverse=True)[:_MOST]


def _is_outdone(
    bound: Change, most: Gain, others: Sequence[tuple[Gain, Change]]
) -> bool:
    """Whether what is only a bound is largely reached by something that can be done."""
    return bound.is_bound and any(
        gain.seconds >= _LARGELY * most.seconds and change.axes & bound.axes
        for gain, change in others
        if not change.is_bound
    )


def _changes(prediction: TimePrediction) -> Iterator[Change]:
    yield from _compile(prediction)
    yield from _faster_host(prediction)
    yield from _read_less(prediction)
    yield from _copy_ahead(prediction)
    yield from _reduce_in_bfloat16(prediction)
    yield from _gather_once(prediction)
    yield from _hide_communication(prediction)
    yield from _keep_activations(prediction)
    yield from _lower_precision(prediction)
    yield from _fuse_optimizer(prediction)


def _compile(prediction: TimePrediction) -> Iterator[Change]:
    events = prediction.recording.events
    places = prediction.program.costs
    if any(isinstance(e := events[p], Op) and e.region is not None for p in places):
        return
    program = price_step(prediction.recording, prediction.pricer, fuse_all=True)
    yield Change(
        "torch.compile(model): fewer launches, and operators that memory bounds fused",
        program,
        "simulated with forward and backward as one compiled region",
    )


def _faster_host(prediction: TimePrediction) -> Iterator[Change]:
    account = prediction.account
    if account is None or not account.parts[Part.HOST]:
        return
    items = [item._replace(host=0.0) for item in prediction.program.items]
    program = _with_items(prediction.program, items)
    yield Change(
        "CUDA graphs (torch.compile(mode='reduce-overhead')), or a larger batch: the "
        "device waits for the host",
        program,
        "simulated with a host that takes no time",
    )


def _read_less(prediction: TimePrediction) -> Iterator[Change]:
    count, program = _without_waits(prediction, lambda wait: wait.reads_value)
    if count:
        each = "a value" if count == 1 else f"{count} values"
        yield Change(
            f"read {each} of the device less often than in every step (.item(), .tolist(), "
            ".cpu()): meanwhile the host issues nothing",
            program,
            "simulated with a host that does not wait for values",
        )


def _copy_ahead(prediction: TimePrediction) -> Iterator[Change]:
    count, program = _without_waits(prediction, lambda wait: wait.copies_to_device)
    if count:
        each = "a tensor" if count == 1 else f"{count} tensors"
        yield Change(
            f"copy {each} to the device without waiting: .to(device, non_blocking=True) "
            "from pinned memory (DataLoader(pin_memory=True))",
            program,
            "simulated with a host that does not wait for these copies",
        )


def _without_waits(
    prediction: TimePrediction, is_meant: Callable[[Synchronize], bool]
) -> tuple[int, Program]:
    """How many waits of the host are meant, and the step without them."""
    items = prediction.program.items
    kept = [
        item
        for item in items
        if not (isinstance(item.event, Synchronize) and is_meant(item.event))
    ]
    return len(items) - len(kept), _with_items(prediction.program, kept)


def _with_items(program: Program, items: list[Item]) -> Program:
    return Program(program.recording, items, program.costs, program.start)


def _hide_communication(prediction: TimePrediction) -> Iterator[Change]:
    account = prediction.account
    assert account is not None
    entries = exposed_by_layers([each.as_json() for each in account.exposed])
    for axis in sorted({entry["axis"] for entry in entries}):
        items = [
            item._replace(work=0.0) if _is_of(item.event, axis) else item
            for item in prediction.program.items
        ]
        worst = next(entry for entry in entries if entry["axis"] == axis)
        where = f" of {worst['module']}" if worst["module"] else ""
        yield Change(
            f"overlap or shrink the communication {of_axis(axis)}: most is waited for in "
            f"{worst['kind']}{where}, {worst['cause']}",
            _with_items(prediction.program, items),
            "simulated without that communication: the most that can be gained",
            frozenset({axis}),
            is_bound=True,
        )


def _reduce_in_bfloat16(prediction: TimePrediction) -> Iterator[Change]:
    """Of gradients that a wrapper sends: buckets of DDP, groups of fully_shard."""
    recording, items = prediction.recording, list(prediction.program.items)
    reduced: list[Comm] = []
    for at, item in enumerate(items):
        comm = item.event
        if not isinstance(comm, Comm) or not _reduces_gradients(recording, comm):
            continue
        reduced.append(comm)
        sent = comm._replace(payload_bytes=comm.payload_bytes // 2, dtype="bfloat16")
        price = price_comm(sent, prediction.figures, recording.nodes, recording.rank)
        items[at] = item._replace(work=price.seconds)
    if reduced:
        how = (
            "MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)"
            if any(comm.kind == "reduce_scatter" for comm in reduced)
            else "register_comm_hook(None, bf16_compress_hook)"
        )
        yield Change(
            f"reduce gradients in bfloat16: {how}; sums are less precise",
            _with_items(prediction.program, items),
            "simulated with half the bytes",
            frozenset(comm.label for comm in reduced),
        )


def _reduces_gradients(recording: Recording, comm: Comm) -> bool:
    return (
        comm.kind in ("all_reduce", "reduce_scatter")
        and comm.dtype == "float32"
        and comm.site.phase is Phase.BACKWARD
        and _categories(recording, comm.inputs) <= _GRADIENTS
    )


def _gather_once(prediction: TimePrediction) -> Iterator[Change]:
    """Parameters that ``fully_shard`` gathers for backward once more."""
    recording = prediction.recording
    again = [
        item.event
        for item in prediction.program.items
        if isinstance(item.event, Comm)
        and item.event.kind == "all_gather"
        and item.event.site.phase is Phase.BACKWARD
        and _categories(recording, item.event.inputs) <= _SHARDS
    ]
    if not again:
        return
    items = [
        item._replace(work=0.0) if item.event in again else item
        for item in prediction.program.items
    ]
    needs = sum(comm.payload_bytes for comm in again)
    yield Change(
        "fully_shard(reshard_after_forward=False): gathers nothing again in backward; "
        f"whole parameters stay until then, {format_bytes(needs)}",
        _with_items(prediction.program, items),
        "simulated without these gathers",
        frozenset(comm.label for comm in again),
        needs=needs,
    )


def _categories(recording: Recording, specs: Sequence[TensorSpec]) -> set[Category]:
    return {recording.storages[s.storage].category for s in specs if s.storage >= 0}


def _is_of(event: Event | None, axis: str) -> bool:
    return isinstance(event, Comm) and event.label == axis


def _keep_activations(prediction: TimePrediction) -> Iterator[Change]:
    def keep(event: Event) -> bool:
        return not (isinstance(event, Op) and event.site.phase is Phase.RECOMPUTE)

    events = prediction.recording.events
    if all(keep(events[place]) for place in prediction.program.costs):
        return
    program = price_step(prediction.recording, prediction.pricer, keep=keep)
    yield Change(
        "checkpoint less: keep activations where memory allows it",
        program,
        "simulated without recomputation",
    )


def _lower_precision(prediction: TimePrediction) -> Iterator[Change]:
    program = prediction.program
    items = [_in_bfloat16(prediction, item) for item in program.items]
    pairs = zip(program.items, items, strict=True)
    rates = {
        rate_name(old.event)
        for old, new in pairs
        if old != new and isinstance(old.event, Op)
    }
    if rates:
        or_tf32 = ", or torch.set_float32_matmul_precision('high') for TF32"
        yield Change(
            "torch.autocast(dtype=torch.bfloat16)" + or_tf32 * ("float32" in rates),
            _with_items(program, items),
            "simulated with products, attention and convolutions in bfloat16",
        )


def _in_bfloat16(prediction: TimePrediction, item: Item) -> Item:
    cost = prediction.program.costs.get(item.place)
    if cost is None or not cost.flops or not isinstance(item.event, Op):
        return item
    inputs = tuple(map(_halved, item.event.inputs))
    if inputs == item.event.inputs:
        return item
    faster = prediction.pricer.price(item.event._replace(inputs=inputs))
    return item._replace(work=faster.seconds)


def _halved(spec: TensorSpec) -> TensorSpec:
    return spec._replace(dtype="bfloat16") if spec.dtype == "float32" else spec


def _fuse_optimizer(prediction: TimePrediction) -> Iterator[Change]:
    program = prediction.program
    names = {
        base_name(item.event.name)
        for item in program.items
        if isinstance(item.event, Op) and item.event.site.phase is Phase.OPTIMIZER
    }
    is_fused = any(name.startswith("_fused_") for name in names)
    if not names or is_fused or not prediction.recording.can_fuse:
        return
    places = [
        at
        for at, item in enumerate(program.items)
        if isinstance(item.event, Op) and item.event.site.phase is Phase.OPTIMIZER
    ]
    # One pass over what the longest of them reads: parameters, gradients and states.
    longest = max(places, key=lambda at: program.items[at].work)
    items = [
        item._replace(work=0.0, host=0.0)
        if at in set(places) and at != longest
        else item
        for at, item in enumerate(program.items)
    ]
    items[longest] = items[longest]._replace(
        work=2 * items[longest].work, host=_fused_host(prediction)
    )
    yield Change(
        "fused=True in the optimizer: one pass over parameters and states",
        _with_items(program, items),
        "simulated with one kernel of twice the longest one's time",
    )


def _fused_host(prediction: TimePrediction) -> float:
    """Its Python still goes through all parameters."""
    number = prediction.figures.number
    storages = prediction.recording.storages.values()
    count = sum(info.category is Category.PARAMETER for info in storages)
    each = number("host_optimizer.adamw_fused_parameter")
    return count * each + number("host_optimizer.adamw_fused_step")
