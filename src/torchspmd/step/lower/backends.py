"""How a program's graph is run: as generated Python, by Inductor, or as a CUDA graph."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torchspmd.errors import CaptureError
from torchspmd.step.deferral.module import IterGraphModule
from torchspmd.step.graph.inductor import check_compilable, lower
from torchspmd.step.graph.metadata import OutputKind, roles_of
from torchspmd.step.graph.optimizer_lists import is_fused_update
from torchspmd.step.lower.cuda_graph import CudaGraphRun
from torchspmd.step.lower.deferred_in_place import FormsInPlace
from torchspmd.step.lower.in_place import (
    InPlaceReport,
    compute_in_place,
    mark_returned,
    write_in_place,
    written_tensors,
)
from torchspmd.step.lower.update_calls import (
    NOT_PENDING,
    make_one_call,
    targets_of,
)
from torchspmd.step.measure.cost import offering
from torchspmd.step.passes.runner import run_transformation
from torchspmd.step.progress import note, phase
from torchspmd.step.transformation import GraphModuleTransformation

BACKENDS = ("graph", "inductor", "cudagraph")


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a program runs, and what can be said about it.

    Attributes:
        run: What is called with the graph's inputs.
        graph: The functional graph behind it, as far as it can be seen.
        running: The graph whose nodes are run; None for a callable of the user's own.
        in_place: What became of the new values of the states.
        can_release: Whether an input that the graph does not read may be left out.
        overlapped: The graphs whose nodes are run in steps that leave work for the next
            one, by form; nothing for compiled ones.
    """

    run: Callable[..., Any]
    graph: fx.GraphModule
    running: fx.GraphModule | None
    in_place: InPlaceReport
    can_release: bool = False
    overlapped: Mapping[str, fx.Graph] = field(default_factory=dict)


def needs_fixed_numbers(backend: str, transformation: object) -> bool:
    """Whether hyper-parameters become constants: compiled code takes tensors only."""
    if backend != "graph":
        return True
    return (
        isinstance(transformation, GraphModuleTransformation)
        and transformation.enable_inductor
    )


def prepare(
    graph: fx.GraphModule,
    backend: str,
    transformation: Callable[[fx.GraphModule], Any] | None,
    *,
    inputs: Callable[[], Sequence[Any]],
    before_compiling: Callable[[fx.GraphModule], None],
) -> Prepared:
    """Transform a captured graph and make it ready to run.

    A transformation may return any callable; then the captured graph is what is shown.

    Args:
        graph: The captured step.
        backend: What runs it.
        transformation: What is done to it first.
        inputs: Gives what the step is called with, to measure it on.
        before_compiling: Gets the graph that will be run; it may raise.
    """
    run: Any = graph
    if transformation is not None:
        mark_returned(graph.graph)  # as the step was captured, before any edit
        with phase("passes"), torch.no_grad(), offering(inputs):
            run = _transform(graph, transformation)
        if not callable(run):
            raise CaptureError(
                f"compile: gm_transformation returned {type(run).__name__}, which cannot "
                "be called. Return the graph module, or a callable on its inputs."
            )
    if backend != "graph" and not isinstance(run, (fx.GraphModule, IterGraphModule)):
        raise CaptureError(
            f"compile(backend={backend!r}) needs a gm_transformation that returns an "
            f"fx.GraphModule or an IterGraphModule, not {type(run).__name__}. Return the "
            "graph, or use backend='graph'."
        )
    if isinstance(run, IterGraphModule) and backend == "cudagraph":
        run = _for_replay(run)
    is_compiled = backend == "inductor" or getattr(run, "enable_inductor", False)
    if is_compiled and _runs_once(graph):
        check_compilable(graph)  # what follows it will be compiled
        note("makes the optimizer's states, so it runs once: not compiled")
        is_compiled = False
    before_compiling(_shown(run, graph))
    if isinstance(run, IterGraphModule):
        run.enable_inductor = is_compiled
        return _prepare_iterated(run)
    if not isinstance(run, fx.GraphModule):
        return Prepared(_WithoutLastIteration(run), graph, None, InPlaceReport())
    if is_compiled:
        running, report = write_for_compiler(run)
        call = _WithoutLastIteration(lower(running))
        return Prepared(call, run, running, report)
    running, report = write_in_place(run)
    if backend == "cudagraph":
        return Prepared(CudaGraphRun(running), run, running, report)
    return Prepared(_WithoutLastIteration(running), run, running, report, True)


def _transform(graph: fx.GraphModule, transformation: Callable[..., Any]) -> Any:
    """What a transformation makes; all of a user's own is checked like a pass."""
    if isinstance(transformation, GraphModuleTransformation):
        return transformation(graph)  # checks whatever it runs
    return run_transformation(graph, transformation)


def _shown(run: object, captured: fx.GraphModule) -> fx.GraphModule:
    if isinstance(run, IterGraphModule):
        return run.main_gm
    return run if isinstance(run, fx.GraphModule) else captured


def _runs_once(graph: fx.GraphModule) -> bool:
    """Whether it makes states: the next call has them, and runs another program."""
    return any(role.kind is OutputKind.CREATED for role in roles_of(graph.graph))


def _for_replay(run: IterGraphModule) -> fx.GraphModule:
    """The one graph that is replayed."""
    if run.graph.regions or run.enable_inductor:
        raise CaptureError(
            "compile(backend='cudagraph') replays one graph that is launched as it is, in "
            "which every collective ends: it takes neither work that is left for the next "
            "step (overlap_iterations, defer_updates) nor enable_inductor. Leave them "
            "out, or use backend='graph' or 'inductor'."
        )
    return run.main_gm


def _prepare_iterated(run: IterGraphModule) -> Prepared:
    """Every form of an iterated graph writes in place what it may."""
    write = write_for_compiler if run.enable_inductor else write_in_place
    whole, report = write(run.main_gm)
    forms = FormsInPlace(run, whole)
    run.finalize_setup(forms.make_ready)
    for line in forms.notes:
        note(line)
    is_plain = not run.is_deferring and not run.enable_inductor
    overlapped = forms.running if run.is_deferring and not run.enable_inductor else {}
    return Prepared(run, run.main_gm, whole, report, is_plain, dict(overlapped))


def write_for_compiler(graph: fx.GraphModule) -> tuple[fx.GraphModule, InPlaceReport]:
    """A copy whose fused optimizers are calls that write in place, or else no call is.

    A compiler chooses itself where all else is computed.
    """
    for may_write in (is_fused_update, _never):
        edited = copy.deepcopy(graph.graph)
        written = written_tensors(edited)
        report = compute_in_place(edited, written, may_write=may_write)
        updates = [n for n in edited.nodes if is_fused_update(n) and targets_of(n)]
        problems = (make_one_call(edited, [node], NOT_PENDING) for node in updates)
        problem = next(filter(None, problems), None)
        if problem is None:
            break
        note(f"Inductor copies the states of fused optimizers: {problem}")
    return fx.GraphModule(graph, edited), report


def _never(_: fx.Node) -> bool:
    return False


class _WithoutLastIteration:
    """A graph in which no iteration differs from another."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *flat: Any, last_iter: bool = False) -> Any:
        return self._run(*flat)
