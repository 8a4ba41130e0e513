"""From the first call of a step to the program that serves it, phase by phase."""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.errors import CaptureError
from torchspmd.step.capture.dynamic import Sizes, input_shapes, with_any_size
from torchspmd.step.capture.guards import TensorFact, sign
from torchspmd.step.capture.initial_states import UnusedStatesError
from torchspmd.step.capture.inventory import Inventory
from torchspmd.step.capture.override import Overrides
from torchspmd.step.capture.spread import Spread
from torchspmd.step.capture.trace import (
    Captured,
    assumes_other_sizes,
    capture,
    check_sizes,
    without_collection,
)
from torchspmd.step.deferral.iter_graph import deferral_facts
from torchspmd.step.deferral.module import IterGraphModule
from torchspmd.step.graph.collectives import build_ledger, peers_of
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
from torchspmd.step.measure.cost import measure_graph
from torchspmd.step.passes.runner import pass_reports, run_transformation
from torchspmd.step.program import Program, find_loose, find_released
from torchspmd.step.progress import Progress, logger, phase
from torchspmd.step.rank_agreement import Agreement, CommPlan, build_comm_plan
from torchspmd.step.transformation import GraphModuleTransformation
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
        backend: What runs its graph.
        overrides: Stand-ins for its modules.
        verify: How to compare graphs; None to compare nothing.
    """

    function: Callable[..., Any]
    name: str
    transformation: Callable[[fx.GraphModule], Any] | None
    backend: str
    overrides: Overrides
    verify: Verification | None


@dataclass(frozen=True, slots=True)
class Request:
    """Which program to build.

    Attributes:
        number: Which program of its step it is.
        reason: Why it is needed.
        sizes: The sizes of tensor arguments that are to be symbols, if that is possible.
        like: A program of the same step for other sizes. Where both send the same, other
            ranks need not be asked: they may be running that one.
        has_own_batches: Whether ranks may have batches of other shapes.
        agreed: How many programs the ranks have agreed on.
    """

    number: int
    reason: str
    sizes: Sizes | None = None
    like: Program | None = None
    has_own_batches: bool = False
    agreed: int = 0


def build_program(
    options: StepOptions,
    inventory: Inventory,
    spread: Spread,
    ranks: Agreement,
    request: Request,
) -> Program:
    """Capture a step for the tensors of one call, and make it ready to run.

    Args:
        options: The step, and how to compile it.
        inventory: What the call works on.
        spread: How the step is spread over ranks.
        ranks: The ranks that build the program together.
        request: Which program it is to be.
    """
    start = time.perf_counter()
    title = f"{options.name}, program {request.number}"
    if options.backend == "inductor" and any(s.tensor.is_cuda for s in inventory.slots):
        _torch.start_kernel_compilers()
    with (
        Progress(f"compile {options.name}") as progress,
        without_collection(),
    ):
        transformed = _transform_any_size(
            options, inventory, spread, ranks, request, title
        )
        captured, chosen = transformed.captured, transformed.chosen
        with _torch.without_autocast():  # its casts are nodes of the graph
            with phase("agreement"):
                plan, agreed = _agree(ranks, chosen.graph, inventory, captured, request)
            with phase("lowering"):
                lowered = lower_graph(chosen)
            certificate = _certify(
                title, transformed.graph, lowered, transformed.verifier, chosen.backend
            )
        if ranks.is_used:
            ranks.wait_until_ready(peers_of(lowered.graph))
        if captured.relayout is not None:
            captured.relayout.commit()  # all ranks run this program now
    notes = [*captured.notes, *transformed.notes, *lowered.notes]
    if isinstance(options.transformation, GraphModuleTransformation):
        notes += options.transformation.notes
    signature = sign(inventory)
    sizes = request.sizes if captured.sizes else None
    if sizes is not None:
        signature = with_any_size(signature, sizes.dims)
    with phase("program", progress.what):
        running = lowered.running
        released = find_released(captured.outputs, inventory, lowered)
        return Program(
            number=request.number,
            graph=lowered.graph,
            signature=signature,
            outputs=captured.outputs,
            symbols=captured.symbols,
            assumptions=captured.assumptions,
            reads=captured.reads,
            memory=captured.memory,
            updated=captured.updated,
            run=lowered.run,
            released=released,
            loose=find_loose(captured.outputs, lowered),
            in_place=lowered.in_place,
            notes=(f"phases: {progress.describe()}", *notes),
            phase_seconds=dict(progress.seconds),
            peak_memory=predict_peak(running.graph, released) if running else None,
            reason=request.reason,
            certificate=certificate,
            ledger=build_ledger(lowered.graph),
            agreed=agreed,
            plan=plan,
            shapes=_shapes(inventory, request, sizes),
            sizes=sizes,
            size_symbols=captured.sizes,
            capture_seconds=time.perf_counter() - start,
        )


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A captured step, and what the passes made of it."""

    captured: Captured
    graph: fx.GraphModule
    chosen: Transformed
    verifier: Verifier | None
    notes: tuple[str, ...]


