"""A step's graph as it is iterated: the object that passes edit and a program runs."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import fx

from torchspmd.errors import LostStateError, UsageError
from torchspmd.step.deferral.forms import Forms, Runnable
from torchspmd.step.deferral.iter_graph import IterGraph
from torchspmd.step.deferral.regions import written_by
from torchspmd.step.graph.metadata import readable_name, written_state

# ----------------------------------------------------------------------------
# What an iteration left for the next one, and how much of it is done.


@dataclass(slots=True)
class PendingUpdates:
    """Work of an iteration that is over; its regions are known by number.

    Attributes:
        carried: The values that the work needs.
        begun: Regions that have begun to write into their states.
        done: Regions that have written all of their states.
    """

    carried: tuple[Any, ...]
    begun: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)

    @property
    def half_way(self) -> frozenset[int]:
        """Regions whose states are neither the old nor the new ones.

        >>> PendingUpdates((), begun={0, 1}, done={0}).half_way
        frozenset({1})
        """
        return frozenset(self.begun - self.done)


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
        self.main_gm = fx.GraphModule(main_gm, IterGraph.copy_of(main_gm.graph))
        self.enable_inductor = enable_inductor
        self._forms: Forms | None = None
        self._pending: PendingUpdates | None = None
        self._is_writing = False  # what an iteration gave; stays so after an exception
        self._left: tuple[Any, ...] = ()  # for the next iteration, meanwhile
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
        self.freeze_cross_iter_movement()
        self._make_ready = prepare or self._make_ready
        self._forms = Forms(self.main_gm, self._make_ready)

    @property
    def is_pending(self) -> bool:
        """Whether work of an earlier iteration is still to be done, or is lost."""
        return self._pending is not None or self._is_writing

    @property
    def is_interrupted(self) -> bool:
        """Whether an exception came after some of what is pending was written.

        Unless states are lost, the rest is made by ``flush``; then the iteration that
        failed can be run again.
        """
        return self._is_writing or (
            self._pending is not None and bool(self._pending.begun)
        )

    @property
    def half_way(self) -> frozenset[int]:
        """Regions that an exception left half written, by number: nothing mends them."""
        return frozenset() if self._pending is None else self._pending.half_way

    @property
    def is_lost(self) -> bool:
        """Whether an exception came while states were written: nothing mends them."""
        return self._is_writing or bool(self.half_way)

    @property
    def lost(self) -> tuple[int, ...]:
        """The inputs that must then be loaded again, by place."""
        if not self._is_writing:
            return self.states_of(self.unfinished) if self.half_way else ()
        written = set(written_state(self.graph).values())
        placeholders = self.graph.find_nodes(op="placeholder")
        return tuple(n for n, node in enumerate(placeholders) if node in written)

    @property
    def unfinished(self) -> frozenset[int]:
        """Regions that are still to be done, by number."""
        if self._pending is None:
            return frozenset()
        return frozenset(range(len(self.graph.regions))) - self._pending.done

    @property
    def marks(self) -> Marks:
        """What a graph that writes its states in place calls around each region."""
        return Marks(self._begin, self._end)

    def states_of(self, regions: Collection[int]) -> tuple[int, ...]:
        """The inputs that regions write, by place."""
        graph = self.graph
        names = {name for n in regions for name in graph.regions[n].nodes}
        written = written_by(
            graph, [node for node in graph.nodes if node.name in names]
        )
        placeholders = graph.find_nodes(op="placeholder")
        return tuple(n for n, node in enumerate(placeholders) if node in written)

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
        return self.run_and_write(args, _hand_over, last_iter=last_iter)

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
        self._check_not_interrupted()
        pending = self._pending
        if not forms.is_deferring or (pending is None and last_iter):
            return write(forms.whole(*args))
        name = ("last" if last_iter else "steady") if pending is not None else "first"
        outputs, left = forms.run(
            name, args, () if pending is None else pending.carried
        )
        self._is_writing, self._left = True, left
        result = write(outputs)
        self._pending, self._left = None if last_iter else PendingUpdates(left), ()
        self._is_writing = False  # at last: an interrupt in between must not be silent
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
        if self._pending is None:
            return None
        outputs = self._finished().flush(args, self._pending.carried, self.unfinished)
        self._pending.begun |= self.unfinished  # whatever was not made in place
        if write is not None:
            write(outputs)
        self._pending = None
        return outputs

    def drop_pending(self) -> None:
        """Forget what is pending: its states have got other values, from a checkpoint."""
        for values in (self._left, self._pending.carried if self._pending else ()):
            self._finished().wait_for(values)
        self._pending, self._left = None, ()
        self._is_writing = False

    def _begin(self, region: int) -> None:
        assert self._pending is not None
        self._pending.begun.add(region)

    def _end(self, region: int) -> None:
        assert self._pending is not None
        self._pending.done.add(region)

    def _check_not_interrupted(self) -> None:
        self._check_not_lost()
        if self.is_interrupted:
            raise UsageError(
                "IterGraphModule: an exception ended the iteration before after some of "
                "its pending work was done. Call flush() to do the rest, then run "
                "the iteration again."
            )

    def _check_not_lost(self) -> None:
        if self.is_lost:
            places = self.graph.find_nodes(op="placeholder")
            raise LostStateError.of([readable_name(places[n]) for n in self.lost])

    def print_readable(self, print_output: bool = True) -> str:
        """The graph of one iteration as readable Python."""
        text: str = self.main_gm.print_readable(print_output=print_output)
        return text

    def _finished(self) -> Forms:
        if self._forms is None:
            self.finalize_setup()
        assert self._forms is not None
        return self._forms

    def _prepare(self, name: str, graph: fx.GraphModule) -> Runnable:
        if not self.enable_inductor:
            return graph
        from torchspmd.step.graph.inductor import lower

        return lower(graph)[0]


def _hand_over(outputs: Any) -> Any:
    """The caller writes them."""
    return outputs


def _marked_graph(main: object) -> IterGraph:
    graph = getattr(main, "graph", None)
    if not isinstance(graph, IterGraph):
        raise UsageError(
            "IterGraphModule: main_gm is no longer a graph module with marks on what is "
            "moved. Edit its graph, or set the graph of the IterGraphModule (gm.graph = "
            "...); set neither main_gm nor main_gm.graph."
        )
    return graph
