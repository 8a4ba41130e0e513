"""What the backward graph of a region says about an output that is declared replicated.

Between an output and the arguments lies the graph that autograd has just recorded. If
every way from the output to an argument that differs between ranks goes through a
collective whose backward is its exact transpose, the gradient follows from layouts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchspmd import _torch

Node: TypeAlias = Any  # torch has no public type for an autograd node


@dataclass(frozen=True, slots=True)
class Evidence:
    """What leads from one output to the arguments, for one mesh axis.

    Attributes:
        bare: Arguments (by index) reached without a collective that makes values equal
            over the axis; each with the name of a custom autograd function on the
            way, or an empty string.
        has_collective: A differentiable collective over the axis is on some way.
        has_opaque: A custom autograd function is on some way.
    """

    bare: tuple[tuple[int, str], ...]
    has_collective: bool
    has_opaque: bool


@lru_cache(maxsize=256)
def _spanned_axes(mesh: DeviceMesh, ranks: tuple[int, ...]) -> frozenset[int]:
    places = [tuple(map(int, (mesh.mesh == rank).nonzero()[0])) for rank in ranks]
    return frozenset(
        axis for axis in range(mesh.ndim) if len({place[axis] for place in places}) > 1
    )


def group_axes(mesh: DeviceMesh, group: Any) -> frozenset[int]:
    """The mesh axes along which a process group communicates."""
    ranks = tuple(dist.get_process_group_ranks(group))
    known = set(mesh.mesh.flatten().tolist())
    if not known.issuperset(ranks):  # it goes beyond the mesh, so along every axis
        return frozenset(range(mesh.ndim))
    return _spanned_axes(mesh, ranks)


def gather_evidence(
    start: Node, arguments: Mapping[Node, int], mesh: DeviceMesh, axes: Sequence[int]
) -> list[Evidence]:
    """Walk from an output's node to the arguments' nodes, for several axes at once.

    Args:
        start: The node that made the output.
        arguments: For the node that brought each argument in, its index; a negative one
            for plain tensors, where the walk ends as well.
        mesh: The region's mesh.
        axes: Numbers of mesh axes.

    Returns:
        The evidence for each of the axes.
    """
    ends, collectives, has_opaque = _walk(start, arguments, mesh)
    return [
        Evidence(_bare(ends, axis), axis in collectives, has_opaque) for axis in axes
    ]


# How the walk came to a node: axes along which values were made equal on the way, and
# the custom function on the way.
_Way: TypeAlias = tuple[frozenset[int], str]
_START: _Way = (frozenset(), "")


def _walk(
    start: Node, arguments: Mapping[Node, int], mesh: DeviceMesh
) -> tuple[set[tuple[int, _Way]], set[int], bool]:
    """The arguments reached and the ways to them, axes of collectives, custom functions.

    Most nodes are local ones, and a region may have thousands: their path through this
    loop is short.
    """
    ends: set[tuple[int, _Way]] = set()
    collectives: set[int] = set()
    has_opaque = False
    is_local = _torch.LOCAL_NODE_TYPES
    seen: dict[_Way, set[Node]] = {}  # holds the nodes, so that their ids stay valid
    todo: list[tuple[Node, _Way]] = [(start, _START)]
    while todo:
        node, way = todo.pop()
        passed = seen.setdefault(way, set())
        while node is not None and node not in passed:
            passed.add(node)
            if node in arguments:
                ends.add((arguments[node], way))
                break
            if type(node) not in is_local:
                way, along, is_opaque = _pass(node, way, mesh)
                passed = seen.setdefault(way, set())
                collectives |= along
                has_opaque |= is_opaque
            edges = node.next_functions
            for after, _ in edges[1:]:
                if after is not None:
                    todo.append((after, way))
            node = edges[0][0] if edges else None
    return ends, collectives, has_opaque


def _pass(node: Node, way: _Way, mesh: DeviceMesh) -> tuple[_Way, frozenset[int], bool]:
    """The way behind a node, the axes it communicates along, and whether it is custom."""
    kind = _torch.node_kind(node)
    if kind is _torch.NodeKind.LOCAL:
        return way, frozenset(), False
    if kind is _torch.NodeKind.OPAQUE:
        name = _torch.node_name(node).removesuffix("Backward")
        return (way[0], way[1] or name), frozenset(), True
    along = group_axes(mesh, _torch.node_group(node))
    if kind is _torch.NodeKind.MAKES_EQUAL:
        way = way[0] | along, way[1]
    return way, along, False


def _bare(ends: set[tuple[int, _Way]], axis: int) -> tuple[tuple[int, str], ...]:
    found: dict[int, str] = {}
    for index, (equal, opaque) in sorted(ends, key=lambda end: (end[0], end[1][1])):
        if index >= 0 and axis not in equal:
            found[index] = opaque or found.get(index, "")
    return tuple(sorted(found.items()))