def _transform_any_size(
    options: StepOptions,
    inventory: Inventory,
    spread: Spread,
    ranks: Agreement,
    request: Request,
    title: str,
) -> _Attempt:
    """Capture the step, with symbols for sizes where they are asked for and possible."""

    def transform(sizes: Sizes | None) -> _Attempt:
        return _transform(options, inventory, spread, ranks, request, sizes, title)

    def check(made: _Attempt) -> _Attempt:
        relayout = made.captured.relayout
        laid_out = inventory if relayout is None else relayout.inventory
        check_sizes(made.chosen.graph, laid_out.flat_inputs())
        return made

    if request.sizes is None:
        return transform(None)
    own = replace(request.sizes, shapes=input_shapes(sign(inventory)))
    try:
        made = transform(request.sizes)
        if assumes_other_sizes(made.captured, inventory):
            made = transform(own)
            if assumes_other_sizes(made.captured, inventory):
                raise CaptureError("a size of 0 or 1 has a program of its own")
        return check(made)
    except UnusedStatesError:
        raise  # the step is traced again, with symbols
    except Exception as error:
        logger.info("%s: sizes stay fixed", options.name, exc_info=True)
        made = transform(None)  # a refusal is one of this, too
        why = str(error).strip().partition("\n")[0]
        note = f"one program for each size, since sizes cannot be symbols here: {why}"
        return replace(made, notes=(*made.notes, note))


def _transform(
    options: StepOptions,
    inventory: Inventory,
    spread: Spread,
    ranks: Agreement,
    request: Request,
    sizes: Sizes | None,
    title: str,
) -> _Attempt:
    captured = capture(
        options.function,
        options.name,
        inventory,
        spread,
        compare_values=request.number == 0,
        sizes=sizes,
    )
    laid_out = captured.relayout.inventory if captured.relayout else inventory
    graph = _override(captured.graph, laid_out, options.overrides)
    with _torch.without_autocast():  # its casts are nodes of the graph
        cost, notes = _measure(graph, laid_out, options, ranks)
        verifier = _make_verifier(title, graph, laid_out, options.verify)
        made = _run_passes(graph, options.transformation, cost, verifier)
        chosen = choose_backend(made, graph, options.backend)
    return _Attempt(captured, graph, chosen, verifier, tuple(notes))


def _shapes(
    inventory: Inventory, request: Request, sizes: Sizes | None
) -> Mapping[str, tuple[int, ...]]:
    """The shapes of tensor arguments that choices were made by."""
    if sizes is not None:
        return sizes.shapes
    if request.like is not None:
        return request.like.shapes
    return input_shapes(sign(inventory))


def _override(
    graph: fx.GraphModule, inventory: Inventory, overrides: Overrides
) -> fx.GraphModule:
    with torch.no_grad():
        return overrides.transform(graph, inventory.flat_state())


