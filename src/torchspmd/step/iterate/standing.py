"""Whether what was moved to the next iteration can still run there after other edits.

A move is checked when it is made, but later passes see one plain iteration: to them a read
in front of a region's place looks as good as one behind it. All regions are checked in one
walk over the graph.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from torchspmd.errors import DeferralError
from torchspmd.step.graph.roles import (
    OutputKind,
    output_values,
    readable_name,
    roles_of,
)
from torchspmd.step.iterate.deferral import (
    DeferredRegion,
    inputs_read,
    needed_before,
    owner_words,
)

_SHOWN = 6  # problems in one message
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
    rest = len(problems) - _SHOWN
    lines = [*problems[:_SHOWN], *([f"and {rest} more"] if rest > 0 else [])]
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
