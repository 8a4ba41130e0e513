"""What would make a step faster: each change with the seconds that it gains.

A change is made to the recorded step, and the step is simulated again: what only uncovers
the next bottleneck is not praised for more than it brings.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torchspmd.comm import format_bytes, of_axis
from torchspmd.errors import UsageError
from torchspmd.predict.account import Part, account_for
from torchspmd.predict.blocks import count_blocks, evened, with_blocks
from torchspmd.predict.collectives import price_comm
from torchspmd.predict.prediction import TimePrediction, simulate_programs
from torchspmd.predict.products import rate_name
from torchspmd.predict.program import Program, price_step
from torchspmd.predict.stages import doubled
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
_MOST_STAGES = 8  # in one text
_LARGELY = 0.25  # of what could be gained at most
# What wrappers send: of gradients in buckets, of shards that were copied together. Layers
# send activations.
_GRADIENTS = frozenset({Category.COMMUNICATION, Category.GRADIENT})
_SHARDS = frozenset({Category.COMMUNICATION, Category.PARAMETER})


class Change(NamedTuple):
    """A change to the script, before it is known what it brings.

    Attributes:
        text: What to do.
        programs: The steps that were recorded, as they then are.
        how: What was simulated.
        axes: Those whose communication it changes.
        is_bound: Whether nobody can do it: it says how much there is to gain.
        needs: Bytes of the device, for good or for a while.
        steps: Of today, that a step then does the work of.
        is_all: Whether the programs are those of all stages.
    """

    text: str
    programs: Sequence[Program]
    how: str
    axes: frozenset[str] = frozenset()
    is_bound: bool = False
    needs: int = 0
    steps: int = 1
    is_all: bool = False


class Gain(NamedTuple):
    """A change to the script, and what it brings."""

    seconds: float
    text: str
    how: str


def suggest_faster(
    prediction: TimePrediction, room: float = math.inf, most: int = 3
) -> list[Gain]:
    """The changes that gain most, the best first.

    Args:
        prediction: Of the step as it is.
        room: Bytes of the device that are left: changes that need more are not told.
        most: How many are told.
    """
    account = prediction.account
    if account is None or prediction.run is None:
        return []
    gains: list[tuple[Gain, Change]] = []
    for change in _changes(prediction):
        if change.needs > room:
            continue
        seconds = account.seconds - _seconds(prediction, change)
        if seconds >= _WORTH * account.seconds:
            gains.append((Gain(seconds, change.text, change.how), change))
    told = [gain for gain, change in gains if not _is_outdone(change, gain, gains)]
    return sorted(told, reverse=True)[:most]


def _seconds(prediction: TimePrediction, change: Change) -> float:
    """Of a step as the change leaves it, for the work of one of today."""
    try:
        programs = change.programs
        if not change.is_all:
            programs = prediction.all_stages(programs)
        run, _ = simulate_programs(programs, prediction.figures, of=prediction.rank)
    except UsageError:  # stages would not follow from each other, or not meet any more
        return math.inf
    return account_for(run, prediction.rank).seconds / change.steps


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
    if len(prediction.recorded) > 1:
        yield from _more_micro_batches(prediction)
        yield from _even_stages(prediction)
    if prediction.is_long:
        return
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


# ----------------------------------------------------------------------------
# Pipelines


def _more_micro_batches(prediction: TimePrediction) -> Iterator[Change]:
    programs = doubled(prediction.all_stages(prediction.recorded), prediction.figures)
    if programs:
        yield Change(
            "twice as many micro-batches of this size in a step: stages wait for each "
            "other once for more of them, and the optimizer steps less often",
            programs,
            "simulated; seconds are for as many micro-batches as now",
            steps=2,
            is_all=True,
        )


def _even_stages(prediction: TimePrediction) -> Iterator[Change]:
    programs = prediction.all_stages(prediction.recorded)
    blocks = count_blocks(programs)
    moved = evened(blocks)
    if moved == [each.number for each in blocks]:
        return
    ranks: dict[tuple[int, int], list[int]] = {}
    for program, block, number in zip(programs, blocks, moved, strict=True):
        if number != block.number:
            change = (block.number, number)
            ranks.setdefault(change, []).append(program.recording.rank)
    told = ", ".join(
        f"{_ranks_text(some)} {after} in place of {before}"
        for (before, after), some in sorted(ranks.items())
    )
    yield Change(
        f"more even stages: of the blocks {blocks[0].name}, give {told}",
        [
            with_blocks(program, block, count)
            for program, block, count in zip(programs, blocks, moved, strict=True)
        ],
        "simulated with as many times each stage's own blocks; what their memory needs "
        "there is not counted",
        is_all=True,
    )


def _ranks_text(ranks: Sequence[int]) -> str:
    """Ranks of stages; of many, the first and the last."""
    told = list(map(str, sorted(ranks)))
    if len(told) > _MOST_STAGES:
        told = [f"{told[0]} to {told[-1]} ({len(told)} of them)"]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(told)}"


# ----------------------------------------------------------------------------
# Any step


def _compile(prediction: TimePrediction) -> Iterator[Change]:
    if any(
        isinstance(op := program.recording.events[place], Op) and op.region is not None
        for program in prediction.recorded
        for place in program.costs
    ):
        return
    yield Change(
        "torch.compile(model): fewer launches, and operators that memory bounds fused",
        [
            price_step(program.recording, prediction.pricer, fuse_all=True)
            for program in prediction.recorded
        ],
        "simulated with forward and backward as one compiled region",
    )


def _faster_host(prediction: TimePrediction) -> Iterator[Change]:
    account = prediction.account
    if account is None or not account.parts[Part.HOST]:
        return
    yield Change(
        "CUDA graphs (torch.compile(mode='reduce-overhead')), or a larger batch: the "
        "device waits for the host",
        [
            _with_items(program, [item._replace(host=0.0) for item in program.items])
            for program in prediction.recorded
        ],
        "simulated with a host that takes no time",
    )


def _read_less(prediction: TimePrediction) -> Iterator[Change]:
    count, programs = _without_waits(prediction, lambda wait: wait.reads_value)
    if count:
        each = "a value" if count == 1 else f"{count} values"
        yield Change(
            f"read {each} of the device less often than in every step (.item(), .tolist(), "
            ".cpu()): meanwhile the host issues nothing",
            programs,
            "simulated with a host that does not wait for values",
        )


def _copy_ahead(prediction: TimePrediction) -> Iterator[Change]:
    count, programs = _without_waits(prediction, lambda wait: wait.copies_to_device)
    if count:
        each = "a tensor" if count == 1 else f"{count} tensors"
        yield Change(
            f"copy {each} to the device without waiting: .to(device, non_blocking=True) "
            "from pinned memory (DataLoader(pin_memory=True))",
            programs,
            "simulated with a host that does not wait for these copies",
        )


def _without_waits(
    prediction: TimePrediction, is_meant: Callable[[Synchronize], bool]
) -> tuple[int, list[Program]]:
    """How many waits of the host are meant, on the rank with most; the steps without."""
    programs = [
        _with_items(
            program,
            [
                item
                for item in program.items
                if not (isinstance(item.event, Synchronize) and is_meant(item.event))
            ],
        )
        for program in prediction.recorded
    ]
    pairs = zip(prediction.recorded, programs, strict=True)
    return max(len(old.items) - len(new.items) for old, new in pairs), programs


def _with_items(program: Program, items: list[Item]) -> Program:
    return Program(program.recording, items, program.costs, program.start)


def _hide_communication(prediction: TimePrediction) -> Iterator[Change]:
    account = prediction.account
    assert account is not None
    entries = exposed_by_layers([each.as_json() for each in account.exposed])
    for axis in sorted({entry["axis"] for entry in entries}):
        worst = next(entry for entry in entries if entry["axis"] == axis)
        where = f" of {worst['module']}" if worst["module"] else ""
        yield Change(
            f"overlap or shrink the communication {of_axis(axis)}: most is waited for in "
            f"{worst['kind']}{where}, {worst['cause']}",
            [
                _with_items(
                    program,
                    [
                        item._replace(work=0.0) if _is_of(item.event, axis) else item
                        for item in program.items
                    ],
                )
                for program in prediction.all_stages(prediction.recorded)
            ],
            "simulated without that communication: the most that can be gained",
            frozenset({axis}),
            is_bound=True,
            is_all=True,
        )


def _reduce_in_bfloat16(prediction: TimePrediction) -> Iterator[Change]:
    """Of gradients that a wrapper sends: buckets of DDP, groups of fully_shard."""
    programs: list[Program] = []
    reduced: list[Comm] = []
    for program in prediction.recorded:
        recording, items = program.recording, list(program.items)
        for at, item in enumerate(items):
            comm = item.event
            if not isinstance(comm, Comm) or not _reduces_gradients(recording, comm):
                continue
            reduced.append(comm)
            sent = comm._replace(
                payload_bytes=comm.payload_bytes // 2, dtype="bfloat16"
            )
            price = price_comm(
                sent, prediction.figures, recording.nodes, recording.rank
            )
            items[at] = item._replace(event=sent, work=price.seconds)
        programs.append(_with_items(program, items))
    if reduced:
        how = (
            "MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)"
            if any(comm.kind == "reduce_scatter" for comm in reduced)
            else "register_comm_hook(None, bf16_compress_hook)"
        )
        yield Change(
            f"reduce gradients in bfloat16: {how}; sums are less precise",
            programs,
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
    programs: list[Program] = []
    again: list[list[Comm]] = []  # of each rank
    for program in prediction.recorded:
        again.append(
            [
                item.event
                for item in program.items
                if isinstance(item.event, Comm)
                and item.event.kind == "all_gather"
                and item.event.site.phase is Phase.BACKWARD
                and _categories(program.recording, item.event.inputs) <= _SHARDS
            ]
        )
        items = [item for item in program.items if item.event not in again[-1]]
        programs.append(_with_items(program, items))
    if not any(again):
        return
    needs = max(sum(comm.payload_bytes for comm in comms) for comms in again)
    yield Change(
        "fully_shard(reshard_after_forward=False): gathers nothing again in backward; "
        f"whole parameters stay until then, {format_bytes(needs)}",
        programs,
        "simulated without these gathers",
        frozenset(comm.label for comms in again for comm in comms),
        needs=needs,
    )


def _categories(recording: Recording, specs: Sequence[TensorSpec]) -> set[Category]:
    return {recording.storages[s.storage].category for s in specs if s.storage >= 0}


def _is_of(event: Event | None, axis: str) -> bool:
    return isinstance(event, Comm) and event.label == axis


def _keep_activations(prediction: TimePrediction) -> Iterator[Change]:
    def keep(event: Event) -> bool:
        return not (isinstance(event, Op) and event.site.phase is Phase.RECOMPUTE)

    if all(
        keep(program.recording.events[place])
        for program in prediction.recorded
        for place in program.costs
    ):
        return
    yield Change(
        "checkpoint less: keep activations where memory allows it",
        [
            price_step(program.recording, prediction.pricer, keep=keep)
            for program in prediction.recorded
        ],
        "simulated without recomputation",
    )


def _lower_precision(prediction: TimePrediction) -> Iterator[Change]:
    programs: list[Program] = []
    rates: set[str] = set()
    for program in prediction.recorded:
        items = [_in_bfloat16(prediction, program, item) for item in program.items]
        rates |= {
            rate_name(old.event)
            for old, new in zip(program.items, items, strict=True)
            if old != new and isinstance(old.event, Op)
        }
        programs.append(_with_items(program, items))
    if rates:
        or_tf32 = ", or torch.set_float32_matmul_precision('high') for TF32"
        yield Change(
            "torch.autocast(dtype=torch.bfloat16)" + or_tf32 * ("float32" in rates),
            programs,
            "simulated with products, attention and convolutions in bfloat16",
        )


def _in_bfloat16(prediction: TimePrediction, program: Program, item: Item) -> Item:
    cost = program.costs.get(item.place)
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
    programs = [_with_fused_optimizer(prediction, p) for p in prediction.recorded]
    if any(
        old is not new for old, new in zip(prediction.recorded, programs, strict=True)
    ):
        yield Change(
            "fused=True in the optimizer: one pass over parameters and states",
            programs,
            "simulated with one kernel of twice the longest one's time",
        )


def _with_fused_optimizer(prediction: TimePrediction, program: Program) -> Program:
    places = [
        at
        for at, item in enumerate(program.items)
        if isinstance(item.event, Op) and item.event.site.phase is Phase.OPTIMIZER
    ]
    is_fused = any(
        isinstance(op := program.items[at].event, Op)
        and base_name(op.name).startswith("_fused_")
        for at in places
    )
    if not places or is_fused or not program.recording.can_fuse:
        return program
    # One pass over what the longest of them reads: parameters, gradients and states.
    longest = max(places, key=lambda at: program.items[at].work)
    items = list(program.items)
    for at in places:
        items[at] = items[at]._replace(work=0.0, host=0.0)
    items[longest] = items[longest]._replace(
        work=2 * program.items[longest].work,
        host=_fused_host(prediction, program.recording),
    )
    return _with_items(program, items)


def _fused_host(prediction: TimePrediction, recording: Recording) -> float:
    """Its Python still goes through all parameters."""
    number = prediction.figures.number
    storages = recording.storages.values()
    count = sum(info.category is Category.PARAMETER for info in storages)
    each = number("host_optimizer.adamw_fused_parameter")
    return count * each + number("host_optimizer.adamw_fused_step")
