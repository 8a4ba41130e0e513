"""From the first call of a step to the program that serves it, phase by phase."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from torchspmd import _torch
from torchspmd.errors import CaptureError
from torchspmd.step.capture.dynamic_shapes import input_shapes, with_any_size
from torchspmd.step.capture.guards import TensorFact, sign
from torchspmd.step.capture.initial_states import UnusedStatesError
from torchspmd.step.capture.inventory import (
    CountersError,
    Inventory,
    Role,
    TakeMoreError,
    Taken,
)
from torchspmd.step.capture.override import Overrides
from torchspmd.step.capture.parallel_mode import ParallelMode
from torchspmd.step.capture.trace import (
    Captured,
    assumes_other_sizes,
    capture,
    check_sizes,
    without_collection,
)
from torchspmd.step.deferral.iter_graph import deferral_facts
from torchspmd.step.deferral.module import IterGraphModule
from torchspmd.step.graph.collectives import build_ledger
from torchspmd.step.graph.cost import CostModel
from torchspmd.step.graph.memory import predict_peak
from torchspmd.step.graph.reports import PassReport
from torchspmd.step.lower.backends import (
    Lowered,
    Transformed,
    choose_backend,
    lower_graph,
)
from torchspmd.step.lower.in_place import mark_returned
from torchspmd.step.modes.data_parallel import DataParallel
from torchspmd.step.passes.pipeline import GraphModuleTransformation
from torchspmd.step.passes.runner import pass_reports, run_transformation
from torchspmd.step.program import Program, find_loose, find_released
from torchspmd.step.programs import Request
from torchspmd.step.progress import Progress, phase
from torchspmd.step.rank_agreement import (
    Agreement,
    CommPlan,
    build_comm_plan,
    is_real_group,
)
from torchspmd.step.rival import Rivals, lower_rivals, why_untimed
from torchspmd.step.runtime import Runtime, current_runtime
from torchspmd.step.shadow.check import ShadowPlan
from torchspmd.step.virtual.certificate import Certificate
from torchspmd.step.virtual.run import is_pipelined, without_marks
from torchspmd.step.virtual.verify import Verification, Verifier, certify


@dataclass(frozen=True, slots=True)
class StepOptions:
    """A step, and what ``compile`` was told about it.

    Attributes:
        function: The step.
        name: What it is called in messages.
        transformation: What is done to its graph.
        mode: How it is spread over ranks; None: as it is written.
        mesh: The ranks that it is spread over; None for all.
        backend: What runs its graph.
        overrides: Stand-ins for its modules.
        verify: How to compare graphs; None to compare nothing.
        shadow: Which calls are also made eagerly.
    """

    function: Callable[..., Any]
    name: str
    transformation: Callable[[fx.GraphModule], Any] | None
    mode: DataParallel | None
    mesh: DeviceMesh | None
    backend: str
    overrides: Overrides
    verify: Verification | None
    shadow: ShadowPlan

    @property
    def passes(self) -> GraphModuleTransformation | None:
        """The transformation, where it is no function of the user's own."""
        given = self.transformation
        return given if isinstance(given, GraphModuleTransformation) else None

    @property
    def measures_cost(self) -> bool:
        """Whether passes choose by measured rates."""
        return self.passes is not None and self.passes.measures_cost


class FixedSizesError(Exception):
    """The sizes of a request cannot be symbols of the graph; its cause says why."""


