"""A step's graph as it is iterated: the object that passes edit and a program runs."""

from collections.abc import Callable, Sequence
from typing import Any, final

from torch import fx

from torchspmd.errors import UsageError
from torchspmd.step.graph.roles import OutputKind, output_values, roles_of
from torchspmd.step.iterate.iter_graph import IterGraph
from torchspmd.step.iterate.pipeline import Stage, derive

Runnable = Callable[..., Any]


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
        self.main_gm = fx.GraphModule(main_gm, IterGraph.copy_of(main_gm.graph))
        self.enable_inductor = enable_inductor
        self._forms: _Forms | None = None
        self._carried: tuple[Any, ...] | None = None
        self._make_ready: Callable[[str, fx.GraphModule], Runnable] = self._prepare

    @property
    def graph(self) -> IterGraph:
        """The graph of one iteration, with what is moved to the next."""
        graph = self.main_gm.graph
        assert isinstance(graph, IterGraph)
        return graph

    @graph.setter
    def graph(self, graph: fx.Graph) -> None:
        regions = getattr(graph, "regions", self.graph.regions)
        self.main_gm.graph = IterGraph.copy_of(graph, regions)

    def recompile(self) -> None:
        """Generate the graph's code again after an edit; what is run is derived anew."""
        if self.is_pending:
            raise UsageError(
                "IterGraphModule: the graph cannot be edited while work of the iteration "
                "before is owed. Call flush(), or run one with last_iter=True, first."
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
        self._forms = _Forms(self.main_gm, self._make_ready)

    @property
    def is_pending(self) -> bool:
        """Whether work of an earlier iteration is still to be done."""
        return self._carried is not None

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
        forms = self._finished()
        carried = self._carried
        if not forms.is_deferring or (carried is None and last_iter):
            return forms.whole(*args)
        name = ("last" if last_iter else "steady") if carried is not None else "first"
        outputs, left = forms.run(name, args, carried or ())
        # Only now: after an exception the iteration can be run again.
        self._carried = None if last_iter else left
        return outputs

    __call__ = forward

    def flush(self, *args: Any) -> list[Any] | None:
        """Do what is owed; the outputs that this gives, None for all others.

        Args:
            args: The inputs of the step. Only state is read.
        """
        if self._carried is None:
            return None
        outputs, _ = self._finished().run("flush", args, self._carried)
        self._carried = None
        return outputs

    def print_readable(self, print_output: bool = True) -> str:
        """The graph of one iteration as readable Python."""
        text: str = self.main_gm.print_readable(print_output=print_output)
        return text

    def _finished(self) -> "_Forms":
        if self._forms is None:
            self.finalize_setup()
        assert self._forms is not None
        return self._forms

    def _prepare(self, name: str, graph: fx.GraphModule) -> Runnable:
        if not self.enable_inductor:
            return graph
        from torchspmd.step.backends import lower

        return lower(graph)


class _Forms:
    """The derived graphs of a finished module, ready to run."""

    def __init__(
        self, main: fx.GraphModule, prepare: Callable[[str, fx.GraphModule], Runnable]
    ) -> None:
        graph = main.graph
        assert isinstance(graph, IterGraph)
        self.is_deferring = bool(graph.regions) and not creates_state(graph)
        self.graphs = {"whole": main}
        self.num_carried = 0
        self._stages: dict[str, Stage] = {}
        if self.is_deferring:
            pipeline = derive(graph, graph.regions)
            self.num_carried = pipeline.num_carried
            self._num_outputs = pipeline.num_outputs
            for name in ("first", "steady", "last", "flush"):
                stage: Stage = getattr(pipeline, name)
                self._stages[name] = stage
                self.graphs[name] = fx.GraphModule(main, stage.graph)
        self._prepare = prepare
        needed = ("first", "steady") if self.is_deferring else ("whole",)
        self._runs = {name: prepare(name, self.graphs[name]) for name in needed}

    def whole(self, *args: Any) -> Any:
        """One iteration with nothing owed and nothing left."""
        return self._run_of("whole")(*args)

    def run(
        self, name: str, args: Sequence[Any], carried: tuple[Any, ...]
    ) -> tuple[list[Any], tuple[Any, ...]]:
        """The step's outputs, None where this form has none, and what is left."""
        places = self._stages[name].outputs
        values = self._run_of(name)(*args, *carried)
        outputs: list[Any] = [None] * self._num_outputs
        for place, value in zip(places, values, strict=False):
            outputs[place] = value
        return outputs, tuple(values[len(places) :])

    def _run_of(self, name: str) -> Runnable:
        if name not in self._runs:
            self._runs[name] = self._prepare(name, self.graphs[name])
        return self._runs[name]


def creates_state(graph: IterGraph) -> bool:
    """Whether deferred work makes state that does not exist yet: the cold first step.

    Such a program is run once. It is run whole: the state must be there for the next.
    """
    deferred = {name for region in graph.regions for name in region.nodes}
    return any(
        role.kind is OutputKind.CREATED
        and isinstance(value, fx.Node)
        and value.name in deferred
        for value, role in zip(output_values(graph), roles_of(graph), strict=True)
    )
