"""How a program's graph is run: as generated Python, by Inductor, or as a CUDA graph."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from torchspmd.errors import CaptureError
from torchspmd.step.deferral.module import IterGraphModule
from torchspmd.step.graph.generated import RunningGraph
from torchspmd.step.graph.inductor import CompiledPieces, check_compilable
from torchspmd.step.graph.metadata import OutputKind, roles_of
from torchspmd.step.lower.in_place import (
    InPlaceReport,
    write_for_compiler,
    write_in_place,
)
from torchspmd.step.lower.pending_in_place import CompileGraph, FormsInPlace


@dataclass(frozen=True, slots=True)
class Transformed:
    """What the passes made of a captured graph, and how it will be run.

    Attributes:
        run: The graph, or a callable of the user's own.
        graph: The functional graph behind it, as far as it can be seen.
        backend: What runs it.
        notes: What there is to say about both, a line each.
    """

    run: Any
    graph: fx.GraphModule
    backend: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """What ``backend="auto"`` has chosen for programs that send the same.

    Attributes:
        taken: The backend that runs them; None while that is measured.
        needed: The backends that such a program is to have when it is built.
        seconds: The time of a call by backend, on the slowest rank; empty where nothing
            was measured.
        why: Why there is nothing to measure, or how that is done.
    """

    taken: str | None
    needed: tuple[str, ...] = ("graph",)
    seconds: Mapping[str, float] = field(default_factory=dict)
    why: str = ""

    def __str__(self) -> str:
        """One line for ``explain()``.

        >>> times = {"graph": 0.0613, "inductor": 0.066}
        >>> print(BackendChoice("graph", ("graph",), times, "medians"))
        backend='auto': graph taken; graph 61.30 ms, inductor 66.00 ms a call (medians)
        >>> print(BackendChoice("graph", why="the process group is fake"))
        backend='auto': graph taken, not measured: the process group is fake
        """
        if self.taken is None:
            return f"backend='auto': {self.why}"
        if not self.seconds:
            return f"backend='auto': {self.taken} taken, not measured: {self.why}"
        times = (f"{name} {each * 1e3:.2f} ms" for name, each in self.seconds.items())
        return f"backend='auto': {self.taken} taken; {', '.join(times)} a call ({self.why})"


@dataclass(frozen=True, slots=True)
class Lowered:
    """What a program runs, and what can be said about it.

    Attributes:
        run: What is called with the graph's inputs.
        graph: The functional graph behind it, as far as it can be seen.
        backend: What runs it.
        running: The graph whose nodes are run; None for a callable of the user's own.
        in_place: What became of the new values of the states.
        can_release: Whether an input that the graph does not read may be left out.
        overlapped: The graphs whose nodes are run in steps that leave work for the next
            one, by form; nothing for compiled ones.
        notes: What else was done, a line each.
    """

    run: Callable[..., Any]
    graph: fx.GraphModule
    backend: str
    running: fx.GraphModule | None = None
    in_place: InPlaceReport = field(default_factory=InPlaceReport)
    can_release: bool = False
    overlapped: Mapping[str, fx.Graph] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def choose_backend(
    made: Any, captured: fx.GraphModule, backend: str, notes: tuple[str, ...] = ()
) -> Transformed:
    """How to run what a transformation returned; raises where that cannot be done.

    Args:
        made: A graph module, or any callable; then the captured graph is what is shown.
        captured: The step as it was captured.
        backend: What the user asked for; for ``"auto"`` the graph runs first.
        notes: What there is to say about the transformation, a line each.
    """
    is_graph = isinstance(made, (fx.GraphModule, IterGraphModule))
    if backend in ("inductor", "cudagraph") and not is_graph:
        raise CaptureError(
            f"compile(backend={backend!r}) needs a gm_transformation that returns an "
            f"fx.GraphModule or an IterGraphModule, not {type(made).__name__}. Return the "
            "graph, or use backend='graph'."
        )
    if isinstance(made, IterGraphModule):
        _check_inductor(made, backend)
        made = _for_replay(made) if backend == "cudagraph" else made
    if backend == "inductor" and _runs_once(captured):
        check_compilable(captured)  # what follows it will be compiled
        notes += ("makes the optimizer's states, so it runs once: not compiled",)
        backend = "graph"
    shown = made.main_gm if isinstance(made, IterGraphModule) else made
    graph = shown if isinstance(shown, fx.GraphModule) else captured
    return Transformed(made, graph, "graph" if backend == "auto" else backend, notes)


def for_inductor(chosen: Transformed) -> Transformed:
    """The same graph a second time, to be run by Inductor; raises where it cannot be."""
    run = chosen.run
    if not isinstance(run, (fx.GraphModule, IterGraphModule)):
        raise CaptureError(
            "gm_transformation returned a callable of its own, not a graph"
        )
    check_compilable(chosen.graph)
    if isinstance(run, IterGraphModule):
        run = IterGraphModule(chosen.graph)
        run.graph = chosen.graph.graph  # with what is moved to the next iteration
    return replace(chosen, run=run, backend="inductor")


def lower_graph(
    chosen: Transformed,
    compile_graph: CompileGraph,
    replay_graph: Callable[[fx.GraphModule], Callable[..., Any]],
) -> Lowered:
    """Make a graph ready to run: every form of it writes in place what it may.

    Args:
        chosen: The graph, and its backend.
        compile_graph: Compiles with Inductor.
        replay_graph: Makes a CUDA graph.
    """
    run, graph, notes = chosen.run, chosen.graph, chosen.notes
    if not isinstance(run, (fx.GraphModule, IterGraphModule)):
        return Lowered(run, graph, chosen.backend, notes=notes)
    backend = chosen.backend
    is_compiled = backend == "inductor"
    write = write_for_compiler if is_compiled else write_in_place
    running, report = write(graph)
    overlapped: Mapping[str, fx.Graph] = {}
    if isinstance(run, IterGraphModule):
        forms = FormsInPlace(run, running, compile_graph if is_compiled else None)
        run.finalize_setup(forms.make_ready)
        notes += tuple(dict.fromkeys(forms.notes))
        if run.is_deferring and not is_compiled:
            overlapped = dict(forms.running)
    elif is_compiled:
        run, note = compile_graph(running, CompiledPieces())
        notes += (note,)
    elif backend == "cudagraph":
        run = replay_graph(running)
    else:
        run = RunningGraph.of(running)
    can_release = backend == "graph" and not overlapped
    return Lowered(run, graph, backend, running, report, can_release, overlapped, notes)


def _runs_once(graph: fx.GraphModule) -> bool:
    """Whether it makes states: the next call has them, and runs another program."""
    return any(role.kind is OutputKind.CREATED for role in roles_of(graph.graph))


def _check_inductor(run: IterGraphModule, backend: str) -> None:
    """Refuse a module that asks for Inductor where ``compile`` was asked for another."""
    if run.enable_inductor and backend != "inductor":
        raise CaptureError(
            f"compile(backend={backend!r}): gm_transformation returned an IterGraphModule "
            "with enable_inductor=True, but the step was captured for another backend. "
            "Pass backend='inductor', or leave out enable_inductor."
        )


def _for_replay(run: IterGraphModule) -> fx.GraphModule:
    """The one graph that is replayed."""
    if run.graph.regions:
        raise CaptureError(
            "compile(backend='cudagraph') replays one graph that is launched as it is, in "
            "which every collective ends: it takes no work that is left for the next step "
            "(overlap, defer_updates). Leave that out, or use backend='graph' or "
            "'inductor'."
        )
    return run.main_gm
