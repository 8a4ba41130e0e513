"""Which nodes of a step may run in the next iteration, and where in it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import Phase
from torchspmd.errors import DeferralError
from torchspmd.step.graph.aliases import memory_root
from torchspmd.step.graph.memory import ROLE_KEY
from torchspmd.step.graph.metadata import (
    is_guarded,
    output_node,
    output_values,
    owner_of,
    readable_name,
    roles_of,
    written_state,
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


@dataclass(frozen=True, slots=True)
class Iteration:
    """A graph, and what questions about regions look up in it; until it is edited.

    Attributes:
        graph: The graph.
        by_name: Its nodes.
        next_values: For each node that is the next value of inputs: those inputs.
    """

    graph: fx.Graph
    by_name: Mapping[str, fx.Node]
    next_values: Mapping[fx.Node, Sequence[fx.Node]]

    @classmethod
    def of(cls, graph: fx.Graph) -> Self:
        """Walk through a graph, once for all questions."""
        by_name = {node.name: node for node in graph.nodes}
        return cls(graph, by_name, _next_values(graph))


# ----------------------------------------------------------------------------
# Whether regions are valid in a graph. A move is checked when it is made, and again after
# each later edit: to a pass that sees one plain iteration, a read in front of a region's
# place looks as good as one behind it.


# Nodes, and the node of the next iteration before which they are to run.
Move: TypeAlias = tuple[Sequence[fx.Node], fx.Node]


def check_moves(
    iteration: Iteration, moves: Sequence[Move], others: Sequence[DeferredRegion]
) -> list[DeferredRegion]:
    """The regions of nodes that are moved before nodes of the next iteration.

    One begins earlier where something in front of that node reads a state that its nodes
    write. Raises unless all of them can wait for the next iteration.
    """
    graph = iteration.graph
    foreign = [
        node.name
        for nodes, target in moves
        for node in (*nodes, target)
        if node.graph is not graph
    ]
    if foreign or not all(nodes for nodes, _ in moves):
        problems = [f"{name} is a node of another graph" for name in foreign]
        problems = problems or ["no nodes are given"]
    else:
        regions = [
            DeferredRegion(
                tuple(node.name for node in sorted(set(nodes))),
                latest_place(iteration, nodes, target).name,
            )
            for nodes, target in moves
        ]
        problems = list(_Validity(iteration, [*others, *regions]).problems())
        if not problems:
            return regions
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
    problems = list(_Validity(Iteration.of(graph), regions).problems())
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


class _Validity:
    """An iteration and its regions, looked up by node, and what is wrong with them."""

    def __init__(self, iteration: Iteration, regions: Sequence[DeferredRegion]) -> None:
        self._regions = regions
        graph, by_name = iteration.graph, iteration.by_name
        named = (name for each in regions for name in (*each.nodes, each.before))
        self._gone = [name for name in dict.fromkeys(named) if name not in by_name]
        if self._gone:
            return
        self._members = [[by_name[name] for name in each.nodes] for each in regions]
        self._places = [by_name[region.before] for region in regions]
        self._region_of: dict[fx.Node, int] = {  # of a node that is in two, the first
            node: number
            for number in reversed(range(len(regions)))
            for node in self._members[number]
        }
        self._outputs = list(zip(output_values(graph), roles_of(graph), strict=True))
        self._writer_of = {  # of a state: the region that writes it
            state: self._region_of[value]
            for value, states in iteration.next_values.items()
            if value in self._region_of
            for state in states
        }

    def problems(self) -> Iterator[str]:
        if self._gone:
            names = _shorten(self._gone, _SHOWN)
            yield f"{names}: moved, or the place of what is moved, and gone or replaced"
            return
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
            is_moved = self._region_of.get(place, number + 1) <= number
            if is_moved or place.op == "placeholder":
                yield f"{place.name} is no place for them: take a node that stays"

    def _early_readers(self) -> Iterator[str]:
        """The first node for each region that would read a state before its update."""
        early = {
            user
            for state, writer in self._writer_of.items()
            for user in state.users
            if user not in self._region_of and user < self._places[writer]
        }
        reported: set[int] = set()
        for node in sorted(early):
            for state in node.all_input_nodes:
                writer = self._writer_of.get(state)
                if writer is None or writer in reported:
                    continue
                if not node < self._places[writer]:
                    continue
                reported.add(writer)
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
        """States that are needed before the next iteration runs."""
        for state in sorted(self._writer_of, key=lambda node: node.name):
            if is_guarded(state):
                yield (
                    f"{readable_name(state)} decides which graph the next step runs, so "
                    "it cannot wait"
                )
            if state.meta.get(ROLE_KEY) == "input":
                yield (
                    f"{readable_name(state)} is an argument of the step: the caller may "
                    "read it, or pass another one next time"
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


def latest_place(
    iteration: Iteration, nodes: Sequence[fx.Node], target: fx.Node
) -> fx.Node:
    """The target, or the first node before it that reads a state the nodes write."""
    inside = set(nodes)
    written = written_by(iteration, nodes)
    readers = {user for state in written for user in state.users if user not in inside}
    return min((*readers, target))


def first_reader(iteration: Iteration, nodes: Sequence[fx.Node]) -> fx.Node:
    """The first node that stays and reads a state that the nodes write; else the output."""
    return latest_place(iteration, nodes, output_node(iteration.graph))


def written_by(iteration: Iteration, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The inputs whose next values these nodes compute."""
    values = iteration.next_values
    return {state for node in nodes for state in values.get(node, ())}


def _next_values(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    values = output_values(graph)
    found: dict[fx.Node, list[fx.Node]] = {}
    for index, state in written_state(graph).items():
        value = values[index]
        if isinstance(value, fx.Node):
            found.setdefault(value, []).append(state)
    return found


def complete_region(iteration: Iteration, nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes and what only they need and can be made in the next iteration as well.

    Such as the step counters of an optimizer: with them in the region, nothing but the
    gradients and the hyper-parameters goes from one iteration to the next.
    """
    asked, states = set(nodes), iteration.next_values
    region = set(asked)
    waiting = list(asked)
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node.op != "call_function" or node in region:
                continue
            is_used_here_alone = all(
                user in region or (user.op == "output" and node in states)
                for user in node.users
            )
            # What forward and backward make is carried, not made again.
            if is_used_here_alone and owner_of(node).phase is Phase.OPTIMIZER:
                region.add(node)
                waiting.append(node)  # what it needs may be needed by nothing else now
    while True:  # leave out what needs a value of this iteration, until nothing does
        renewed = {state for node in region for state in states.get(node, ())}
        unfit = {
            node
            for node in region - asked
            if not all(
                source in region or source in renewed or _is_constant(source)
                for source in node.all_input_nodes
            )
        }
        if not unfit:
            return sorted(region)
        region -= unfit


def _is_constant(node: fx.Node) -> bool:
    is_number = not isinstance(node.meta.get("val"), torch.Tensor)
    return node.op == "get_attr" or (node.op == "placeholder" and is_number)
