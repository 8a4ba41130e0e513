"""How a program's graph is run: as generated Python, by Inductor, or as a CUDA graph."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from torchspmd import _torch
from torchspmd.errors import CaptureError
from torchspmd.step.deferral.module import IterGraphModule
from torchspmd.step.graph.collectives import gather_into_memory, reduce_in_place
from torchspmd.step.graph.inductor import check_compilable, lower
from torchspmd.step.graph.metadata import OutputKind, roles_of
from torchspmd.step.graph.optimizer_lists import is_fused_update, is_list_operator
from torchspmd.step.graph.snapshot import copy_graph
from torchspmd.step.lower.cuda_graph import CudaGraphRun
from torchspmd.step.lower.deferred_in_place import FormsInPlace
from torchspmd.step.lower.in_place import (
    InPlaceReport,
    compute_in_place,
    write_in_place,
    written_tensors,
)


@dataclass(frozen=True, slots=True)
class Transformed:
    """What the passes made of a captured graph, and how it will be run.

    Attributes:
        run: The graph, or a callable of the user's own.
        graph: The functional graph behind it, as far as it can be seen.
        backend: What runs it.
        notes: What there is to say about that, a line each.
    """

    run: Any
    graph: fx.GraphModule
    backend: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Lowered:
    """What a program runs, and what can be said about it.

    Attributes:
        run: What is called with the graph's inputs.
        graph: The functional graph behind it, as far as it can be seen.
        running: The graph whose nodes are run; None for a callable of the user's own.
        in_place: What became of the new values of the states.
        can_release: Whether an input that the graph does not read may be left out.
        overlapped: The graphs whose nodes are run in steps that leave work for the next
            one, by form; nothing for compiled ones.
        notes: What else was done, a line each.
    """

    run: Callable[..., Any]
    graph: fx.GraphModule
    running: fx.GraphModule | None = None
    in_place: InPlaceReport = field(default_factory=InPlaceReport)
    can_release: bool = False
    overlapped: Mapping[str, fx.Graph] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def choose_backend(made: Any, captured: fx.GraphModule, backend: str) -> Transformed:
    """How to run what a transformation returned; raises where that cannot be done.

    Args:
        made: A graph module, or any callable; then the captured graph is what is shown.
        captured: The step as it was captured.
        backend: What the user asked for.
    """
    if backend != "graph" and not isinstance(made, (fx.GraphModule, IterGraphModule)):
        raise CaptureError(
            f"compile(backend={backend!r}) needs a gm_transformation that returns an "
            f"fx.GraphModule or an IterGraphModule, not {type(made).__name__}. Return the "
            "graph, or use backend='graph'."
        )
    if isinstance(made, IterGraphModule) and backend == "cudagraph":
        made = _for_replay(made)
    notes: tuple[str, ...] = ()
    if getattr(made, "enable_inductor", False):
        backend = "inductor"
    if backend == "inductor" and _runs_once(captured):
        check_compilable(captured)  # what follows it will be compiled
        notes = ("makes the optimizer's states, so it runs once: not compiled",)
        backend = "graph"
    shown = made.main_gm if isinstance(made, IterGraphModule) else made
    graph = shown if isinstance(shown, fx.GraphModule) else captured
    return Transformed(made, graph, backend, notes)


def lower_graph(chosen: Transformed) -> Lowered:
    """Make a graph ready to run."""
    run, graph = chosen.run, chosen.graph
    if isinstance(run, IterGraphModule):
        run.enable_inductor = chosen.backend == "inductor"
        return _lower_iterated(run, chosen.notes)
    if not isinstance(run, fx.GraphModule):
        return Lowered(_WithoutLastIteration(run), graph, notes=chosen.notes)
    if chosen.backend == "inductor":
        running, report = write_for_compiler(run)
        compiled, note = lower(running)
        call = _WithoutLastIteration(compiled)
        return Lowered(call, graph, running, report, notes=(*chosen.notes, note))
    running, report = write_in_place(run)
    if chosen.backend == "cudagraph":
        replayed = CudaGraphRun(running)
        return Lowered(replayed, graph, running, report, notes=chosen.notes)
    call = _WithoutLastIteration(running)
    return Lowered(call, graph, running, report, can_release=True, notes=chosen.notes)


def _runs_once(graph: fx.GraphModule) -> bool:
    """Whether it makes states: the next call has them, and runs another program."""
    return any(role.kind is OutputKind.CREATED for role in roles_of(graph.graph))


def _for_replay(run: IterGraphModule) -> fx.GraphModule:
    """The one graph that is replayed."""
    if run.graph.regions or run.enable_inductor:
        raise CaptureError(
            "compile(backend='cudagraph') replays one graph that is launched as it is, in "
            "which every collective ends: it takes neither work that is left for the next "
            "step (overlap, defer_updates) nor enable_inductor. Leave them "
            "out, or use backend='graph' or 'inductor'."
        )
    return run.main_gm


def _lower_iterated(run: IterGraphModule, notes: tuple[str, ...]) -> Lowered:
    """Every form of an iterated graph writes in place what it may."""
    write = write_for_compiler if run.enable_inductor else write_in_place
    whole, report = write(run.main_gm)
    forms = FormsInPlace(run, whole)
    run.finalize_setup(forms.make_ready)
    is_plain = not run.is_deferring and not run.enable_inductor
    overlapped = forms.running if run.is_deferring and not run.enable_inductor else {}
    return Lowered(
        run,
        run.main_gm,
        whole,
        report,
        is_plain,
        dict(overlapped),
        (*notes, *dict.fromkeys(forms.notes)),
    )


def write_for_compiler(graph: fx.GraphModule) -> tuple[fx.GraphModule, InPlaceReport]:
    """A copy in which fused optimizers and collectives write in place, and little else.

    A compiler chooses itself where all else is computed.
    """
    edited, _ = copy_graph(graph.graph)
    written = written_tensors(edited)
    report = compute_in_place(edited, written, may_write=_is_called)
    reduce_in_place(edited)
    gather_into_memory(edited)
    return _torch.lazy_module(graph, edited), report


def _is_called(node: fx.Node) -> bool:
    """Whether an operator is called in place: a fused update, and counters beside it."""
    if is_fused_update(node):
        return True
    return is_list_operator(node) and all(
        source.meta["val"].numel() == 1 for source in node.all_input_nodes
    )


class _WithoutLastIteration:
    """A graph in which no iteration differs from another."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *flat: Any, last_iter: bool = False) -> Any:
        return self._run(*flat)