def _measure(
    graph: fx.GraphModule,
    inventory: Inventory,
    options: StepOptions,
    ranks: Agreement,
) -> tuple[CostModel | None, tuple[str, ...]]:
    """What passes choose by, where they ask for measured rates, and lines about it."""
    asked = options.transformation
    if not isinstance(asked, GraphModuleTransformation) or not asked.measures_cost:
        return None, ()
    fuses = options.backend == "inductor"
    return measure_graph(graph, inventory.flat_inputs(), ranks, asked.cost, fuses=fuses)


def _make_verifier(
    title: str, graph: fx.GraphModule, inventory: Inventory, asked: Verification | None
) -> Verifier | None:
    if asked is None:
        return None
    with phase("verification"):
        return Verifier(title, graph, inventory.flat_inputs(), asked)


def _run_passes(
    graph: fx.GraphModule,
    transformation: Callable[..., Any] | None,
    cost: CostModel | None,
    verifier: Verifier | None,
) -> Any:
    """What a transformation makes of the graph; all of a user's own is checked."""
    if transformation is None:
        return graph
    mark_returned(graph.graph)  # as the step was captured, before any edit
    observing = contextlib.nullcontext() if verifier is None else verifier.observing()
    made: Any
    with phase("passes"), torch.no_grad(), observing:
        if isinstance(transformation, GraphModuleTransformation):
            made = transformation(graph, cost)  # checks whatever it runs
        else:
            made = run_transformation(graph, transformation)
    if not callable(made):
        raise CaptureError(
            f"compile: gm_transformation returned {type(made).__name__}, which cannot "
            "be called. Return the graph module, or a callable on its inputs."
        )
    return made


def _agree(
    ranks: Agreement,
    graph: fx.GraphModule,
    inventory: Inventory,
    captured: Captured,
    request: Request,
) -> tuple[CommPlan, int]:
    """Compare what this rank is about to run with other ranks; the plan, and its number."""
    facts = dict(sign(inventory))
    inputs = [
        f"{name} {fact}"
        for slot in inventory.inputs.values()
        if isinstance(fact := facts[name := inventory.slots[slot].name], TensorFact)
    ]
    if request.has_own_batches:
        inputs = []
    deferred = deferral_facts(graph.graph)
    plan = build_comm_plan(graph, inputs, captured.values, deferred)
    like = request.like
    if like is not None and plan.sent == like.plan:
        return plan.sent, like.agreed
    ranks.compare(plan)
    if (relayout := captured.relayout) is not None:
        for axis in relayout.beside:
            ranks.compare(CommPlan(values=relayout.facts_along(axis)), axis)
    return plan.sent, request.agreed


def _certify(
    title: str,
    captured: fx.GraphModule,
    lowered: Lowered,
    verifier: Verifier | None,
    backend: str,
) -> Certificate:
    """Compare what will be run with what the passes left, and say what is known."""
    reports = _reports(captured, lowered) if verifier is None else verifier.reports
    if verifier is not None and lowered.running is not None:
        with phase("verification"):
            verifier.compare(lowered.graph.graph, "an edit outside of the passes")
            verifier.compare(lowered.running.graph, "the form that writes in place")
            verifier.compare_pipelined(lowered.graph.graph, _overlapped(lowered))
    return certify(
        title,
        reports,
        verifier,
        is_graph=lowered.running is not None,
        is_compiled=backend == "inductor",
        is_pipelined=is_pipelined(lowered.graph.graph),
    )


def _overlapped(lowered: Lowered) -> dict[str, fx.Graph]:
    """The graphs that steps run which leave work, as virtual ranks can run them."""
    run = lowered.run
    if not isinstance(run, IterGraphModule):
        return {}
    graphs = lowered.overlapped.items()
    return {name: without_marks(graph, run.marks) for name, graph in graphs}


def _reports(captured: fx.GraphModule, lowered: Lowered) -> tuple[PassReport, ...]:
    """What the passes said, whatever module they ran on."""
    modules: dict[int, object] = {id(each): each for each in (captured, lowered.graph)}
    if isinstance(lowered.run, (fx.GraphModule, IterGraphModule)):
        modules[id(lowered.run)] = lowered.run
    return tuple(report for each in modules.values() for report in pass_reports(each))
