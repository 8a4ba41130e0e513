"""How virtual ranks are laid out: an axis for each process group that a graph names."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from torchspmd import _torch
from torchspmd.comm import Group, Kind, Operator, Topology, find_operator
from torchspmd.errors import UsageError, VirtualRanksError

DEFAULT_SIZE = 4  # of three or fewer ranks, sums show fewer orders or none


@dataclass(frozen=True, slots=True)
class VirtualAxis:
    """One direction in which virtual ranks are laid out.

    Attributes:
        label: The mesh axis or the ranks of the real group.
        size: How many virtual ranks.
        is_fixed: The graph's shapes ask for this size.
        real_size: How many ranks the real group has; 0 when there is none.
    """

    label: str
    size: int
    is_fixed: bool = False
    real_size: int = 0


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Virtual ranks on a grid, the last axis running fastest.

    Attributes:
        axes: The directions, slowest first.
        groups: Which of them each group of the graph spans, by the group's name.
    """

    axes: tuple[VirtualAxis, ...]
    groups: Mapping[str, tuple[int, ...]]

    @property
    def size(self) -> int:
        """How many virtual ranks there are."""
        return math.prod(axis.size for axis in self.axes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Where a virtual rank stands, by axis."""
        found = []
        for axis in reversed(self.axes):
            rank, place = divmod(rank, axis.size)
            found.append(place)
        return tuple(reversed(found))

    def teams(self, group: str) -> list[list[int]]:
        """The sets of virtual ranks that communicate, each in group order.

        >>> layout = RankLayout(
        ...     (VirtualAxis("dp", 2), VirtualAxis("tp", 2)),
        ...     {"0": (0,), "1": (1,)},
        ... )
        >>> layout.teams("0"), layout.teams("1")
        ([[0, 2], [1, 3]], [[0, 1], [2, 3]])
        """
        spanned = self.groups[group]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            place = self.coordinates(rank)
            outside = tuple(p for axis, p in enumerate(place) if axis not in spanned)
            found.setdefault(outside, []).append(rank)
        return list(found.values())

    def __str__(self) -> str:
        """As in ``4 virtual ranks (dp=2, tp=2)``."""
        if not self.groups:
            return f"{self.size} virtual ranks without communication"
        axes = ", ".join(f"{axis.label}={axis.size}" for axis in self.axes)
        return f"{self.size} virtual ranks ({axes})"


def collective(node: fx.Node) -> tuple[Operator, dict[str, Any]] | None:
    """The operator of a node that communicates and its arguments by name, or None."""
    if node.op != "call_function" or not isinstance(node.target, _torch.OpOverload):
        return None
    operator = find_operator(_torch.packet_name(node.target))
    if operator is None:
        return None
    names = _torch.argument_names(node.target)
    return operator, {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def lay_out(
    graph: fx.Graph, ranks: int | Mapping[str, int] = DEFAULT_SIZE
) -> RankLayout:
    """Lay virtual ranks out for the groups of a graph.

    Args:
        graph: One rank's program.
        ranks: How many ranks along each axis whose size the graph's shapes leave open:
            one number for all, or by axis name (4 for those that are not named).
    """
    spans = _spans(graph)
    elements: list[_Element] = []
    members: dict[str, list[_Element]] = {}
    for span in sorted(spans, key=lambda each: len(each.ranks)):
        found = _decompose(span, elements)
        for name in span.names:
            members[name] = found
    elements.sort(key=lambda each: -each.stride)
    asked = _asked(ranks, elements)
    axes = tuple(
        VirtualAxis(
            each.label,
            each.fixed or asked(each.label),
            bool(each.fixed),
            each.real_size,
        )
        for each in elements
    )
    if not axes:
        axes = (VirtualAxis("no communication", asked("no communication")),)
    groups = {
        name: tuple(sorted(elements.index(each) for each in found))
        for name, found in members.items()
    }
    _check_sizes(ranks, axes)
    return RankLayout(axes, groups)


@dataclass(slots=True)
class _Span:
    """The ranks of one or more groups of a graph, and the size its shapes ask for."""

    names: list[str]
    label: str
    ranks: tuple[int, ...]
    fixed: int = 0


@dataclass(slots=True, eq=False)
class _Element:
    """An axis that no smaller group divides."""

    label: str
    offsets: frozenset[
        int
    ]  # of its real ranks from this rank's own line; empty: unknown
    stride: int
    real_size: int
    fixed: int = 0


def _spans(graph: fx.Graph) -> list[_Span]:
    topology = Topology()
    spans: dict[object, _Span] = {}
    for node, name, fixed in _group_uses(graph):
        group = _resolve(topology, name)
        key = group.ranks or name
        span = spans.setdefault(key, _Span([], group.label, group.ranks))
        if name not in span.names:
            span.names.append(name)
        if fixed and span.fixed not in (0, fixed):
            raise VirtualRanksError(
                f"virtual ranks: {node.name} works on {fixed} ranks of {group.label}, "
                f"another collective on {span.fixed}: one group cannot have both sizes."
            )
        span.fixed = span.fixed or fixed
    return list(spans.values())


def _group_uses(graph: fx.Graph) -> Iterator[tuple[fx.Node, str, int]]:
    """Each communicating node, its group's name, and the group size that it fixes."""
    for node in graph.nodes:
        found = collective(node)
        if found is None:
            continue
        operator, arguments = found
        name = arguments.get("group_name")
        if not isinstance(name, str):
            raise VirtualRanksError(
                f"virtual ranks: {node.name} ({node.target}) does not name its group; "
                "only functional collectives can be run."
            )
        yield node, name, _fixed_size(node, operator, arguments)


def _fixed_size(node: fx.Node, operator: Operator, arguments: dict[str, Any]) -> int:
    if isinstance(size := arguments.get("group_size"), int):
        return size
    if operator.kind is not Kind.ALL_TO_ALL:
        return 0
    if "shard_dim" in arguments:
        dim = arguments["shard_dim"]
        before, after = arguments["input"].meta["val"], node.meta["val"]
        return int(before.shape[dim]) // int(after.shape[dim])
    return len(arguments["input_split_sizes"])


def _resolve(topology: Topology, name: str) -> Group:
    try:
        return topology.group_of({"group_name": name})
    except (RuntimeError, ValueError):  # a graph made without a process group
        return Group(name=name, ranks=())


def _decompose(span: _Span, elements: list[_Element]) -> list[_Element]:
    """The axes that a group spans; a new one for what the known ones do not cover."""
    offsets = frozenset(rank - span.ranks[0] for rank in span.ranks)
    inside = [each for each in elements if span.ranks and each.offsets <= offsets]
    inside = [each for each in inside if each.offsets]
    covered = {0}
    for each in inside:
        covered = {a + b for a in covered for b in each.offsets}
    if any(
        each not in inside and len(each.offsets & offsets) > 1 for each in elements
    ) or not (covered <= offsets or not span.ranks):
        raise VirtualRanksError(
            f"virtual ranks: the group of {span.label} overlaps another group of the "
            "graph without containing it, which is no grid of axes."
        )
    if span.fixed and inside:
        for each in inside:
            each.fixed = each.fixed or each.real_size
    if span.ranks and covered == offsets and inside:
        return inside
    new = _rest(span, offsets, covered)
    elements.append(new)
    return [*inside, new]


def _rest(span: _Span, offsets: frozenset[int], covered: set[int]) -> _Element:
    """The axis of a group that remains beside the axes inside it."""
    if len(covered) == 1:
        stride = min(offsets - {0}, default=0)
        size = len(offsets)
        return _Element(span.label, offsets, stride, size, span.fixed)
    stride = min(offsets - covered)
    size = len(offsets) // len(covered)
    label = f"rest of {span.label}"
    own = frozenset(stride * place for place in range(size))
    return _Element(label, own, stride, size, size if span.fixed else 0)


def _asked(
    ranks: int | Mapping[str, int], elements: Sequence[_Element]
) -> Callable[[str], int]:
    if isinstance(ranks, int):
        number = ranks
        return lambda label: number
    labels = [each.label for each in elements]
    unknown = sorted(set(ranks) - set(labels))
    if unknown:
        raise UsageError(
            f"virtual ranks: the graph has no axis {', '.join(unknown)}; it communicates "
            f"over {', '.join(labels) or 'none'}."
        )
    by_label = ranks
    return lambda label: by_label.get(label, DEFAULT_SIZE)


def _check_sizes(ranks: int | Mapping[str, int], axes: Sequence[VirtualAxis]) -> None:
    wanted = {} if isinstance(ranks, int) else ranks
    for axis in axes:
        if axis.size < 1:
            raise UsageError(f"virtual ranks: {axis.label}={axis.size} is not a size.")
        asked = wanted.get(axis.label, axis.size)
        if axis.is_fixed and asked != axis.size:
            raise UsageError(
                f"virtual ranks: {axis.label}={asked} is not possible; the shapes of the "
                f"graph are those of {axis.size} ranks."
            )
