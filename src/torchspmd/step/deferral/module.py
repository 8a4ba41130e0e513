"""A step's graph as it is iterated: the object that passes edit and a program runs."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import fx

from torchspmd import _torch
from torchspmd.errors import LostStateError, UsageError
from torchspmd.step.deferral.forms import Stage, creates_state, derive, derive_flush
from torchspmd.step.deferral.iter_graph import IterGraph
from torchspmd.step.deferral.regions import Iteration, written_by
from torchspmd.step.deferral.state import Event, PendingUpdates, State
from torchspmd.step.graph.metadata import readable_name, written_state
from torchspmd.step.graph.simulate import left_under_way
from torchspmd.step.graph.snapshot import Snapshot

Runnable = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Marks:
    """What a running graph calls around the writes of a region, with its number."""

    begin: Callable[[int], None]
    end: Callable[[int], None]


@final
class IterGraphModule:
    """A captured step that is run again and again, with work left for the next time.

    Passes edit ``graph``; ``finalize_setup`` ends that. Each call is one iteration. Work
    that was moved to the next iteration is done there, in the call with
    ``last_iter=True``, or by ``flush``.

    Args:
        main_gm: The graph of one iteration.
        enable_inductor: Compile all forms of it ahead when it is finished.

    Example:
        >>> import torch
        >>> from torch import fx
        >>> double = fx.symbolic_trace(lambda x: x + x)
        >>> module = IterGraphModule(double)
        >>> module.finalize_setup()
        >>> module(torch.ones(2)).tolist()
        [2.0, 2.0]
    """

    def __init__(self, main_gm: fx.GraphModule, enable_inductor: bool = False) -> None:
        if not isinstance(main_gm, fx.GraphModule):
            raise UsageError(
                f"IterGraphModule(main_gm={type(main_gm).__name__}): pass the "
                "fx.GraphModule of one iteration, as gm_transformation gets it."
            )
        self.main_gm = _torch.lazy_module(main_gm, IterGraph.copy_of(main_gm.graph))
        self.enable_inductor = enable_inductor
        self.latest_snapshot: Snapshot | None = None  # for the runner of passes
        self.latest_values: tuple[Any, Any] | None = None  # for their proofs
        self._forms: _Forms | None = None
        self._pending = PendingUpdates()
        self._make_ready: Callable[[str, fx.GraphModule], Runnable] = self._prepare

    @property
    def graph(self) -> IterGraph:
        """The graph of one iteration, with what is moved to the next."""
        return _marked_graph(self.main_gm)

    @graph.setter
    def graph(self, graph: fx.Graph) -> None:
        regions = getattr(graph, "regions", self.graph.regions)
        copy = IterGraph.copy_of(graph, regions)
        copy.is_frozen = self.graph.is_frozen  # another graph does not lift that
        self.main_gm.graph = copy

    def recompile(self) -> None:
        """Generate the graph's code again after an edit; what is run is derived anew."""
        if self.is_pending:
            raise UsageError(
                "IterGraphModule: the graph cannot be edited while work of the iteration "
                "before is pending. Call flush(), or run one with last_iter=True, first."
            )
        self.main_gm.recompile()
        self._forms = None

    def freeze_cross_iter_movement(self) -> None:
        """End moving nodes to the next iteration."""
        self.graph.freeze_cross_iter_movement()

    def finalize_setup(
        self, prepare: Callable[[str, fx.GraphModule], Runnable] | None = None
    ) -> None:
        """End editing: derive and, where asked for, compile what is run.

        Args:
            prepare: Turns a derived graph, given with its name, into what is called:
                at once what every run needs, the others when they are first run.
                Inductor or the graph itself by default.
        """
        self.recompile()
        self.latest_snapshot = self.latest_values = None
        self.freeze_cross_iter_movement()
        self._make_ready = prepare or self._make_ready
        self._forms = _Forms(self.main_gm, self._make_ready)

    @property
    def state(self) -> State:
        """How far the updates are that an earlier iteration left."""
        return self._pending.state

    @property
    def is_pending(self) -> bool:
        """Whether work of an earlier iteration is still to be done, or is lost."""
        return self.state is not State.IDLE

    @property
    def unfinished(self) -> frozenset[int]:
        """Regions whose pending updates are still to be done, by number."""
        if self.state is State.IDLE:
            return frozenset()
        return frozenset(range(len(self.graph.regions))) - self._pending.done

    @property
    def lost(self) -> tuple[int, ...]:
        """The inputs that must be loaded again after an exception, by place."""
        if self.state is State.WRITING:
            return _places(self.graph, set(written_state(self.graph).values()))
        if self.state is State.UPDATING:  # the updates that have not begun are dropped
            return self.states_of(self.unfinished)
        return ()

    @property
    def marks(self) -> Marks:
        """What a graph that updates in place calls around the writes of each region."""
        return Marks(self._begin, self._end)

    def states_of(self, regions: Collection[int]) -> tuple[int, ...]:
        """The inputs that regions write, by place."""
        return _states_of(self.graph, regions)

    @property
    def deferred_states(self) -> tuple[int, ...]:
        """The inputs that all regions write, by place."""
        return self._finished().states

    @property
    def is_deferring(self) -> bool:
        """Whether calls leave work for the next one."""
        return self._finished().is_deferring

    @property
    def forms(self) -> dict[str, fx.GraphModule]:
        """The graphs that are run, by name; one when nothing is deferred."""
        return self._finished().graphs

    @property
    def num_carried(self) -> int:
        """How many values go from one iteration to the next."""
        return self._finished().num_carried

    def forward(self, *args: Any, last_iter: bool = False) -> Any:
        """Run one iteration.

        An output that belongs to work left for the next iteration is the one that the
        iteration before left, or None in the first.
        """
        return self.run_and_write(args, lambda outputs: outputs, last_iter=last_iter)

    __call__ = forward

    def run_and_write(
        self, args: Sequence[Any], write: Callable[[Any], Any], *, last_iter: bool
    ) -> Any:
        """Run one iteration and write its outputs where they belong, as one thing.

        An exception before the writing leaves what was pending, so that the iteration can
        be run again. One within it leaves states of both iterations: they are lost.

        Args:
            args: The inputs of the step.
            write: Takes the outputs; what it returns is returned.
            last_iter: Leave no work for a next iteration.
        """
        forms = self._finished()
        self._check_can_run()
        is_first = self.state is State.IDLE
        if not forms.is_deferring or (is_first and last_iter):
            return write(forms.whole(*args))
        name = "first" if is_first else "last" if last_iter else "steady"
        outputs, left = forms.run(name, args, self._pending.carried)
        self._advance(Event.BEGIN_WRITE, left=left)
        result = write(outputs)
        if last_iter:
            self._advance(Event.FINISH)
        else:
            self._advance(Event.LEAVE, carried=left, left=(), done=frozenset())
        return result

    def flush(
        self, *args: Any, write: Callable[[list[Any]], Any] | None = None
    ) -> list[Any] | None:
        """Do what is pending; the outputs that this gives, None for all others.

        After an exception that is what has not been done.

        Args:
            args: The inputs of the step. Only state is read.
            write: Puts the outputs where they belong. After an exception within it, what
                was not made in place is lost.
        """
        self._check_not_lost()
        if self.state is State.IDLE:
            return None
        carried = self._pending.carried
        outputs = self._finished().flush(args, carried, self.unfinished)
        if self.unfinished:  # not done in place, but by `write`
            self._advance(Event.BEGIN_UPDATE)
        if write is not None:
            write(outputs)
        self._advance(Event.FINISH)
        return outputs

    def drop_pending(self) -> None:
        """Forget what is pending: its states have got other values, from a checkpoint."""
        for values in (self._pending.left, self._pending.carried):
            self._finished().wait_for(values)
        self._advance(Event.DROP)

    def _advance(self, event: Event, **changes: Any) -> None:
        self._pending = self._pending.after(event, **changes)

    def _begin(self, region: int) -> None:
        self._advance(Event.BEGIN_UPDATE)

    def _end(self, region: int) -> None:
        self._advance(Event.END_UPDATE, done=self._pending.done | {region})

    def _check_can_run(self) -> None:
        self._check_not_lost()
        if self.state is State.PARTLY_DONE:
            raise UsageError(
                "IterGraphModule: an exception ended the iteration before after some of "
                "its pending work was done. Call flush() to do the rest, then run "
                "the iteration again."
            )

    def _check_not_lost(self) -> None:
        if self.state.is_lost:
            places = self.graph.find_nodes(op="placeholder")
            raise LostStateError.of([readable_name(places[n]) for n in self.lost])

    def print_readable(self, print_output: bool = True) -> str:
        """The graph of one iteration as readable Python."""
        return self.main_gm.print_readable(print_output=print_output)

    def _finished(self) -> "_Forms":
        if self._forms is None:
            self.finalize_setup()
        assert self._forms is not None
        return self._forms

    def _prepare(self, name: str, graph: fx.GraphModule) -> Runnable:
        if not self.enable_inductor:
            return graph
        from torchspmd.step.graph.inductor import lower

        return lower(graph)[0]


