"""The derived graphs of an iteration with deferred work, ready to run."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.step.deferral.iter_graph import IterGraph
from torchspmd.step.deferral.regions import (
    DeferredRegion,
    check_regions,
    inputs_read,
    is_view,
    written_by,
)
from torchspmd.step.graph.clock import left_under_way
from torchspmd.step.graph.edit import NodeMaker
from torchspmd.step.graph.memory import ROLE_KEY
from torchspmd.step.graph.metadata import (
    OutputKind,
    OutputRole,
    output_node,
    output_values,
    owner_of,
    roles_of,
    set_roles,
)

# ----------------------------------------------------------------------------
# Copies of inputs for the next iteration, laid out as the inputs are.
#
# Kernels choose by strides, bits follow; and compiled code refuses other strides than it
# was made for.

_ATEN = torch.ops.aten


def add_copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Copy what the caller may overwrite; the copy has the strides of the original.

    ``clone`` keeps them where no element is repeated or left out. Of an expanded tensor one
    row is copied and expanded again; where elements are left out, memory with the same
    gaps is filled. Inductor drops the gaps where both are so; the compiled step that takes
    the copy then ends with an error about its strides.
    """
    make = NodeMaker(graph, owner_of(node))
    value: torch.Tensor = node.meta["val"]
    row = node
    for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        if size > 1 and stride == 0:
            row = make.call(_ATEN.slice.Tensor, row, dim, 0, 1)
    held: torch.Tensor = row.meta["val"]
    if torch.empty_like(held).stride() == held.stride():
        copy = make.call(_ATEN.clone.default, row)
    else:
        sizes, strides = list(held.shape), list(held.stride())
        memory = make.call(_ATEN.new_empty_strided.default, row, sizes, strides)
        copy = make.call(_ATEN.copy.default, memory, row)
    if row is not node:
        copy = make.call(_ATEN.expand.default, copy, list(value.shape))
    copy.meta = {**node.meta, "val": copy.meta["val"]}
    return copy


# ----------------------------------------------------------------------------
# What runs in the first, every further and the last iteration when work is deferred.
#
# Software pipelining of one functional iteration: nothing is edited, each graph is derived
# from the iteration and its deferred regions.

# On a node of a derived graph: the number of the deferred region that it does.
PENDING_KEY = "torchspmd_pending"

# On an input of a derived graph: its place among what an earlier iteration left.
CARRIED_KEY = "torchspmd_carried"


