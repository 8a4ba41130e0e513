"""How long computation waits for each collective: a step's graph, timed on copies."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from torchspmd import _torch
from torchspmd.comm import format_count
from torchspmd.errors import AgreementError, UsageError
from torchspmd.step.capture.inventory import Inventory
from torchspmd.step.deferral.module import IterGraphModule, Marks
from torchspmd.step.graph.argument_checks import check_integers
from torchspmd.step.graph.collectives import get_all_comm_blocks, peers_of
from torchspmd.step.graph.cost import CostModel, check_cost
from torchspmd.step.graph.metadata import OutputKind, roles_of, written_state
from torchspmd.step.graph.simulate import (
    Timeline,
    left_under_way,
    simulate,
    simulate_steady,
)
from torchspmd.step.lower.in_place import write_in_place
from torchspmd.step.lower.pending_in_place import find_spare, write_pending_in_place
from torchspmd.step.measure.clock import Reading, Stopwatch, add_clock, read_runs
from torchspmd.step.measure.exposure_report import (
    ExposureReport,
    MeasuredExposure,
    describe_exposure,
)
from torchspmd.step.program import Program
from torchspmd.step.rank_agreement import exchange_texts

_WARM_RUNS = 2  # the first settles the allocator and what a deferred step leaves
_BEGIN, _END, _FIRST_FREE = 0, 1, 2  # marks

ByRank = Mapping[int, Mapping[str, float]]  # rank -> start -> milliseconds


def measure_exposure(
    graph: fx.GraphModule,
    flat: Sequence[Any],
    *,
    first: fx.GraphModule | None = None,
    runs: int = 5,
    cost: CostModel | None = None,
    program: str = "step",
) -> ExposureReport:
    """Run a step's graph several times and note how long each wait takes.

    Runs on copies of the inputs: nothing of the user's is written, and random numbers go
    on from where they were. Every rank of its collectives must do so at once.

    Args:
        graph: The functional graph of a step; of one with deferred work the steady form.
        flat: The step's inputs, in the graph's order.
        first: The form of the first iteration, for a steady form: it gives the values
            that are carried into the first run.
        runs: How many runs to take medians of, after two that do not count.
        cost: The rates of the simulation; a guess for the device by default.
        program: What it is called in the report.
    """
    check_request("measure_exposure", runs, cost)
    _check_inputs(graph, flat, first)
    measured = _run_clocked(graph, flat, first, runs)
    return _report(graph, measured, cost, program, {})


def _report(
    graph: fx.GraphModule,
    measured: "_Measured",
    cost: CostModel | None,
    program: str,
    by_rank: ByRank,
) -> ExposureReport:
    rates = cost or CostModel.for_device(measured.device)
    timeline = _simulate(graph, rates, measured.num_carried)
    found = _describe(graph, measured.readings, timeline, by_rank)
    return ExposureReport(
        program=program,
        rank=dist.get_rank() if dist.is_initialized() else 0,
        device=measured.device,
        form="steady" if measured.is_steady else "whole",
        runs=measured.runs,
        step_ms=measured.step_seconds * 1e3,
        exposed_ms=measured.exposed_seconds * 1e3,
        simulated_step_ms=timeline.step_seconds * 1e3,
        collectives=found,
        notes=tuple(_notes(graph, found, is_guess=cost is None)),
    )


def check_request(what: str, runs: int, cost: CostModel | None) -> None:
    """Refuse options that cannot be, before ranks begin to run together."""
    check_integers(what, runs=(runs, 1))
    check_cost(cost, what)


def _check_inputs(
    graph: fx.GraphModule, flat: Sequence[Any], first: fx.GraphModule | None
) -> None:
    for name, value in (("graph", graph), ("first", first or graph)):
        if not isinstance(value, fx.GraphModule):
            raise UsageError(
                f"measure_exposure({name}=...): {type(value).__name__} is no "
                "fx.GraphModule. Pass that of a program."
            )
    if not isinstance(flat, Sequence):
        raise UsageError(
            f"measure_exposure(flat=...): {type(flat).__name__} is no list of the graph's "
            "inputs."
        )
    expected = _num_inputs(first or graph)
    if len(flat) != expected:
        raise UsageError(
            f"measure_exposure: {len(flat)} inputs are given, the graph takes {expected}. "
            "Pass all in the graph's order; with the steady form of a step that leaves "
            "work for the next one, also pass first=, which takes the step's own inputs."
        )


@dataclass(frozen=True, slots=True)
class _Measured:
    """What the clock said: medians, in seconds."""

    device: str
    is_steady: bool
    num_carried: int
    runs: int
    step_seconds: float
    exposed_seconds: float
    readings: dict[str, Reading]


def _run_clocked(
    graph: fx.GraphModule, flat: Sequence[Any], first: fx.GraphModule | None, runs: int
) -> _Measured:
    num_carried = 0 if first is None else _num_inputs(graph) - _num_inputs(first)
    running = _as_it_runs(graph, is_steady=first is not None)
    copies = _copies(graph.graph, flat)
    on_stream = any(isinstance(each, torch.Tensor) and each.is_cuda for each in copies)
    watch = Stopwatch(on_stream)
    under_way = left_under_way(running.graph, num_carried)
    clocked = add_clock(running.graph, watch, _FIRST_FREE, num_carried)
    running.recompile()
    left: Sequence[Any] = ()
    devices = [torch.cuda.current_device()] if on_stream else []
    with torch.no_grad(), _torch.without_autocast(), torch.random.fork_rng(devices):
        if first is not None:
            left = _step(first, copies, (), num_carried)
        for _ in range(_WARM_RUNS + runs):
            watch.begin_run()
            watch.mark(_BEGIN)
            left = _step(running, copies, left, num_carried)
            watch.mark(_END)
        for place in under_way:  # ranks end in step, with nothing on the wire
            _torch.WAIT(left[place])
    moments = watch.read()
    counted = moments[_WARM_RUNS:]
    marks = [pair for each in clocked for pair in each.waits]
    return _Measured(
        "cuda" if on_stream else "cpu",
        first is not None,
        num_carried,
        runs,
        statistics.median(run[_END] - run[_BEGIN] for run in counted),
        statistics.median(sum(run[b] - run[a] for a, b in marks) for run in counted),
        read_runs(clocked, moments, _WARM_RUNS),
    )


def _as_it_runs(graph: fx.GraphModule, *, is_steady: bool) -> fx.GraphModule:
    """A copy that writes in place what a program writes in place."""
    if is_steady:
        spare = find_spare(graph.graph)
        return write_pending_in_place(graph, Marks(_ignore, _ignore), {}, spare)[0]
    return write_in_place(graph)[0]


def _ignore(region: int) -> None:
    """A measured run is not repeated: its progress need not be noted."""


def _step(
    module: fx.GraphModule, flat: list[Any], left: Sequence[Any], num_carried: int
) -> Sequence[Any]:
    """Run one iteration on ``flat``, which gets the new states; what it leaves behind."""
    values = module(*flat, *left)
    values = values if isinstance(values, (list, tuple)) else [values]
    targets, sources = [], []
    for value, role in zip(values, roles_of(module.graph), strict=True):
        if role.kind is not OutputKind.STATE or value is flat[role.placeholder]:
            continue
        if isinstance(value, torch.Tensor):
            targets.append(flat[role.placeholder])
            sources.append(value)
        else:
            flat[role.placeholder] = value
    if targets:
        _torch.copy_all(targets, sources)
    return values[len(values) - num_carried :]


def _copies(graph: fx.Graph, flat: Sequence[Any]) -> list[Any]:
    """Inputs that may be written; what is neither read nor written stays as it is."""
    places = graph.find_nodes(op="placeholder")[: len(flat)]
    written = set(written_state(graph).values())
    return [
        value.detach().clone()
        if isinstance(value, torch.Tensor) and (node.users or node in written)
        else value
        for node, value in zip(places, flat, strict=True)
    ]


def _simulate(graph: fx.GraphModule, cost: CostModel, num_carried: int) -> Timeline:
    if num_carried:
        return simulate_steady(graph.graph, cost, num_carried)
    return simulate(graph.graph, cost)


def _describe(
    graph: fx.GraphModule,
    readings: Mapping[str, Reading],
    timeline: Timeline,
    by_rank: ByRank,
) -> tuple[MeasuredExposure, ...]:
    simulated = {each.start: each for each in timeline.exposures}
    found = []
    for block in get_all_comm_blocks(graph):
        name = block.start.name
        if name in readings:
            ranks = {
                rank: by_rank[rank][name]
                for rank in block.group.ranks
                if name in by_rank.get(rank, {})
            }
            exposure = describe_exposure(
                block, readings[name], simulated.get(name), ranks
            )
            found.append(exposure)
    return tuple(found)


def _notes(
    graph: fx.GraphModule, found: Sequence[MeasuredExposure], *, is_guess: bool
) -> Iterator[str]:
    known = {each.start for each in found}
    starts = [block.start.name for block in get_all_comm_blocks(graph)]
    unknown = [name for name in starts if name not in known]
    if unknown:
        yield (
            f"{', '.join(unknown[:3])}{' ...' * (len(unknown) > 3)}: nothing in the graph "
            f"waits for {format_count(len(unknown), 'collective')}, so they have no figures"
        )
    far = sum(each.disagrees for each in found)
    if far:
        cure = (
            'its rates are a guess for the device, compile with cost="measure" to '
            "measure them"
        )
        yield (
            f"{far} of {len(found)} differ from the simulation by more than half"
            + (f": {cure}" if is_guess else "")
        )


def _num_inputs(graph: fx.GraphModule) -> int:
    return len(graph.graph.find_nodes(op="placeholder"))


# ----------------------------------------------------------------------------
# The measured exposure of a compiled step's program, on all its ranks together.

_SECONDS = 60.0  # how long ranks wait for each other
_SAME_REQUEST = "Every rank must call it at the same place, with the same runs."


def measure_program(
    name: str,
    program: Program | None,
    inventory: Inventory,
    key: str,
    *,
    runs: int,
    cost: CostModel | None,
    is_compiled: bool,
) -> ExposureReport:
    """Measure a program with the inputs of a call; nothing of the call is changed.

    Args:
        name: The step, in messages.
        program: What serves the call; None where nothing does.
        inventory: What the call works on.
        key: Names the measurement in the store; the same on every rank, used once.
        runs: How many runs to take medians of.
        cost: The rates of the simulation.
        is_compiled: Whether a compiler makes something else of the program's graph.
    """
    if program is None:
        raise UsageError(
            f"exposure of {name!r}: no program fits these arguments yet. Make a step with "
            "them first; the first step of an optimizer is a program of its own, so make "
            "two."
        )
    if program.peak_memory is None:
        raise UsageError(
            f"exposure of {name!r}: gm_transformation returned a callable of its own, "
            "whose collectives cannot be seen. Return the graph module."
        )
    graph, first = _graphs(program)
    ranks = _peers(name, graph)
    if ranks:
        _check_requests(name, f"{runs} runs of program {program.number}", ranks, key)
    flat = inventory.flat_inputs()
    measured = _run_clocked(graph, flat, first, runs)
    by_rank, missing = _share(measured, ranks, key)
    title = f"{name}, program {program.number}"
    report = _report(graph, measured, cost, title, by_rank)
    notes = [*report.notes, *missing]
    if is_compiled:
        notes.append("measured operator by operator, not as the compiled code runs")
    return replace(report, notes=tuple(notes))


def _share(
    measured: "_Measured", ranks: Sequence[int], key: str
) -> tuple[ByRank, list[str]]:
    """How long each collective is exposed on each rank, and lines on missing ranks."""
    if not ranks:
        return {}, []
    own = {start: each.exposed * 1e3 for start, each in measured.readings.items()}
    found = exchange_texts(json.dumps(own), ranks, f"{key}/found", _SECONDS)
    missing = [f"rank {rank} did not say what it measured" for rank in found.missing]
    return {rank: json.loads(text) for rank, text in found.texts.items()}, missing


def _graphs(program: Program) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    """What is run again and again, and what the first time if that is another graph."""
    run = program.run
    if isinstance(run, IterGraphModule) and run.is_deferring:
        return run.forms["steady"], run.forms["first"]
    return program.graph, None


def _peers(name: str, graph: fx.GraphModule) -> list[int]:
    """The ranks that this one communicates with in a graph; none where it is alone."""
    ranks = peers_of(graph)
    if len(ranks) > 1 and dist.get_backend() == "fake":
        raise UsageError(
            f"exposure of {name!r}: a fake process group sends nothing, so there is "
            "nothing to measure. Run it on real ranks, or simulate the graph with "
            "torchspmd.step.graph.simulate.simulate."
        )
    return ranks if len(ranks) > 1 else []


def _check_requests(name: str, request: str, ranks: Sequence[int], key: str) -> None:
    """Raise on every rank if they would not run the same."""
    what = f"exposure of {name!r}"
    found = exchange_texts(request, ranks, f"{key}/asked", _SECONDS)
    texts = found.require_all(what, _SAME_REQUEST)
    if len(set(texts.values())) > 1:
        lines = "\n".join(f"  * rank {rank}: {text}" for rank, text in texts.items())
        raise AgreementError(
            f"{what}: ranks do not ask for the same\n\n{lines}\n\n{_SAME_REQUEST}"
        )
