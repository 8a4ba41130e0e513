"""The graphs that run when updates wait for the next iteration, derived from one graph.

This is software pipelining of one functional iteration. Nothing is edited: each form is a
new graph, made of the iteration and its deferred regions.

| form | what the iteration before left | its own deferred regions |
|---|---|---|
| first | there is nothing | are left for the next |
| steady | is done | are left for the next |
| last | is done | are done |
| flush | is done, and nothing else | do not run |

A form takes the step's inputs, then the carried values: what the regions need of the
iteration that left them. It gives outputs of the step, then the values that it leaves.
"""

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from torchspmd.step.deferral.iter_graph import IterGraph
from torchspmd.step.deferral.regions import (
    DeferredRegion,
    Iteration,
    check_regions,
    written_by,
)
from torchspmd.step.graph.aliases import is_view, root_of
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
from torchspmd.step.graph.nodes import NodeMaker, copy_node

# On a node of a form: the number of the deferred region that it does.
PENDING_KEY = "torchspmd_pending"

# On an input of a form: its place among the carried values.
CARRIED_KEY = "torchspmd_carried"

_ATEN = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Stage:
    """One form.

    Attributes:
        graph: Its graph.
        outputs: Which outputs of the step it gives, by index.
    """

    graph: fx.Graph
    outputs: tuple[int, ...]


class Pipeline:
    """The forms of an iteration with deferred regions, each built when it is asked for.

    Attributes:
        num_carried: How many values go from one iteration to the next.
        num_outputs: How many outputs the step has.
    """

    def __init__(self, plan: "_Plan") -> None:
        self._plan = plan
        self._everything = range(len(plan.regions))
        self.num_carried, self.num_outputs = len(plan.carried), len(plan.values)

    @cached_property
    def first(self) -> Stage:
        """Leaves work behind; nothing is pending."""
        return _Form(self._plan, pending=(), leaves=True).build()

    @cached_property
    def steady(self) -> Stage:
        """Does what is pending, and leaves work behind."""
        return _Form(self._plan, pending=self._everything, leaves=True).build()

    @cached_property
    def last(self) -> Stage:
        """Does what is pending and all of its own."""
        return _Form(self._plan, pending=self._everything, leaves=False).build()

    @cached_property
    def flush(self) -> Stage:
        """Does what is pending, and nothing else."""
        form = _Form(self._plan, pending=self._everything, leaves=False, alone=True)
        return form.build()


def derive(graph: fx.Graph, regions: Sequence[DeferredRegion]) -> Pipeline:
    """The forms of an iteration whose regions run in the next one."""
    check_regions(graph, regions)
    return Pipeline(_Plan(graph, regions))


def derive_flush(
    graph: fx.Graph, regions: Sequence[DeferredRegion], chosen: Collection[int]
) -> Stage:
    """A flush of some regions, by number; takes what a flush of all takes."""
    return _Form(
        _Plan(graph, regions), pending=chosen, leaves=False, alone=True
    ).build()


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