def build_program(
    options: StepOptions,
    inventory: Inventory,
    mode: ParallelMode,
    ranks: Agreement,
    request: Request,
) -> Program:
    """Capture a step for the tensors of one call, and make it ready to run.

    Args:
        options: The step, and how to compile it.
        inventory: What the call works on.
        mode: How the step is spread over ranks.
        ranks: The ranks that build the program together.
        request: Which program it is to be.

    Raises:
        FixedSizesError: Before ranks agree: build it for one size.
        UnusedStatesError: Before ranks agree: build it without these states.
        CountersError: Before ranks agree: build it with these numbers as inputs.
        TakeMoreError: Before ranks agree: build it with more as inputs or guards.
    """
    title = f"{options.name}, program {request.number}"
    runtime = current_runtime()
    is_compiled = options.backend in ("inductor", "auto")
    if is_compiled and any(s.tensor.is_cuda for s in inventory.slots):
        runtime.start_compilers()
    with Progress(f"compile {options.name}") as progress, without_collection():
        with _symbols_or_error(request):
            captured = _capture(options, inventory, mode, request)
            laid_out = captured.relayout.inventory if captured.relayout else inventory
            graph = _override(captured.graph, laid_out, options.overrides)
            flat = laid_out.flat_inputs()
            with _torch.without_autocast():  # its casts are nodes of the graph
                cost, notes = _measure(graph, flat, options, ranks, runtime)
                asked = runtime.verification(options.verify)
                verifier = _make_verifier(title, graph, flat, asked)
                made = _run_passes(graph, options, cost, verifier)
                if options.passes is not None:
                    notes += options.passes.notes
                chosen = choose_backend(made, graph, options.backend, notes)
            if request.sizes is not None:
                check_sizes(chosen.graph, flat)
        with _torch.without_autocast():
            with phase("agreement"):
                agreed = _agree(ranks, chosen.graph, inventory, captured, request)
            with phase("lowering"):
                if options.backend == "auto":
                    plan = agreed.plan
                    why = why_untimed(inventory, captured, plan, mode, runtime)
                    rivals = lower_rivals(
                        chosen, captured, plan, why, ranks, request, runtime
                    )
                else:
                    compilers = runtime.compile_graph, runtime.replay_graph
                    rivals = Rivals(lower_graph(chosen, *compilers))
            if verifier is not None:
                _verify(verifier, rivals)
            reports = _reports(graph, chosen) if verifier is None else verifier.reports
        if ranks.is_used:
            ranks.wait_until_ready(agreed.plan.ranks)
        if captured.relayout is not None:
            captured.relayout.commit()  # all ranks run this program now
    with phase("program", progress.what):

        def make(way: Lowered) -> Program:
            certificate = _certify(title, way, reports, verifier)
            return _make_program(
                request, inventory, captured, way, agreed, certificate, progress
            )

        program = make(rivals.lowered)
        program.choice = rivals.choice
        program.rival = None if rivals.rival is None else make(rivals.rival)
        return program


@contextlib.contextmanager
def _symbols_or_error(request: Request) -> Iterator[None]:
    """Whatever fails inside with symbols for sizes may succeed without them."""
    try:
        yield
    except (UnusedStatesError, CountersError, TakeMoreError):
        raise  # the step is traced again, with symbols
    except Exception as error:
        if request.sizes is None:
            raise
        raise FixedSizesError from error


def _capture(
    options: StepOptions, inventory: Inventory, mode: ParallelMode, request: Request
) -> Captured:
    """Trace the step by the sizes of all ranks, or where these differ, by its own."""
    sizes = request.sizes
    for _ in range(2):
        captured = capture(
            options.function,
            options.name,
            inventory,
            mode,
            compare_values=request.number == 0 or Taken.REACHED in inventory.taken,
            sizes=sizes,
        )
        if sizes is None or not assumes_other_sizes(captured, inventory):
            return captured
        sizes = replace(sizes, shapes=input_shapes(sign(inventory)))
    raise CaptureError("a size of 0 or 1 has a program of its own")


def _override(
    graph: fx.GraphModule, inventory: Inventory, overrides: Overrides
) -> fx.GraphModule:
    with torch.no_grad():
        return overrides.transform(graph, inventory.flat_state())


def _measure(
    graph: fx.GraphModule,
    flat: Sequence[Any],
    options: StepOptions,
    ranks: Agreement,
    runtime: Runtime,
) -> tuple[CostModel | None, tuple[str, ...]]:
    """What passes choose by, where they ask for measured rates, and lines about it."""
    asked = options.passes
    if asked is None or not asked.measures_cost:
        return None, ()
    if ranks.measured is None:
        fuses = options.backend == "inductor"
        ranks.measured = runtime.measure(graph, flat, ranks, asked.cost, fuses=fuses)
    return ranks.measured


def _make_verifier(
    title: str, graph: fx.GraphModule, flat: Sequence[Any], asked: Verification | None
) -> Verifier | None:
    if asked is None:
        return None
    with phase("verification"):
        return Verifier(title, graph, flat, asked)


