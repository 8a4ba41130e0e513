"""Values that differ from rank to rank where every rank must hold the same.

A replicated parameter stays the same on all ranks only if each of them updates it by equal
values. The traced graph shows which are equal: what one rank alone has is followed through
the graph, until a sum or a gather over the ranks makes equal values of it. A part that is
cut out of an equal value without communication is not seen.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from torchspmd import _torch
from torchspmd.comm import Kind
from torchspmd.errors import CaptureError
from torchspmd.layout.names import axis_names
from torchspmd.step.capture.inventory import Inventory, Role, Slot
from torchspmd.step.capture.parallel_mode import ParallelMode
from torchspmd.step.capture.user_code import calling_line
from torchspmd.step.graph.aliases import (
    communication_of,
    find_aliases,
    operator_of,
    written_nodes,
)
from torchspmd.step.graph.metadata import last_node, output_node, output_values
from torchspmd.step.progress import phase

_EQUALIZING = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.BROADCAST)
# They take the form of their argument, not its values.
_MAKERS = ("zeros", "ones", "full", "empty")
_FORM_ONLY = {f"aten::{name}_like" for name in _MAKERS}
_FORM_ONLY |= {f"aten::new_{name}" for name in _MAKERS}


@dataclass(frozen=True, slots=True)
class Sink:
    """A value that must be equal on all ranks of a group.

    Attributes:
        at: The node after which it is looked at; its memory may be written later.
        value: The node that it is.
        name: What it is called in messages.
    """

    at: fx.Node
    value: fx.Node
    name: str


def find_divergent(
    graph: fx.Graph, ranks: frozenset[int], sources: set[fx.Node], sinks: Iterable[Sink]
) -> list[str]:
    """The names of the sinks that follow from values which one rank alone has.

    Args:
        graph: A traced step; operators may write into tensors.
        ranks: The ranks that must hold equal values.
        sources: The nodes whose values differ between these ranks.
        sinks: What must be equal on them.
    """
    root = find_aliases(graph).root
    waiting: dict[fx.Node, list[Sink]] = {}
    for sink in sinks:
        waiting.setdefault(sink.at, []).append(sink)
    differing: set[fx.Node] = set()  # memory, by the node that brought it in
    names: dict[str, None] = {}
    for node in graph.nodes:
        if _is_equalized(node, ranks):
            differing -= _written_by(node, root)
        elif node in sources or any(root[n] in differing for n in node.all_input_nodes):
            differing |= {root[node], *_written_by(node, root)}
        for sink in waiting.get(node, ()):
            if root[sink.value] in differing:
                names[sink.name] = None
    return list(names)


def _is_equalized(node: fx.Node, ranks: frozenset[int]) -> bool:
    """Whether a node's value is the same on all these ranks, whatever goes in."""
    operator = communication_of(node)
    if operator is not None:
        return operator.kind in _EQUALIZING and ranks <= _ranks_of(node.args[-1])
    target = operator_of(node)
    return target is not None and _torch.packet_name(target) in _FORM_ONLY


def _ranks_of(group: Any) -> frozenset[int]:
    """The ranks of a group; none where it is none, or is not known any more."""
    # By ranks: DTensor may take the groups of an equal mesh that was made before.
    try:
        found = _torch.resolve_group(group)
    except (RuntimeError, ValueError):  # of a world that is gone
        found = None
    return frozenset(() if found is None else dist.get_process_group_ranks(found))


