"""Which nodes of a step may run in the next iteration, and where in it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import Phase
from torchspmd.errors import DeferralError
from torchspmd.step.graph.aliases import memory_root
from torchspmd.step.graph.memory import ROLE_KEY
from torchspmd.step.graph.metadata import (
    OutputKind,
    is_guarded,
    output_node,
    output_values,
    owner_of,
    readable_name,
    roles_of,
)

_SHOWN = 6  # problems in one message
_NAMES = 3  # nodes of a region in one line


@dataclass(frozen=True, slots=True)
class DeferredRegion:
    """Nodes that run in the next iteration, by name: names outlive a copied graph.

    Attributes:
        nodes: The nodes, in graph order.
        before: The node of the next iteration before which they run.
    """

    nodes: tuple[str, ...]
    before: str

    def __str__(self) -> str:
        """Some of the nodes, for messages."""
        return _shorten(self.nodes, _NAMES)


# ----------------------------------------------------------------------------
# Whether regions are valid in a graph. A move is checked when it is made, and again after
# each later edit: to a pass that sees one plain iteration, a read in front of a region's
# place looks as good as one behind it.


def check_region(
    graph: fx.Graph,
    nodes: Sequence[fx.Node],
    target: fx.Node,
    others: Sequence[DeferredRegion],
) -> DeferredRegion:
    """The region of nodes that are moved before a node of the next iteration.

    It begins earlier where something in front of that node reads a state that they write.
    Raises unless the nodes can wait for the next iteration.
    """
    foreign = [node.name for node in (*nodes, target) if node.graph is not graph]
    if not nodes or foreign:
        problems = [f"{name} is a node of another graph" for name in foreign]
        problems = problems or ["no nodes are given"]
    else:
        names = {node.name for node in nodes}
        ordered = tuple(node.name for node in graph.nodes if node.name in names)
        region = DeferredRegion(ordered, latest_place(graph, nodes, target).name)
        problems = list(_Validity(graph, [*others, region]).problems())
        if not problems:
            return region
    raise DeferralError(
        "The target nodes for ``move_to_next_iter_before`` must satisfy one of the "
        "following conditions: every user of a node is a target node too, or it is the "
        "output and takes the next value of a state from it, or there is no user.\n\n"
        + _lines(problems)
        + "\n\nMove all nodes that need the result too, or leave these where they are."
    )


def check_regions(
    graph: fx.Graph, regions: Sequence[DeferredRegion], *, edit: str = ""
) -> None:
    """Raise unless every region can still run before its place of the next iteration.

    Args:
        graph: One iteration.
        regions: What is moved.
        edit: The pass that was run last; nothing where the whole setup is checked.
    """
    if not regions:
        return
    _check_names(graph, regions, edit)
    problems = list(_Validity(graph, regions).problems())
    if not problems:
        return
    what = (
        f"{edit} would break work that is moved to the next iteration, and was not taken"
        if edit
        else "IterGraphModule: an edit broke work that was moved to the next iteration"
    )
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    raise DeferralError(
        f"{what}; {count}:\n"
        + _lines(problems)
        + "\n\nMoved nodes run before the first node that reads a state that they write, "
        "and nothing else needs them. Move nodes after all other passes, or leave readers "
        "behind that place and users among the nodes that are moved."
    )


def _lines(problems: Sequence[str]) -> str:
    rest = len(problems) - _SHOWN
    more = [f"and {rest} more"] if rest > 0 else []
    return "\n".join(f"  {line}" for line in (*problems[:_SHOWN], *more))


def _shorten(names: Sequence[str], most: int) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def _check_names(graph: fx.Graph, regions: Sequence[DeferredRegion], edit: str) -> None:
    there = {node.name for node in graph.nodes}
    moved = [name for each in regions for name in each.nodes if name not in there]
    places = [each.before for each in regions if each.before not in there]
    lost = [
        f"{what} are gone: {_shorten(list(dict.fromkeys(names)), _SHOWN)}. "
        for what, names in (
            ("Nodes that were moved to the next iteration", moved),
            ("Nodes before which moved ones run in the next iteration", places),
        )
        if names
    ]
    if lost:
        who = f"{edit} removed or replaced them, and was not taken" if edit else ""
        raise DeferralError(
            "".join(lost)
            + f"{who or 'A later pass replaced them'}: move nodes after all other passes."
        )


class _Validity:
    """An iteration and its regions, looked up by node, and what is wrong with them."""

    def __init__(self, graph: fx.Graph, regions: Sequence[DeferredRegion]) -> None:
        self._graph, self._regions = graph, regions
        by_name = {node.name: node for node in graph.nodes}
        self._members = [
            [by_name[name] for name in region.nodes if name in by_name]
            for region in regions
        ]
        self._region_of: dict[fx.Node, int] = {  # of a node that is in two, the first
            node: number
            for number in reversed(range(len(regions)))
            for node in self._members[number]
        }
        self._places = [by_name.get(region.before) for region in regions]
        self._outputs = list(zip(output_values(graph), roles_of(graph), strict=True))
        placeholders = graph.find_nodes(op="placeholder")
        self._writer_of = {  # of a state: the region that writes it
            placeholders[role.placeholder]: self._region_of[value]
            for value, role in self._outputs
            if role.kind is OutputKind.STATE
            and isinstance(value, fx.Node)
            and value in self._region_of
        }

    def problems(self) -> Iterator[str]:
        yield from self._wrong_nodes()
        yield from self._early_readers()
        yield from self._users_outside()
        yield from self._returned()
        yield from self._random()
        yield from self._needed_early()
        yield from self._shared_states()

    def _wrong_nodes(self) -> Iterator[str]:
        for number, members in enumerate(self._members):
            for node in members:
                if node.op in ("placeholder", "output"):
                    word = "input" if node.op == "placeholder" else "output"
                    yield f"{readable_name(node)} is an {word} of the step"
                elif self._region_of[node] != number:
                    yield f"{node.name} is moved already"
            place = self._places[number]
            if place is None:
                continue
            is_moved = self._region_of.get(place, number + 1) <= number
            if is_moved or place.op == "placeholder":
                yield f"{place.name} is no place for them: take a node that stays"

    def _early_readers(self) -> Iterator[str]:
        """The first node for each region that would read a state before its update."""
        begins: dict[fx.Node | None, list[int]] = {}
        for number, place in enumerate(self._places):
            begins.setdefault(place, []).append(number)
        settled: set[int] = set()  # regions that have run here, or have been reported
        for node in self._graph.nodes:
            settled.update(begins.get(node, ()))
            if node in self._region_of:
                continue
            for state in node.all_input_nodes:
                writer = self._writer_of.get(state)
                if writer is None or writer in settled:
                    continue
                settled.add(writer)
                region = self._regions[writer]
                yield (
                    f"{node.name} reads {readable_name(state)} in front of "
                    f"{region.before}, where {region} of the iteration before write it: "
                    "it would read the old value"
                )

    def _users_outside(self) -> Iterator[str]:
        for node, number in self._region_of.items():
            for user in node.users:
                if user.op != "output" and self._region_of.get(user) != number:
                    region = self._regions[number]
                    yield (
                        f"{node.name} is used in this iteration by {user.name} "
                        f"({_owner_words(user)}), but is moved to the next one with "
                        f"{region}, before {region.before}"
                    )

    def _returned(self) -> Iterator[str]:
        for index, (value, role) in enumerate(self._outputs):
            if isinstance(value, fx.Node) and value in self._region_of and role.leaves:
                region = self._regions[self._region_of[value]]
                yield (
                    f"{value.name} {role.leaves} (output {index}), but is moved to the "
                    f"next one with {region}"
                )

    def _random(self) -> Iterator[str]:
        for node in self._region_of:
            if _torch.draws_random_numbers(node.target, node.args, node.kwargs):
                yield (
                    f"{node.name} draws random numbers ({_owner_words(node)}): in the next "
                    "iteration it would draw others"
                )

    def _needed_early(self) -> Iterator[str]:
        """States that somebody needs before the next iteration runs."""
        for state in sorted(self._writer_of, key=lambda node: node.name):
            if is_guarded(state):
                yield (
                    f"{readable_name(state)} decides which graph the next step runs, so "
                    "it cannot wait"
                )
            if state.meta.get(ROLE_KEY) == "input":
                yield (
                    f"{readable_name(state)} is an argument of the step: the caller looks "
                    "at it, or passes another one next time"
                )

    def _shared_states(self) -> Iterator[str]:
        for number, nodes in enumerate(self._members):
            read = {memory_root(source) for n in nodes for source in n.all_input_nodes}
            for state in sorted(read, key=lambda node: node.name):
                writer = self._writer_of.get(state, number)
                if writer != number:
                    yield (
                        f"{readable_name(state)} is changed by one deferred region "
                        f"({self._regions[writer]}) and read by another "
                        f"({self._regions[number]})"
                    )


def _owner_words(node: fx.Node) -> str:
    owner = owner_of(node)
    return f"{owner.phase.value} of {owner.module}"


# ----------------------------------------------------------------------------
# What a region writes, where it may run, and what it takes along.


def latest_place(graph: fx.Graph, nodes: Sequence[fx.Node], target: fx.Node) -> fx.Node:
    """The target, or the first node before it that reads a state the nodes write."""
    inside = set(nodes)
    written = written_by(graph, nodes)
    for node in graph.nodes:
        if node is target:
            break
        if node in inside or node.op == "placeholder":
            continue
        if written.intersection(node.all_input_nodes):
            reader: fx.Node = node
            return reader
    return target


def first_reader(graph: fx.Graph, nodes: Sequence[fx.Node]) -> fx.Node:
    """The first node that stays and reads a state that the nodes write; else the output."""
    return latest_place(graph, nodes, output_node(graph))


def written_by(graph: fx.Graph, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The inputs whose next values these nodes compute."""
    inside = set(nodes)
    placeholders = graph.find_nodes(op="placeholder")
    return {
        placeholders[role.placeholder]
        for value, role in zip(output_values(graph), roles_of(graph), strict=True)
        if role.kind is OutputKind.STATE and value in inside
    }