def _run_passes(
    graph: fx.GraphModule,
    options: StepOptions,
    cost: CostModel | None,
    verifier: Verifier | None,
) -> Any:
    """What a transformation makes of the graph; all of a user's own is checked."""
    transformation = options.transformation
    if transformation is None:
        return graph
    mark_returned(graph.graph)  # as the step was captured, before any edit
    observing = contextlib.nullcontext() if verifier is None else verifier.observing()
    made: Any
    with phase("passes"), torch.no_grad(), observing:
        if options.passes is not None:
            made = options.passes(graph, cost)  # checks whatever it runs
        else:
            made = run_transformation(graph, transformation)
    if not callable(made):
        raise CaptureError(
            f"compile: gm_transformation returned {type(made).__name__}, which cannot "
            "be called. Return the graph module, or a callable on its inputs."
        )
    return made


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What ranks will send, and the number of the first program that sends this."""

    plan: CommPlan
    number: int


def _agree(
    ranks: Agreement,
    graph: fx.GraphModule,
    inventory: Inventory,
    captured: Captured,
    request: Request,
) -> _Agreed:
    """Compare what this rank is about to run with other ranks."""
    facts = dict(sign(inventory))
    inputs = [
        f"{name} {fact}"
        for place, slot in enumerate(inventory.slots)
        if (slot.role is Role.INPUT or place in inventory.inputs.values())
        and isinstance(fact := facts[name := slot.name], TensorFact)
    ]
    if request.has_own_batches:
        inputs = []
    deferred = deferral_facts(graph.graph)
    plan = build_comm_plan(graph, inputs, captured.values, deferred)
    like = request.like
    if like is not None and plan.sent == like.plan:
        return _Agreed(plan.sent, like.agreed)
    ranks.compare(plan)
    if (relayout := captured.relayout) is not None:
        for axis in relayout.beside:
            ranks.compare(CommPlan(values=relayout.facts_along(axis)), axis)
    return _Agreed(plan.sent, request.agreed)


def _verify(verifier: Verifier, rivals: Rivals) -> None:
    """Compare what will be run with what the passes left."""
    lowered, rival = rivals.lowered, rivals.rival
    if lowered.running is None:
        return
    with phase("verification"):
        verifier.compare(lowered.graph.graph, "an edit outside of the passes")
        verifier.compare(lowered.running.graph, "the form that writes in place")
        verifier.compare_pipelined(lowered.graph.graph, _overlapped(lowered))
        if rival is not None and rival.running is not None:
            verifier.compare(rival.running.graph, "the form that Inductor gets")


def _certify(
    title: str,
    lowered: Lowered,
    reports: Sequence[PassReport],
    verifier: Verifier | None,
) -> Certificate:
    """What is known about what will be run."""
    return certify(
        title,
        reports,
        verifier,
        is_graph=lowered.running is not None,
        is_compiled=lowered.backend == "inductor",
        is_pipelined=is_pipelined(lowered.graph.graph),
    )


def _overlapped(lowered: Lowered) -> dict[str, fx.Graph]:
    """The graphs that steps run which leave work, as virtual ranks can run them."""
    run = lowered.run
    if not isinstance(run, IterGraphModule):
        return {}
    graphs = lowered.overlapped.items()
    return {name: without_marks(graph, run.marks) for name, graph in graphs}


def _reports(captured: fx.GraphModule, chosen: Transformed) -> tuple[PassReport, ...]:
    """What the passes said, whatever module they ran on."""
    modules: dict[int, object] = {id(each): each for each in (captured, chosen.graph)}
    if isinstance(chosen.run, (fx.GraphModule, IterGraphModule)):
        modules[id(chosen.run)] = chosen.run
    return tuple(report for each in modules.values() for report in pass_reports(each))


def _make_program(
    request: Request,
    inventory: Inventory,
    captured: Captured,
    lowered: Lowered,
    agreed: _Agreed,
    certificate: Certificate,
    progress: Progress,
) -> Program:
    signature, sizes = sign(inventory), request.sizes if captured.sizes else None
    shapes = input_shapes(signature) if request.like is None else request.like.shapes
    if sizes is not None:
        signature, shapes = with_any_size(signature, sizes.dims), sizes.shapes
    released = find_released(captured.outputs, inventory, lowered)
    running = lowered.running
    return Program(
        number=request.number,
        reason=request.reason,
        signature=signature,
        shapes=shapes,
        sizes=sizes,
        size_symbols=captured.sizes,
        outputs=captured.outputs,
        symbols=captured.symbols,
        assumptions=captured.assumptions,
        reads=captured.reads,
        memory=captured.memory,
        updated=captured.updated,
        graph=lowered.graph,
        run=lowered.run,
        backend=lowered.backend,
        in_place=lowered.in_place,
        released=released,
        loose=find_loose(captured.outputs, lowered),
        peak_memory=predict_peak(running.graph, released) if running else None,
        ledger=build_ledger(lowered.graph),
        certificate=certificate,
        agreed=agreed.number,
        plan=agreed.plan,
        peers=frozenset(agreed.plan.ranks if is_real_group() else ()),
        notes=(
            f"phases: {progress.describe()}",
            *captured.notes,
            *request.notes,
            *lowered.notes,
        ),
        phase_seconds=dict(progress.seconds),
        capture_seconds=progress.elapsed,
    )