class _Form:
    """Builds one form.

    Args:
        plan: The iteration and its regions.
        pending: The regions that the iteration before left, by number.
        leaves: Whether its own deferred regions are left for the next iteration.
        alone: Whether nothing but what is pending runs.
    """

    def __init__(
        self,
        plan: "_Plan",
        *,
        pending: Collection[int],
        leaves: bool,
        alone: bool = False,
    ) -> None:
        self._plan, self._pending = plan, pending
        self._leaves, self._alone = leaves, alone
        self._graph = fx.Graph()
        self._now: dict[fx.Node, fx.Node] = {}  # each node's value in this iteration
        self._carried: dict[fx.Node, fx.Node] = {}  # and in the iteration before
        self._results: dict[fx.Node, fx.Node] = {}  # of the pending regions
        self._states: dict[int, fx.Node] = {}  # the states among them, by output

    def build(self) -> Stage:
        plan = self._plan
        for placeholder in plan.placeholders:
            self._now[placeholder] = copy_node(
                self._graph, placeholder, self._now.__getitem__
            )
        if self._pending:
            self._take_carried()
        self._add_nodes()
        chosen = [
            (index, self._final(index, value))
            for index, value in enumerate(plan.values)
            if self._gives(value)
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
            self._carried[source] = node

    def _add_nodes(self) -> None:
        """The iteration, with each pending region before its place."""
        plan = self._plan
        due: dict[fx.Node, list[int]] = {}
        for number in self._pending:
            for place in self._places_of(number):
                due.setdefault(place, []).append(number)
        added: set[int] = set()
        for node in plan.graph.nodes:
            for number in due.get(node, ()):
                if number not in added:
                    added.add(number)
                    self._add_pending(number)
            if self._alone or node.op in ("placeholder", "output"):
                continue
            if node not in plan.deferred or not self._leaves:
                self._now[node] = copy_node(self._graph, node, self._now.__getitem__)

    def _places_of(self, number: int) -> list[fx.Node]:
        """Pending work runs before the first of these, at the latest before its own.

        Where nothing else reads the states, the place may be behind the work itself.
        """
        region = self._plan.regions[number]
        return [region.before] if self._leaves else [region.before, region.nodes[0]]

    def _add_pending(self, number: int) -> None:
        """A pending region: on the carried values, and on this iteration's state."""
        region = self._plan.regions[number]
        own: dict[fx.Node, fx.Node] = {}

        def find(source: fx.Node) -> fx.Node:
            if source in own:
                return own[source]
            if source in region.written:
                return self._now[source]
            if source in region.carried:
                return self._carried[source]
            own[source] = copy_node(self._graph, source, find)  # a view, or a constant
            return own[source]

        for node in region.nodes:
            own[node] = copy_node(self._graph, node, find)
        for copied in own.values():
            copied.meta[PENDING_KEY] = number
        self._results.update((node, own[node]) for node in region.nodes)
        indices = self._plan.next_values
        for index, value in sorted((i, n) for n in own for i in indices.get(n, ())):
            # From here on the state has its next value.
            place = self._plan.placeholders[self._plan.roles[index].placeholder]
            state = self._as_stored(place, own[value])
            self._now[place] = self._states[index] = state

    def _as_stored(self, place: fx.Node, fresh: fx.Node) -> fx.Node:
        """A new value in the layout of the state: kernels are chosen by strides."""
        held = place.meta.get("val")
        if not isinstance(held, torch.Tensor) or _same_layout(held, fresh):
            return fresh
        copy = self._graph.call_function(_ATEN.copy.default, (self._now[place], fresh))
        copy.meta = {**fresh.meta, "val": held}
        return copy

    def _gives(self, value: object) -> bool:
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
        return self._states.get(index, self._results[value])

    def _leave_carried(self) -> list[fx.Node]:
        """The values for the next iteration; copies of what the caller may overwrite."""
        found = []
        for source in self._plan.carried:
            node = self._now[source]
            is_input = root_of(source).op == "placeholder"
            if is_input and isinstance(source.meta.get("val"), torch.Tensor):
                node = add_copy(self._graph, node)
            found.append(node)
        return found


def _same_layout(held: torch.Tensor, fresh: fx.Node) -> bool:
    value = fresh.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return value is not None  # a number, or a node of which nothing is known
    return held.dtype == value.dtype and held.stride() == value.stride()


class _Plan:
    """The iteration and its regions, looked up by node."""

    def __init__(self, graph: fx.Graph, regions: Sequence[DeferredRegion]) -> None:
        self.graph = graph
        iteration = Iteration.of(graph)
        by_name = iteration.by_name
        position = {node.name: place for place, node in enumerate(graph.nodes)}
        self.regions = []
        for region in regions:
            # In the order of now: an edit may have changed it since the move.
            names = sorted(region.nodes, key=position.__getitem__)
            nodes = _without_pieces([by_name[name] for name in names])
            self.regions.append(_Region(iteration, nodes, by_name[region.before]))
        self.deferred = {  # with the number of its region
            node: number
            for number, found in enumerate(self.regions)
            for node in found.nodes
        }
        carried = (node for found in self.regions for node in found.carried)
        self.carried = list(dict.fromkeys(carried))
        self.values = output_values(graph)
        self.roles = roles_of(graph)
        self.placeholders = graph.find_nodes(op="placeholder")
        self.next_values: dict[fx.Node, list[int]] = {}  # which outputs a node is
        for index, (value, role) in enumerate(
            zip(self.values, self.roles, strict=True)
        ):
            if role.kind is OutputKind.STATE and isinstance(value, fx.Node):
                self.next_values.setdefault(value, []).append(index)


def _without_pieces(nodes: list[fx.Node]) -> list[fx.Node]:
    """Without items of a list of views, such as a split, that these nodes do not make.

    They are taken in this iteration: tensors are carried, and no lists.
    """
    inside = set(nodes)
    pieces = {
        node
        for node in nodes
        if node.target is operator.getitem
        and is_view(node)
        and inside.isdisjoint(node.all_input_nodes)
    }
    return [node for node in nodes if node not in pieces] or nodes


class _Region:
    """One deferred region: its nodes, the states that it writes, what it carries."""

    def __init__(
        self, iteration: Iteration, nodes: list[fx.Node], before: fx.Node
    ) -> None:
        self.nodes, self.before = nodes, before
        self.written = written_by(iteration, nodes)
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


def add_copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Copy what the caller may overwrite; the copy has the strides of the original.

    Kernels are chosen by strides, and compiled code refuses other strides than its own.
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
