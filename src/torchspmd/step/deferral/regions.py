"""Which nodes of a step may run in the next iteration, and where in it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import Phase
from torchspmd.errors import DeferralError
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


@dataclass(frozen=True, slots=True)
class DeferredRegion:
    """Nodes that run in the next iteration, by name: names outlive a copied graph.

    Attributes:
        nodes: The nodes, in graph order.
        before: The node of the next iteration before which they run.
    """

    nodes: tuple[str, ...]
    before: str


def check_region(
    graph: fx.Graph,
    nodes: Sequence[fx.Node],
    target: fx.Node,
    others: Sequence[DeferredRegion],
) -> None:
    """Raise unless nodes can wait for the next iteration, wherever they run in it."""
    problems = [
        *_wrong_nodes(graph, nodes, target, others),
        *_needed_now(graph, nodes),
        *_drawing(nodes),
        *needed_before(written_by(graph, nodes)),
        *_shared_state(graph, nodes, others),
    ]
    if not problems:
        return
    rest = len(problems) - _SHOWN
    lines = [*problems[:_SHOWN], *([f"and {rest} more"] if rest > 0 else [])]
    raise DeferralError(
        "The target nodes for ``move_to_next_iter_before`` must satisfy one of the "
        "following conditions: every user of a node is a target node too, or it is the "
        "output and takes the next value of a state from it, or there is no user.\n\n"
        + "\n".join(f"  {line}" for line in lines)
        + "\n\nMove all nodes that need the result too, or leave these where they are."
    )


def _wrong_nodes(
    graph: fx.Graph,
    nodes: Sequence[fx.Node],
    target: fx.Node,
    others: Sequence[DeferredRegion],
) -> list[str]:
    if not nodes:
        return ["no nodes are given"]
    problems = []
    taken = {name for region in others for name in region.nodes}
    for node in nodes:
        if node.graph is not graph:
            problems.append(f"{node.name} is a node of another graph")
        elif node.op in ("placeholder", "output"):
            problems.append(f"{readable_name(node)} is an {_word(node)} of the step")
        elif node.name in taken:
            problems.append(f"{node.name} is moved already")
    if target.graph is not graph or target.op == "placeholder" or target in nodes:
        problems.append(f"{target.name} is no place for them: take a node that stays")
    elif target.name in taken:
        problems.append(f"{target.name} is moved itself: take a node that stays")
    return problems


def _word(node: fx.Node) -> str:
    return "input" if node.op == "placeholder" else "output"


def _needed_now(graph: fx.Graph, nodes: Sequence[fx.Node]) -> list[str]:
    """Who needs a result of the nodes in this iteration."""
    inside = set(nodes)
    problems = []
    for node in nodes:
        for user in node.users:
            if user not in inside and user.op != "output":
                problems.append(
                    f"{node.name} is used in this iteration by {user.name} "
                    f"({owner_words(user)})"
                )
    for index, (value, role) in enumerate(
        zip(output_values(graph), roles_of(graph), strict=True)
    ):
        if value in inside and role.leaves:
            assert isinstance(value, fx.Node)
            problems.append(f"{value.name} {role.leaves} (output {index})")
    return problems


def _drawing(nodes: Sequence[fx.Node]) -> list[str]:
    return [
        f"{node.name} draws random numbers ({owner_words(node)}): in the next iteration it "
        "would draw others"
        for node in nodes
        if _torch.draws_random_numbers(node.target, node.args, node.kwargs)
    ]


def needed_before(written: Iterable[fx.Node]) -> list[str]:
    """The states among these that somebody needs before the next iteration runs."""
    states = sorted(written, key=lambda node: node.name)
    return [
        f"{readable_name(state)} decides which graph the next step runs, so it cannot wait"
        for state in states
        if is_guarded(state)
    ] + [
        f"{readable_name(state)} is an argument of the step: the caller looks at it, or "
        "passes another one next time"
        for state in states
        if state.meta.get(ROLE_KEY) == "input"
    ]


def owner_words(node: fx.Node) -> str:
    """Where in the step a node is, in words."""
    owner = owner_of(node)
    return f"{owner.phase.value} of {owner.module}"


def _shared_state(
    graph: fx.Graph, nodes: Sequence[fx.Node], others: Sequence[DeferredRegion]
) -> list[str]:
    """State that another deferred region writes and these nodes touch, or vice versa."""
    problems = []
    by_name = {node.name: node for node in graph.nodes}
    for region in others:
        members = [by_name[name] for name in region.nodes if name in by_name]
        theirs, ours = written_by(graph, members), written_by(graph, nodes)
        both = (theirs & inputs_read(nodes)) | (ours & inputs_read(members))
        problems += [
            f"{readable_name(state)} is changed by one deferred region and read by another"
            for state in sorted(both, key=lambda node: node.name)
        ]
    return problems


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


def inputs_read(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The step's inputs that these nodes take, also through views of them."""
    read: set[fx.Node] = set()
    waiting = list(nodes)
    seen = set(waiting)
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source.op == "placeholder":
                read.add(source)
            elif source not in seen and is_view(source):
                seen.add(source)
                waiting.append(source)
    return read