def _written_by(node: fx.Node, root: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """The memory that a node writes into, by the node that brought it in."""
    return {root[written] for written in written_nodes(node)}


# ----------------------------------------------------------------------------
# Along axes besides the data axis: nobody reduces the gradient of a replicated parameter
# there, so it must have been computed from equal values.

_GRADIENT_OF = "torchspmd_gradient_of"  # on a node: the slot of its parameter


@dataclass(frozen=True, slots=True)
class OtherAxis:
    """An axis besides the data axis, and the inputs of a step that differ along it."""

    name: str
    ranks: frozenset[int]
    differing: frozenset[int]


def find_other_axes(
    slots: list[Slot], data: Sequence[DeviceMesh]
) -> tuple[OtherAxis, ...]:
    """The axes that parameters of a step are sharded over besides the data axes."""
    if not data:
        return ()
    own = {_ranks_along(axis, 0) for axis in data}
    names: dict[frozenset[int], str] = {}
    differing: dict[frozenset[int], set[int]] = {}
    for place, slot in enumerate(slots):
        for name, ranks in _sharded_over(slot.tensor):
            if len(ranks) > 1 and ranks not in own:
                names.setdefault(ranks, name)
                differing.setdefault(ranks, set()).add(place)
    return tuple(
        OtherAxis(names[ranks], ranks, frozenset(places))
        for ranks, places in differing.items()
        if any(slots[place].role is Role.PARAMETER for place in places)
    )


def _sharded_over(tensor: torch.Tensor) -> list[tuple[str, frozenset[int]]]:
    """Name and ranks of each axis along which a tensor's values differ."""
    layout = _torch.layout_of(tensor)
    if layout is None:
        return []
    mesh, placements = layout.mesh, layout.placements
    names = axis_names(mesh)
    return [
        (names[dim], _ranks_along(mesh, dim))
        for dim, placement in enumerate(placements)
        if not placement.is_replicate()
    ]


def _ranks_along(mesh: DeviceMesh, dim: int) -> frozenset[int]:
    """The ranks that differ from this one along one axis of a mesh, and this one."""
    # Not by its group or coordinate: DTensor may give an equal mesh of an earlier world.
    found = (mesh.mesh == dist.get_rank()).nonzero().tolist()
    if not found:
        return frozenset()
    place: list[Any] = found[0]
    place[dim] = slice(None)
    return frozenset(mesh.mesh[tuple(place)].tolist())


def mark_gradient(parameter: torch.Tensor, slot: int, gradient: torch.Tensor) -> None:
    """Note in the graph that this is the gradient of a parameter, behind all hooks."""
    wanted, found = _torch.layout_of(parameter), _torch.layout_of(gradient)
    if found is not None and (wanted is None or found.placements != wanted.placements):
        return  # a redistribution to the parameter's layout follows
    if not torch.is_grad_enabled():  # otherwise it is no last one: create_graph=True
        _torch.plain_tensor(gradient).detach()  # a node that nothing needs
        _mark_last(_GRADIENT_OF, slot)


def _mark_last(key: str, value: Any) -> None:
    node = last_node(_torch.current_graph())
    if node is not None:
        node.meta[key] = value


def check_gradients(
    traced: fx.GraphModule, slots: list[Slot], axes: tuple[OtherAxis, ...]
) -> None:
    """Refuse a step whose replicated parameters get another gradient on each rank."""
    graph = traced.graph
    inputs = graph.find_nodes(op="placeholder")
    marked = [node for node in graph.nodes if _GRADIENT_OF in node.meta]
    problems = []
    for axis in axes:
        sources = {inputs[place] for place in axis.differing}
        sinks = [
            Sink(node, node, slots[node.meta[_GRADIENT_OF]].name)
            for node in marked
            if node.meta[_GRADIENT_OF] not in axis.differing
        ]
        found = find_divergent(graph, axis.ranks, sources, sinks)
        problems += [
            f"{name}: along {axis.name} every rank has a gradient of its own part of the "
            "activations, and nothing adds them up"
            for name in found
            if not any(
                sink.name == name and _is_reduced_later(graph, sink.value, axis.ranks)
                for sink in sinks
            )
        ]
    if problems:
        raise CaptureError(
            "compile: parameters that an axis replicates would get other gradients on its "
            "ranks\n\n"
            + "\n".join(f"  * {line}" for line in problems)
            + "\n\nGive the "
            "module a style in the plan: SequenceParallel() for a norm between sharded "
            "activations, ReplicateParallel() for other modules; or gather its input first "
            "(PrepareModuleInput). Nothing was changed."
        )


def _is_reduced_later(
    graph: fx.Graph, gradient: fx.Node, ranks: frozenset[int]
) -> bool:
    """Whether the step itself reduces a gradient over these ranks, after backward.

    Told from a norm, which is reduced too, by its size.
    """
    size = gradient.meta["val"].numel()
    reductions = [
        Sink(node, value, "reduced")
        for node in graph.nodes
        if communication_of(node) is not None and _is_equalized(node, ranks)
        for value in node.all_input_nodes
        if value.meta["val"].numel() >= max(size, 2)
    ]
    nobody = frozenset({-1})  # no reduction stops what is followed
    return bool(find_divergent(graph, nobody, {gradient}, reductions))


# ----------------------------------------------------------------------------
# Along the data axis: gradients that are differentiated again (``create_graph=True``).
#
# Those of ``torch.autograd.grad`` stay what each rank computed, with their graph. What is
# accumulated into ``grad`` is reduced over the ranks, and has no graph any more.

_INNER = "torchspmd_inner_gradient"


def keep_inner(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as this rank computed it, in a node that is marked so."""
    kept = gradient.clone()
    _mark_last(_INNER, True)
    return kept


def refuse_graphs(parameter: torch.Tensor, name: str) -> Any:
    """Refuse ``backward(create_graph=True)``; gives what removes the hook again."""

    def check(_: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise CaptureError(
                f"compile: backward(create_graph=True) would leave a gradient in {name}"
                ".grad that is reduced over ranks and cannot be differentiated again\n\n"
                f"  * {calling_line()}\n\nTake gradients that a loss is made of with "
                "torch.autograd.grad(loss, parameters, create_graph=True): they stay those "
                "of this rank, and what the last backward() makes of them is reduced."
            )

    return parameter.register_post_accumulate_grad_hook(check).remove


def check_inner_gradients(
    graph: fx.Graph, data: DeviceMesh, outputs: Mapping[int, str]
) -> None:
    """Refuse parameters that would be updated by inner gradients, on each rank by its own.

    Args:
        graph: The traced step.
        data: The axis that gradients are reduced over.
        outputs: The names of outputs that must be equal on its ranks, by place.
    """
    sources = {node for node in graph.nodes if _INNER in node.meta}
    if not sources:
        return
    values = output_values(graph)
    sinks = [
        Sink(output_node(graph), value, name)
        for place, name in outputs.items()
        if isinstance(value := values[place], fx.Node)
    ]
    ranks = _ranks_along(data, 0)
    names = find_divergent(graph, ranks, sources, sinks)
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise CaptureError(
            f"compile: {names[0]}{more} would be updated by gradients of "
            "torch.autograd.grad(..., create_graph=True), which each rank has of its own "
            "batch, so that ranks would train other models. Make a loss of them and call "
            "its backward(), which reduces; or leave create_graph out."
        )


# ----------------------------------------------------------------------------
# Checksums of tensors that ranks must hold alike.

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(slots: Sequence[Slot]) -> list[str]:
    """Name, shape and checksum of the values of each tensor; of a DTensor, of its shard."""
    if not slots:
        return []
    if any(_torch.is_rehearsed(_torch.plain_tensor(slot.tensor)) for slot in slots):
        return [f"{slot.name} {list(slot.tensor.shape)}" for slot in slots]
    with torch.no_grad():
        sums = torch.stack([_bits(slot.tensor).sum().cpu() for slot in slots])
    return [
        f"{slot.name} {list(slot.tensor.shape)} #{_folded(int(value)):08x}"
        for slot, value in zip(slots, sums.tolist(), strict=True)
    ]


def checksum_parameters(inventory: Inventory, mode: ParallelMode) -> tuple[str, ...]:
    """Checksums of the parameters that must be equal on all ranks of the data axis.

    Those of which these ranks hold different parts are left out. Buffers may differ: each
    rank can have statistics of its own batches. With one result for the batches of all
    ranks a tensor in a plain attribute may not: it could be a part of a batch.
    """
    axis = mode.mesh
    if axis is None or not mode.reduces or axis.size() == 1:
        return ()
    if dist.get_backend() == "fake":
        return ()
    ranks = frozenset(int(rank) for rank in axis.mesh.flatten().tolist())
    held = set[int]() if mode.has_own_batches else inventory.held
    slots = [
        slot
        for place, slot in enumerate(inventory.slots)
        if (slot.role is Role.PARAMETER or place in held)
        and not _torch.is_fake(_torch.plain_tensor(slot.tensor))
        and all(len(ranks & each) <= 1 for _, each in _sharded_over(slot.tensor))
    ]
    with phase("checksums"):
        return tuple(checksums(slots))


def _folded(value: int) -> int:
    # Both halves: round float64 numbers differ in the upper one alone.
    return (value ^ (value >> 32)) & 0xFFFFFFFF


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    whole = _torch.plain_tensor(tensor).detach().contiguous()
    if whole.is_complex():
        whole = torch.view_as_real(whole)
    return whole.view(_INTEGERS[whole.element_size()])
