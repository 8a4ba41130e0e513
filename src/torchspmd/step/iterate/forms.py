"""The derived graphs of an iteration with deferred work, ready to run."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from torchspmd import _torch
from torchspmd.step.graph.clocked import left_under_way
from torchspmd.step.graph.roles import OutputKind, output_values, roles_of
from torchspmd.step.iterate.iter_graph import IterGraph
from torchspmd.step.iterate.pipeline import Stage, derive, derive_flush

Runnable = Callable[..., Any]


class Forms:
    """The derived graphs of a finished module, ready to run."""

    def __init__(
        self, main: fx.GraphModule, prepare: Callable[[str, fx.GraphModule], Runnable]
    ) -> None:
        graph = main.graph
        assert isinstance(graph, IterGraph)
        self._main, self._graph = main, graph
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
        return self._call(self._stages[name], self._run_of(name), [*args, *carried])

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

        Torch keeps each of them, and its memory, until somebody has.
        """
        if carried:
            steady = self.graphs["steady"].graph
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