def complete_region(graph: fx.Graph, nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes and what only they need and can be made in the next iteration as well.

    Such as the step counters of an optimizer: with them in the region, nothing but the
    gradients and the hyper-parameters goes from one iteration to the next.
    """
    region = set(nodes)
    states = _state_values(graph)
    for node in reversed(graph.nodes):
        if node.op != "call_function" or not region.intersection(node.users):
            continue
        kept = all(
            user in region or (user.op == "output" and node in states)
            for user in node.users
        )
        # What forward and backward make is carried, not made again.
        if kept and owner_of(node).phase is Phase.OPTIMIZER:
            region.add(node)
    _drop_unfounded(graph, region, set(nodes), states)
    return [node for node in graph.nodes if node in region]


def _state_values(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node that is the next value of inputs: those inputs."""
    placeholders = graph.find_nodes(op="placeholder")
    found: dict[fx.Node, list[fx.Node]] = {}
    for value, role in zip(output_values(graph), roles_of(graph), strict=True):
        if isinstance(value, fx.Node):
            found.setdefault(value, [])
            if role.kind is OutputKind.STATE:
                found[value].append(placeholders[role.placeholder])
    return {value: inputs for value, inputs in found.items() if inputs}


def _drop_unfounded(
    graph: fx.Graph,
    region: set[fx.Node],
    asked: set[fx.Node],
    states: dict[fx.Node, list[fx.Node]],
) -> None:
    """Take nodes out again that need something of this iteration, until none is left.

    A node stays whose inputs are numbers, constants, nodes of the region, or inputs of
    the step that the region itself renews.
    """
    while True:
        renewed = {each for value in region for each in states.get(value, ())}
        unfounded = [
            node
            for node in graph.nodes
            if node in region - asked
            and not all(
                source in region
                or source in renewed
                or source.op == "get_attr"
                or (source.op == "placeholder" and _is_number(source))
                for source in node.all_input_nodes
            )
        ]
        if not unfounded:
            return
        region.difference_update(unfounded)


def _is_number(node: fx.Node) -> bool:
    return not isinstance(node.meta.get("val"), torch.Tensor)