def is_view(node: fx.Node) -> bool:
    """Whether a node's result is another view of its first argument's memory."""
    return node.op == "call_function" and bool(getattr(node.target, "is_view", False))


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


# ----------------------------------------------------------------------------
# Whether what was moved to the next iteration can still run there after other edits.
#
# A move is checked when it is made, but later passes see one plain iteration: to them a
# read in front of a region's place looks as good as one behind it. All regions are checked
# in one walk over the graph.

_SHOWN_STANDING = 6  # problems in one message
_NAMES = 3  # nodes of a region in one line


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
    problems = list(_Standing(graph, regions).problems())
    if not problems:
        return
    what = (
        f"{edit} would break work that is moved to the next iteration, and was not taken"
        if edit
        else "IterGraphModule: an edit broke work that was moved to the next iteration"
    )
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    rest = len(problems) - _SHOWN_STANDING
    lines = [*problems[:_SHOWN_STANDING], *([f"and {rest} more"] if rest > 0 else [])]
    raise DeferralError(
        f"{what}; {count}:\n"
        + "\n".join(f"  {line}" for line in lines)
        + "\n\nMoved nodes run before the first node that reads a state that they write, "
        "and nothing else needs them. Move nodes after all other passes, or leave readers "
        "behind that place and users among the nodes that are moved."
    )


def _check_names(graph: fx.Graph, regions: Sequence[DeferredRegion], edit: str) -> None:
    there = {node.name for node in graph.nodes}
    moved = [name for each in regions for name in each.nodes if name not in there]
    places = [each.before for each in regions if each.before not in there]
    lost = [
        f"{what} are gone: {_shorten(list(dict.fromkeys(names)), _SHOWN_STANDING)}. "
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


class _Standing:
    """An iteration and its regions, looked up by node."""

    def __init__(self, graph: fx.Graph, regions: Sequence[DeferredRegion]) -> None:
        self._graph, self._regions = graph, regions
        number_of = {
            name: number for number, each in enumerate(regions) for name in each.nodes
        }
        self._moved: Mapping[fx.Node, int] = {
            node: number_of[node.name] for node in graph.nodes if node.name in number_of
        }
        placeholders = graph.find_nodes(op="placeholder")
        self._outputs = list(zip(output_values(graph), roles_of(graph), strict=True))
        self._writers: Mapping[fx.Node, int] = {
            placeholders[role.placeholder]: self._moved[value]
            for value, role in self._outputs
            if role.kind is OutputKind.STATE
            and isinstance(value, fx.Node)
            and value in self._moved
        }

    def problems(self) -> Iterator[str]:
        yield from self._early_readers()
        yield from self._users_outside()
        yield from self._returned()
        yield from needed_before(self._writers)
        yield from self._shared_states()

    def _early_readers(self) -> Iterator[str]:
        """The first node for each region that would read a state before its update."""
        begins: dict[str, list[int]] = {}
        for number, region in enumerate(self._regions):
            begins.setdefault(region.before, []).append(number)
        settled: set[int] = set()  # regions that have run here, or are told of
        for node in self._graph.nodes:
            settled.update(begins.get(node.name, ()))
            if node in self._moved:
                continue
            for state in node.all_input_nodes:
                if state not in self._writers or self._writers[state] in settled:
                    continue
                number = self._writers[state]
                settled.add(number)
                yield (
                    f"{node.name} reads {readable_name(state)} in front of "
                    f"{self._regions[number].before}, where {self._names(number)} of the "
                    "iteration before write it: it would read the old value"
                )

    def _users_outside(self) -> Iterator[str]:
        for node, number in self._moved.items():
            for user in node.users:
                if user.op != "output" and self._moved.get(user) != number:
                    yield (
                        f"{node.name} is used in this iteration by {user.name} "
                        f"({owner_words(user)}), but is moved to the next one with "
                        f"{self._names(number)}, before {self._regions[number].before}"
                    )

    def _returned(self) -> Iterator[str]:
        for index, (value, role) in enumerate(self._outputs):
            if isinstance(value, fx.Node) and value in self._moved and role.leaves:
                yield (
                    f"{value.name} {role.leaves} (output {index}), but is moved to the "
                    f"next one with {self._names(self._moved[value])}"
                )

    def _shared_states(self) -> Iterator[str]:
        members: dict[int, list[fx.Node]] = {}
        for node, number in self._moved.items():
            members.setdefault(number, []).append(node)
        for number, nodes in members.items():
            for state in sorted(inputs_read(nodes), key=lambda node: node.name):
                writer = self._writers.get(state, number)
                if writer != number:
                    yield (
                        f"{readable_name(state)} is changed by one deferred region "
                        f"({self._names(writer)}) and read by another "
                        f"({self._names(number)})"
                    )

    def _names(self, number: int) -> str:
        return _shorten(self._regions[number].nodes, _NAMES)


def _shorten(names: Sequence[str], most: int) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
