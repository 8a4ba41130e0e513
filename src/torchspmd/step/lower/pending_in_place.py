"""Pending updates are made in place, and it is known at any time which are done.

A step that fails must be repeatable. Around the writes of each update the running graph
notes that it begins and that it ends; an update is made in place as a whole or not at
all, so that after an exception each is done, not begun, or known to be lost.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.step.deferral.forms import CARRIED_KEY, PENDING_KEY
from torchspmd.step.deferral.module import IterGraphModule, Marks
from torchspmd.step.graph.aliases import find_aliases, is_wait, root_of, written_nodes
from torchspmd.step.graph.collectives import (
    fit_to_gloo,
    is_communication,
    reduce_in_place,
)
from torchspmd.step.graph.generated import RunningGraph
from torchspmd.step.graph.inductor import CompiledPieces
from torchspmd.step.graph.memory import predict_peak
from torchspmd.step.graph.metadata import (
    OutputKind,
    output_values,
    readable_name,
    roles_of,
)
from torchspmd.step.graph.snapshot import copy_graph
from torchspmd.step.lower.in_place import compute_in_place, copy_results, write_in_place

# A graph, and what was compiled for others of its step -> what to call, a line about it.
CompileGraph = Callable[
    [fx.GraphModule, CompiledPieces], tuple[Callable[..., Any], str]
]


class FormsInPlace:
    """Makes the forms of an iterated graph ready to run.

    An iteration that leaves work and fails may be run again, so that its inputs must stay
    as they were. Pending updates are an exception: it is noted which of them are done.

    Attributes:
        notes: What became of the pending updates, a line each.
        running: The graphs that run, by form, before a compiler gets them.
    """

    def __init__(
        self,
        run: IterGraphModule,
        whole: fx.GraphModule,
        compile_graph: CompileGraph | None,
    ) -> None:
        self._run, self._whole, self._compile = run, whole, compile_graph
        # Updates that are not made in place, and why.
        self._left: Mapping[int, str] = {}
        self._spare: frozenset[int] = frozenset()
        self.notes: list[str] = []
        self.running: dict[str, fx.Graph] = {}
        self._compiled = CompiledPieces()

    def make_ready(self, name: str, form: fx.GraphModule) -> Callable[..., Any]:
        """What is called for a form."""
        if name == "whole":
            running = self._whole
        elif name in ("steady", "flush"):
            running = self._write_pending(name, form)
        elif self._compile is not None:
            running = _torch.lazy_module(form, copy_graph(form.graph)[0])
            copy_results(running.graph)
            reduce_in_place(running.graph)
            fit_to_gloo(running.graph)
        else:
            running, _ = write_in_place(form, keep_inputs=True)
        self.running[name] = running.graph
        # The caller of a flush waits for it, and it is mostly updates.
        if self._compile is None or name == "flush":
            return RunningGraph.of(running)
        compiled, note = self._compile(running, self._compiled)
        self.notes.append(note)
        return compiled

    def _write_pending(self, name: str, form: fx.GraphModule) -> fx.GraphModule:
        """The steady form comes first: it alone shows collectives that read a state."""
        if name == "steady":
            self._spare = find_spare(form.graph)
        running, report = write_pending_in_place(
            form,
            self._run.marks,
            self._left,
            self._spare,
            only_pending=self._compile is not None,
        )
        if name == "steady":
            self._left = report.left
            peak = predict_peak(running.graph)
            self.notes += [*report.lines(), f"memory of an overlapped step: {peak}"]
        return running


@dataclass(frozen=True, slots=True)
class PendingReport:
    """Which updates are made in place.

    Attributes:
        in_place: Their numbers.
        left: The numbers of the others, each with the reason. Their new states are fresh
            tensors that are copied after the run.
    """

    in_place: frozenset[int] = frozenset()
    left: Mapping[int, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """What this comes to, for people.

        >>> PendingReport(frozenset({0, 2}), {1: "it leaves a gradient"}).lines()[0]
        '2 of 3 pending updates are made in place'
        """
        total = len(self.in_place) + len(self.left)
        return [
            f"{len(self.in_place)} of {total} pending updates are made in place",
            *(f"update {n} is not: {why}" for n, why in sorted(self.left.items())),
        ]


def write_pending_in_place(
    form: fx.GraphModule,
    marks: Marks,
    refused: Mapping[int, str],
    spare: Collection[int] = (),
    *,
    only_pending: bool = False,
) -> tuple[fx.GraphModule, PendingReport]:
    """A copy of a derived graph whose pending regions write where the old values lie.

    All other states stay as they are, so that the rest of the graph can be repeated.

    Args:
        form: The graph; the nodes of pending regions have their number on them.
        marks: Called in the copy before the first and after the last write of a region.
        refused: Regions that may not, by number, each with the reason.
        spare: Carried values, by place, that a region may overwrite once it has begun.
        only_pending: Change nothing else, for a compiler: it chooses itself.
    """
    left = dict(refused)
    while True:
        running = _torch.lazy_module(form, copy_graph(form.graph)[0])
        graph = running.graph
        _communicate_first(graph)
        regions, left = _find_regions(graph, left)
        values = output_values(graph)
        written: dict[fx.Node, fx.Node] = {}
        for states in regions.values():
            for index, state in states.items():
                value = values[index]
                assert isinstance(value, fx.Node), type(value)
                written.setdefault(value, state)
        scratch = find_scratch(graph, spare, regions)
        may_write = _is_pending if only_pending else None
        compute_in_place(graph, written, may_write=may_write, scratch=scratch)
        writes = _find_writes(graph, regions, scratch)
        problems = _find_problems(graph, regions, writes)
        if not problems:
            break
        left.update(problems)
    for number, nodes in writes.items():
        _mark(graph, number, nodes, marks)
    reduce_in_place(graph)
    fit_to_gloo(graph)
    running.recompile()
    numbers = set(map(_region_of, form.graph.nodes))
    left = {number: why for number, why in left.items() if number in numbers}
    return running, PendingReport(frozenset(regions), left)


def _is_pending(node: fx.Node) -> bool:
    return PENDING_KEY in node.meta


def _region_of(value: object) -> int | None:
    """The pending region that a node of a form belongs to, by number."""
    return value.meta.get(PENDING_KEY) if isinstance(value, fx.Node) else None


def _find_regions(
    graph: fx.Graph, refused: Mapping[int, str]
) -> tuple[dict[int, dict[int, fx.Node]], dict[int, str]]:
    """By region: the inputs that get a new value from it, by the index of the output.

    And why others are not candidates: they give something that has no memory yet.
    """
    left = dict(refused)
    found: dict[int, dict[int, fx.Node]] = {}
    placeholders = graph.find_nodes(op="placeholder")
    pairs = zip(output_values(graph), roles_of(graph), strict=True)
    for index, (value, role) in enumerate(pairs):
        number = _region_of(value)
        if number is None or number in refused or role.kind is OutputKind.RESULT:
            continue
        if role.kind is not OutputKind.STATE:
            left[number] = f"it leaves a {role.kind.value}"
            continue
        state = placeholders[role.placeholder]
        if not isinstance(state.meta.get("val"), torch.Tensor):
            left[number] = f"{readable_name(state)} is a Python number"
        found.setdefault(number, {})[index] = state
    return {number: found[number] for number in found if number not in left}, left


def _communicate_first(graph: fx.Graph) -> None:
    """Wait for what a region needs from other ranks before it writes anything.

    Communication is what fails; until the first write the region can be repeated.
    """
    regions: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if PENDING_KEY in node.meta:
            regions.setdefault(node.meta[PENDING_KEY], []).append(node)
    for nodes in regions.values():
        needed: set[fx.Node] = set()
        for node in reversed(nodes):
            is_used = not needed.isdisjoint(node.users)
            if is_used or is_wait(node) or is_communication(node):
                needed.add(node)
        rest = [node for node in nodes if node not in needed]
        # A random op would draw other numbers in another place.
        if rest and not any(
            _torch.draws_random_numbers(n.target, n.args, n.kwargs) for n in needed
        ):
            for node in nodes[nodes.index(rest[0]) :]:
                if node in needed:
                    rest[0].prepend(node)


def _find_writes(
    graph: fx.Graph,
    regions: Mapping[int, Mapping[int, fx.Node]],
    scratch: Mapping[fx.Node, int],
) -> dict[int, list[fx.Node]]:
    """By region: the nodes after which it cannot be repeated, in their order."""
    owner = dict(scratch)
    for number, states in regions.items():
        owner.update(dict.fromkeys(states.values(), number))
    found: dict[int, list[fx.Node]] = {number: [] for number in regions}
    for node in graph.nodes:
        memory = set(map(root_of, written_nodes(node)))
        for number in {owner[each] for each in memory if each in owner}:
            found[number].append(node)
    return found


def _find_problems(
    graph: fx.Graph,
    regions: Mapping[int, Mapping[int, fx.Node]],
    writes: Mapping[int, list[fx.Node]],
) -> dict[int, str]:
    """Regions that are not in place as a whole, or whose writes lie apart."""
    values = output_values(graph)
    nodes = list(graph.nodes)
    position = {node: place for place, node in enumerate(nodes)}
    found: dict[int, str] = {}
    for number, places in regions.items():
        for index, place in places.items():
            if values[index] is not place:
                found[number] = f"{readable_name(place)} cannot be written in place"
        if number not in found:
            first, last = writes[number][0], writes[number][-1]
            own = set(writes[number])
            for node in nodes[position[first] : position[last]]:
                if node not in own and _region_of(node) != number:
                    found[number] = f"{readable_name(node)} runs between its writes"
    return found


def _mark(graph: fx.Graph, number: int, writes: list[fx.Node], marks: Marks) -> None:
    with graph.inserting_before(writes[0]):
        graph.call_function(marks.begin, (number,))
    with graph.inserting_after(writes[-1]):
        graph.call_function(marks.end, (number,))


# ----------------------------------------------------------------------------
# Values left by the step before that one pending update alone needs: it may overwrite them.
#
# A gradient that is averaged, or to which weight decay is added, needs no second tensor
# then.


def find_spare(steady: fx.Graph) -> frozenset[int]:
    """The carried values whose memory nothing else lies in, by their place.

    Args:
        steady: The steady form: it takes them in and leaves new ones behind.
    """
    values = output_values(steady)
    left = values[len(values) - len(_carried(steady)) :]
    aliases = find_aliases(steady)
    shared = Counter(aliases.root[v] for v in values if isinstance(v, fx.Node))
    found = set()
    for place, value in enumerate(left):
        if isinstance(value, fx.Node):
            root = aliases.root[value]
            is_made = root.op == "call_function" and root not in aliases.pinned
            if is_made and shared[root] == 1:
                found.add(place)
    return frozenset(found)


def find_scratch(
    graph: fx.Graph, spare: Collection[int], regions: Collection[int]
) -> dict[fx.Node, int]:
    """The inputs that one of these regions, and nothing else, reads: with its number."""
    root = find_aliases(graph).root
    readers: dict[fx.Node, set[int | None]] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            readers.setdefault(root[source], set()).add(node.meta.get(PENDING_KEY))
    found = {}
    for place, node in _carried(graph).items():
        numbers = readers.get(node, set())
        is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
        if place in spare and is_tensor and len(numbers) == 1:
            (number,) = numbers
            if number is not None and number in regions:
                found[node] = number
    return found


def _carried(graph: fx.Graph) -> dict[int, fx.Node]:
    return {
        node.meta[CARRIED_KEY]: node
        for node in graph.find_nodes(op="placeholder")
        if CARRIED_KEY in node.meta
    }