class _Forms:
    """The derived graphs of a finished module, ready to run."""

    def __init__(
        self, main: fx.GraphModule, prepare: Callable[[str, fx.GraphModule], Runnable]
    ) -> None:
        graph = main.graph
        assert isinstance(graph, IterGraph)
        self._main, self._graph = main, graph
        self.is_deferring = bool(graph.regions) and not creates_state(graph)
        self._graphs = {"whole": main}
        self.num_carried = 0
        if self.is_deferring:
            self._pipeline = derive(graph, graph.regions)
            self.num_carried = self._pipeline.num_carried
            self._num_outputs = self._pipeline.num_outputs
        self._prepare = prepare
        # Asked for at each call, for which the graph is not to be walked again.
        self.states = _states_of(graph, range(len(graph.regions)))
        needed = ("first", "steady") if self.is_deferring else ("whole",)
        self._runs = {name: prepare(name, self._graph_of(name)) for name in needed}

    @property
    def graphs(self) -> dict[str, fx.GraphModule]:
        """The graphs that are run, by name."""
        for name in ("first", "steady", "last", "flush") if self.is_deferring else ():
            self._graph_of(name)
        return self._graphs

    def whole(self, *args: Any) -> Any:
        """One iteration with nothing pending and nothing left."""
        return self._run_of("whole")(*args)

    def run(
        self, name: str, args: Sequence[Any], carried: tuple[Any, ...]
    ) -> tuple[list[Any], tuple[Any, ...]]:
        """The step's outputs, None where this form has none, and what is left."""
        return self._call(self._stage_of(name), self._run_of(name), [*args, *carried])

    def flush(
        self, args: Sequence[Any], carried: tuple[Any, ...], unfinished: frozenset[int]
    ) -> list[Any]:
        """The outputs of the regions that are not done yet, None for all others."""
        regions = self._graph.regions
        if not unfinished:
            return [None] * self._num_outputs
        if len(unfinished) == len(regions):
            return self.run("flush", args, carried)[0]
        # After an exception only: not worth keeping.
        stage = derive_flush(self._graph, regions, sorted(unfinished))
        run = self._prepare("flush", fx.GraphModule(self._main, stage.graph))
        return self._call(stage, run, [*args, *carried])[0]

    def wait_for(self, carried: Sequence[Any]) -> None:
        """Wait for reductions that no iteration will wait for.

        Torch keeps each of them, with its memory, until it is waited for.
        """
        if carried:
            steady = self._graph_of("steady").graph
            for place in left_under_way(steady, self.num_carried):
                _torch.WAIT(carried[place])

    def _call(
        self, stage: Stage, run: Runnable, inputs: list[Any]
    ) -> tuple[list[Any], tuple[Any, ...]]:
        # Not by a call of the module: torch.fx traces those where a model is traced.
        values = (
            run.forward(*inputs) if isinstance(run, fx.GraphModule) else run(*inputs)
        )
        outputs: list[Any] = [None] * self._num_outputs
        for place, value in zip(stage.outputs, values, strict=False):
            outputs[place] = value
        return outputs, tuple(values[len(stage.outputs) :])

    def _run_of(self, name: str) -> Runnable:
        if name not in self._runs:
            self._runs[name] = self._prepare(name, self._graph_of(name))
        return self._runs[name]

    def _graph_of(self, name: str) -> fx.GraphModule:
        if name not in self._graphs:
            graph = self._stage_of(name).graph
            self._graphs[name] = _torch.lazy_module(self._main, graph)
        return self._graphs[name]

    def _stage_of(self, name: str) -> Stage:
        return getattr(self._pipeline, name)


def _states_of(graph: IterGraph, regions: Collection[int]) -> tuple[int, ...]:
    """The inputs that regions write, by place."""
    names = {name for n in regions for name in graph.regions[n].nodes}
    moved = [node for node in graph.nodes if node.name in names]
    return _places(graph, written_by(Iteration.of(graph), moved))


def _places(graph: fx.Graph, inputs: Collection[fx.Node]) -> tuple[int, ...]:
    placeholders = graph.find_nodes(op="placeholder")
    return tuple(n for n, node in enumerate(placeholders) if node in inputs)


def _marked_graph(main: object) -> IterGraph:
    graph = getattr(main, "graph", None)
    if not isinstance(graph, IterGraph):
        raise UsageError(
            "IterGraphModule: main_gm is no longer a graph module with marks on what is "
            "moved. Edit its graph, or set the graph of the IterGraphModule (gm.graph = "
            "...); set neither main_gm nor main_gm.graph."
        )
    return graph