@dataclass(frozen=True, slots=True)
class Stage:
    """One derived graph.

    Attributes:
        graph: Takes the step's inputs, then what an earlier iteration left, if it takes
            anything; gives the outputs, then what it leaves for the next.
        outputs: Which outputs of the step it gives, by index.
    """

    graph: fx.Graph
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The forms of an iteration with deferred work.

    Attributes:
        first: Nothing is pending from before; leaves work behind.
        steady: Does what the iteration before left, and leaves work behind.
        last: Does what is pending and all of its own.
        flush: Does what is pending, and nothing else.
        num_carried: How many values go from one iteration to the next.
        num_outputs: How many outputs the step has.
    """

    first: Stage
    steady: Stage
    last: Stage
    flush: Stage
    num_carried: int
    num_outputs: int


def derive(graph: fx.Graph, regions: Sequence[DeferredRegion]) -> Pipeline:
    """The forms of an iteration whose regions run in the next one."""
    check_regions(graph, regions)
    plan = _plan_of(graph, regions)
    everything = range(len(regions))
    return Pipeline(
        first=_Form(plan, pending=(), leaves=True).stage(),
        steady=_Form(plan, pending=everything, leaves=True).stage(),
        last=_Form(plan, pending=everything, leaves=False).stage(),
        flush=_Form(plan, pending=everything, leaves=False, alone=True).stage(),
        num_carried=len(plan.carried),
        num_outputs=len(plan.values),
    )


def derive_flush(
    graph: fx.Graph, regions: Sequence[DeferredRegion], chosen: Collection[int]
) -> Stage:
    """A flush of some regions, by number; takes what a flush of all takes."""
    plan = _plan_of(graph, regions)
    return _Form(plan, pending=chosen, leaves=False, alone=True).stage()


class _Region:
    """One deferred region: its nodes, what it writes, what it takes along."""

    def __init__(self, graph: fx.Graph, nodes: list[fx.Node], before: fx.Node) -> None:
        self.nodes, self.before = nodes, before
        self.written = written_by(graph, nodes)
        self.carried = self._find_carried()

    def _find_carried(self) -> list[fx.Node]:
        """Values of this iteration that the nodes need in the next one, each once."""
        inside = set(self.nodes)
        carried: dict[fx.Node, None] = {}
        for node in self.nodes:
            for source in node.all_input_nodes:
                if source in inside or source in self.written:
                    continue
                if source.op == "get_attr" or self._follows(source):
                    continue
                carried[source] = None
        return list(carried)

    def _follows(self, source: fx.Node) -> bool:
        """Whether it is a view of a state that the nodes write: made again there."""
        return is_view(source) and all(
            root in self.written or self._follows(root)
            for root in source.all_input_nodes
        )


class _Plan:
    """The iteration and its regions, looked up by node."""

    def __init__(self, graph: fx.Graph, regions: list[_Region]) -> None:
        self.graph, self.regions = graph, regions
        self.deferred = {  # with the number of its region
            node: number
            for number, region in enumerate(regions)
            for node in region.nodes
        }
        self.carried = list(
            dict.fromkeys(node for region in regions for node in region.carried)
        )
        self.values = output_values(graph)
        self.roles = roles_of(graph)
        self.placeholders = graph.find_nodes(op="placeholder")


def _plan_of(graph: fx.Graph, regions: Sequence[DeferredRegion]) -> _Plan:
    position = {node.name: place for place, node in enumerate(graph.nodes)}
    nodes = list(graph.nodes)
    found = []
    for region in regions:
        # In the order of now: an edit may have put them in another one since the move.
        places = sorted(position[name] for name in region.nodes)
        before = nodes[position[region.before]]
        found.append(_Region(graph, [nodes[place] for place in places], before))
    return _Plan(graph, found)


class _Form:
    """Builds one derived graph."""

    def __init__(
        self,
        plan: _Plan,
        *,
        pending: Collection[int],
        leaves: bool,
        alone: bool = False,
    ) -> None:
        self._plan, self._pending, self._leaves, self._alone = (
            plan,
            pending,
            leaves,
            alone,
        )
        self._graph = fx.Graph()
        self._now: dict[fx.Node, fx.Node] = {}  # this iteration's value of each node
        self._brought: dict[fx.Node, fx.Node] = {}  # the iteration before's value
        self._before: dict[fx.Node, fx.Node] = {}  # results of what was pending
        self._states: dict[int, fx.Node] = {}  # states among these, by output

    def stage(self) -> Stage:
        plan = self._plan
        for placeholder in plan.placeholders:
            self._now[placeholder] = self._graph.node_copy(placeholder)
        if self._pending:
            self._take_carried()
        self._run_body()
        chosen = [
            (index, self._final(index, value))
            for index, value in enumerate(plan.values)
            if self._is_made(value)
        ]
        carried = self._leave_carried() if self._leaves else []
        self._graph.output([*(node for _, node in chosen), *carried])
        output_node(self._graph).meta.update(output_node(plan.graph).meta)
        roles = [plan.roles[index] for index, _ in chosen]
        results = [OutputRole(OutputKind.RESULT)] * len(carried)
        set_roles(self._graph, [*roles, *results])
        self._graph.lint()
        return Stage(self._graph, tuple(index for index, _ in chosen))

    def _take_carried(self) -> None:
        for place, source in enumerate(self._plan.carried):
            node = self._graph.placeholder(f"carried_{place}")
            kind = "left by the step before"
            node.meta = {**source.meta, ROLE_KEY: kind, CARRIED_KEY: place}
            self._brought[source] = node

    def _run_body(self) -> None:
        plan = self._plan
        waiting = list(self._pending)
        for node in plan.graph.nodes:
            for number in [n for n in waiting if self._is_due(n, node)]:
                waiting.remove(number)
                self._run_pending(number)
            if self._alone or node.op in ("placeholder", "output"):
                continue
            if node not in plan.deferred or not self._leaves:
                self._now[node] = self._graph.node_copy(node, self._now.__getitem__)

    def _is_due(self, number: int, node: fx.Node) -> bool:
        """Whether pending work runs before a node, or before this iteration's own.

        Where nothing else reads the states, the place may be behind the work itself.
        """
        region = self._plan.regions[number]
        return node is region.before or (not self._leaves and node is region.nodes[0])

    def _run_pending(self, number: int) -> None:
        """What the iteration before left: its values, this iteration's state."""
        region = self._plan.regions[number]
        own: dict[fx.Node, fx.Node] = {}

        def find(source: fx.Node) -> fx.Node:
            if source in own:
                return own[source]
            if source in region.written:
                return self._now[source]
            if source in region.carried:
                return self._brought[source]
            own[source] = self._graph.node_copy(source, find)  # a view, or a constant
            return own[source]

        for node in region.nodes:
            own[node] = self._graph.node_copy(node, find)
        for copied in own.values():
            copied.meta[PENDING_KEY] = number
        self._before.update((node, own[node]) for node in region.nodes)
        pairs = zip(self._plan.values, self._plan.roles, strict=True)
        for index, (value, role) in enumerate(pairs):
            if role.kind is OutputKind.STATE and value in own:
                # From here on the state has its next value.
                place = self._plan.placeholders[role.placeholder]
                state = self._as_stored(place, own[value])
                self._now[place] = self._states[index] = state

    def _as_stored(self, place: fx.Node, fresh: fx.Node) -> fx.Node:
        """A new value as the state holds it: kernels choose by strides, bits follow."""
        held = place.meta.get("val")
        if not isinstance(held, torch.Tensor) or _same_layout(held, fresh):
            return fresh
        copy = self._graph.call_function(
            torch.ops.aten.copy.default, (self._now[place], fresh)
        )
        copy.meta = {**fresh.meta, "val": held}
        return copy

    def _is_made(self, value: object) -> bool:
        """Whether this form gives an output of the step."""
        if isinstance(value, fx.Node) and value in self._plan.deferred:
            return self._plan.deferred[value] in self._pending
        return not self._alone

    def _final(self, index: int, value: object) -> Any:
        if not isinstance(value, fx.Node):
            return value
        pending = value in self._plan.deferred and (self._leaves or self._alone)
        if not pending:
            return self._now[value]
        return self._states.get(index, self._before[value])

    def _leave_carried(self) -> list[fx.Node]:
        return [self._kept(source) for source in self._plan.carried]

    def _kept(self, source: fx.Node) -> fx.Node:
        """A value for the next iteration; a copy of what the caller may overwrite."""
        node = self._now[source]
        is_input = source.op == "placeholder" or (
            is_view(source) and inputs_read([source])
        )
        if not is_input or not isinstance(source.meta.get("val"), torch.Tensor):
            return node
        return add_copy(self._graph, node)


def _same_layout(held: torch.Tensor, fresh: fx.Node) -> bool:
    value = fresh.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return value is not None  # a number, or a node of which nothing is known
    return held.dtype == value.dtype and held.stride() == value.stride()


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
        """One iteration with nothing pending and nothing left."""
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
