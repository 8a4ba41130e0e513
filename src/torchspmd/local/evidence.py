"""What layouts do not show of a region: the recorded graph, in-place collectives.

Between an output and the arguments lies the graph that autograd has just recorded. If
every way from the output to an argument that differs between ranks goes through a
collective whose backward is its exact transpose, the gradient follows from layouts.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchspmd import _torch
from torchspmd.local.frame import Frame, LocalAxis
from torchspmd.local.specs import Problem

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


# ----------------------------------------------------------------------------
# Collectives that autograd does not see.
#
# ``dist.all_reduce`` writes into its argument, and the recorded graph says nothing of it:
# what depends on other ranks seems to depend on this one alone. What ``dist.all_gather``
# or ``dist.send`` take is used on other ranks, whose gradient never comes back. So calls
# are watched. That costs some microseconds for each operator, so the first call of each
# kind is watched, and further ones only where the function has called such collectives.

_IN_PLACE = "c10d::"
_FUNCTIONAL = "_c10d_functional::"
_NOTHING_WRITTEN = ("c10d::send", "c10d::barrier", "c10d::monitored_barrier_")


class Unseen(NamedTuple):
    """A collective over an axis (by number) on a tensor with a gradient.

    It wrote into that tensor, or, where ``is_lost``, only sent it, so that the gradient
    of what other ranks compute with it is lost.
    """

    axis: int
    operator: str
    is_lost: bool = False


class Watch:
    """The collectives of one call that autograd does not see.

    Attributes:
        has_unseen: Some were called.
        unseen: Those that wrote into memory that a tensor with a gradient reads, or sent
            such a tensor.
    """

    def __init__(self, frame: Frame) -> None:
        self.has_unseen = False
        self.unseen: set[Unseen] = set()
        self._axes = {axis.index for axis in frame.axes if axis.size > 1}
        self._mesh = frame.mesh
        self._caller: CodeType | None = None
        # By memory; the tensor is held, so that the memory stays its own.
        self._written: dict[int, tuple[torch.Tensor, frozenset[Unseen]]] = {}

    @contextmanager
    def watching(self, caller: CodeType) -> Iterator[None]:
        """Watch what runs inside, called from this code."""
        self._caller = caller
        with _torch.observe_calls(self._note):
            yield

    def look_at(self, values: Any) -> None:
        """Note tensors with a gradient that lie in memory written before."""
        if not self._written:
            return
        for tensor in _torch.leaves_of(torch.Tensor, values):
            if not tensor.requires_grad or isinstance(tensor, DTensor):
                continue
            target, writes = self._written.get(
                _torch.storage_key(tensor), (None, frozenset())
            )
            # A received tensor may become a leaf of the function's own.
            if target is not None and not target.requires_grad:
                self.unseen |= writes

    def _note(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.look_at((args, kwargs))
        name = _torch.packet_name(op)
        is_in_place = name.startswith(_IN_PLACE)
        if not is_in_place and not _is_functional_without_backward(name):
            return
        self.has_unseen = True
        given = dict(zip(_torch.argument_names(op), args, strict=False), **kwargs)
        named = given.get("process_group", given.get("group_name"))
        group = _torch.resolve_group(named)
        # A custom function has its own backward, and is opaque to the rules as a whole.
        if group is None or _torch.is_in_custom_function(self._caller):
            return
        axes = group_axes(self._mesh, group) & self._axes
        is_written = is_in_place and name not in _NOTHING_WRITTEN
        targets = next(iter(given.values())) if is_written else ()
        written = list(_torch.leaves_of(torch.Tensor, targets))
        self._note_written(written, frozenset(Unseen(axis, name) for axis in axes))
        sent = _torch.leaves_of(torch.Tensor, (args, kwargs))
        # Without gradients the user has said that none is to pass.
        if torch.is_grad_enabled() and any(
            tensor.requires_grad and all(tensor is not other for other in written)
            for tensor in sent
        ):
            self.unseen |= {Unseen(axis, name, is_lost=True) for axis in axes}

    def _note_written(
        self, tensors: Sequence[torch.Tensor], writes: frozenset[Unseen]
    ) -> None:
        for tensor in tensors:
            if tensor.requires_grad:
                self.unseen |= writes
            elif writes:
                self._written[_torch.storage_key(tensor)] = tensor, writes


def _is_functional_without_backward(name: str) -> bool:
    return name.startswith(_FUNCTIONAL) and not (
        name.endswith("::wait_tensor") or _torch.has_backward(name)
    )


def describe_unseen(
    unseen: Sequence[Unseen], axes: Sequence[LocalAxis]
) -> dict[int, list[Problem]]:
    """The problem with each in-place collective, by axis number."""
    names = {axis.index: axis.name for axis in axes}
    problems: dict[int, list[Problem]] = {}
    for index, operator, is_lost in unseen:
        if is_lost:
            continue
        name = names[index]
        problem = Problem(
            f"{operator} over {name!r}: was called in place on a tensor with a "
            "gradient; autograd does not see it",
            "Reduce by a collective with a backward (functional collectives, or "
            "torch.distributed.nn), or return the partial value as Partial() over "
            f"{name!r} and let DTensor reduce it. If no gradient is to pass, reduce a "
            "copy: t.detach().clone(). If its backward passes the gradient on as it is, "
            "write in_grad_placements=... for every argument, or out_grad_placements=... "
            "for every output.",
        )
        problems.setdefault(index, []).append(problem)
    return problems


def describe_lost(unseen: Sequence[Unseen], axes: Sequence[LocalAxis]) -> list[Problem]:
    """The problem with each collective that sends a tensor with a gradient."""
    names = {axis.index: axis.name for axis in axes}
    return [
        Problem(
            f"{operator} over {names[index]!r}: sends a tensor with a gradient; autograd "
            "does not see it, so the gradient of what other ranks compute with it is lost",
            "Send it by a collective with a backward (torch.distributed.nn.functional, or "
            "the *_autograd functional collectives), or write a torch.autograd.Function "
            "around it whose backward sends the gradient back. If no gradient is to pass, "
            "send t.detach().",
        )
        for index, operator, is_lost in unseen
        if is_lost
    ]
