"""Gradients of parameters that another axis replicates must be equal along that axis.

The data axis reduces every gradient; along other axes nobody does it for a plain parameter.
Its gradient is right there only if every rank computed it from equal values. The graph says
so: shards of the axis make values that differ from rank to rank, its sums and gathers make
equal ones. A part that is cut out of an equal value without communication is not seen.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh

from torchspmd import _torch
from torchspmd.comm import Kind, find_operator
from torchspmd.errors import CaptureError
from torchspmd.step.capture.inventory import Slot
from torchspmd.step.capture.refusals import line_of_caller
from torchspmd.step.graph.aliases import find_aliases, operator_of
from torchspmd.step.graph.metadata import last_node
from torchspmd.step.modes.shard_layout import Cut

# On a node: the parameter whose gradient it is, reduced over the data axis.
REDUCED_FOR = "torchspmd_reduced_for"

_MAKES_EQUAL = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.BROADCAST)
# They take the form of their argument, not its values.
_MAKERS = ("zeros", "ones", "full", "empty")
_FORM_ONLY = {f"aten::{name}_like" for name in _MAKERS}
_FORM_ONLY |= {f"aten::new_{name}" for name in _MAKERS}


@dataclass(frozen=True, slots=True)
class OtherAxis:
    """An axis besides the data axis, and the inputs of a step that differ along it."""

    name: str
    group: str
    differing: frozenset[int]


def find_other_axes(
    slots: list[Slot], cuts: Mapping[int, Cut]
) -> tuple[OtherAxis, ...]:
    """The axes that parameters of a step lie over besides the data axis."""
    meshes = {cut.whole.mesh: None for cut in cuts.values() if cut.whole is not None}
    return tuple(
        OtherAxis(
            (mesh.mesh_dim_names or ("",))[0],
            mesh.get_group().group_name,
            frozenset(n for n, slot in enumerate(slots) if _differs(slot, mesh)),
        )
        for mesh in meshes
    )


def _differs(slot: Slot, axis: DeviceMesh) -> bool:
    layout = _torch.layout_of(slot.tensor)
    if layout is None:
        return False
    names = layout.mesh.mesh_dim_names or ()
    return any(
        not placement.is_replicate() and layout.mesh[name] == axis
        for name, placement in zip(names, layout.placements, strict=False)
    )


def check_equal_gradients(traced: fx.GraphModule, axes: tuple[OtherAxis, ...]) -> None:
    """Refuse a step whose replicated parameters get another gradient on each rank."""
    problems = [
        f"{name}: along {axis.name} every rank has a gradient of its own part of the "
        "activations, and nothing adds them up"
        for axis in axes
        for name in _unequal(traced.graph, axis)
    ]
    if problems:
        raise CaptureError(
            "compile(parallel_mode=DataParallel('fully_shard')): parameters that an axis "
            "replicates would get other gradients on its ranks\n\n"
            + "\n".join(f"  * {line}" for line in problems)
            + "\n\nGive the module a style in the plan: SequenceParallel() for a norm "
            "between sharded activations, ReplicateParallel() for other modules; or "
            "gather its input first (PrepareModuleInput). Nothing was changed."
        )


def _unequal(graph: fx.Graph, axis: OtherAxis) -> Iterator[str]:
    """Parameters whose reduced gradient was made of values that differ along the axis."""
    root = find_aliases(graph).root
    differing: set[fx.Node] = set()  # memory, by the node that brought it in
    names: dict[str, None] = {}
    for place, node in enumerate(graph.nodes):
        if node.op == "placeholder":
            if place in axis.differing:
                differing.add(node)
            continue
        differs = any(root[source] in differing for source in node.all_input_nodes)
        if makes_equal(node, axis.group):
            differing -= written_by(node, root)
        elif differs:
            differing |= {root[node], *written_by(node, root)}
        if REDUCED_FOR in node.meta and root[node] in differing:
            names[node.meta[REDUCED_FOR]] = None
    yield from names


def makes_equal(node: fx.Node, group: str) -> bool:
    """Whether a node's value is the same on all ranks of a group, whatever goes in."""
    target = operator_of(node)
    if target is None:
        return False
    name = _torch.packet_name(target)
    operator = find_operator(name)
    if operator is None:
        return name in _FORM_ONLY
    return operator.kind in _MAKES_EQUAL and (
        group in node.args or _has_same_ranks(node.args[-1], group)
    )


def _has_same_ranks(other: Any, group: str) -> bool:
    """Whether another group has the ranks of this one.

    DTensor may take the groups of an equal mesh that was made before, from its cache.
    """
    if not isinstance(other, str):
        return False
    try:
        found = [_torch.resolve_group(name) for name in (other, group)]
    except (RuntimeError, ValueError):  # of a world that is gone
        return False
    one, two = (dist.get_process_group_ranks(each) for each in found)
    return one == two


def written_by(node: fx.Node, root: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """The memory that a node writes into, by the node that brought it in."""
    written: set[fx.Node] = set()
    for place in _torch.written_arguments(node.target):
        targets, _ = _torch.flatten_tree(node.args[place : place + 1])
        written |= {root[target] for target in targets if isinstance(target, fx.Node)}
    return written


# ----------------------------------------------------------------------------
# Gradients that are differentiated again (``create_graph=True``): a gradient penalty.
#
# Those of ``torch.autograd.grad`` stay what each rank computed, with their graph. What is
# accumulated into ``grad`` is reduced over the ranks, and has no graph any more.

_INNER = "torchspmd_inner_gradient"


def keep_inner(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as this rank computed it, in a node that tells so."""
    kept = gradient.clone()
    node = last_node(_torch.current_graph())
    if node is not None:
        node.meta[_INNER] = True
    return kept


def refuse_graphs(parameter: torch.Tensor, name: str) -> Any:
    """Refuse ``backward(create_graph=True)``; gives what removes the hook again."""
    node = get_gradient_edge(
        parameter
    ).node  # a leaf's node lives only while it is held

    def check(gradients: Any) -> None:
        if torch.is_grad_enabled():
            raise CaptureError(
                f"compile: backward(create_graph=True) would leave a gradient in {name}"
                ".grad that is reduced over ranks and cannot be differentiated again\n\n"
                f"  * {line_of_caller()}\n\nTake gradients that a loss is made of with "
                "torch.autograd.grad(loss, parameters, create_graph=True): they stay those "
                "of this rank, and what the last backward() makes of them is reduced."
            )

    handle = node.register_prehook(check)

    def remove(held: Any = node) -> None:
        handle.remove()

    return remove


def check_inner_gradients(
    graph: fx.Graph, group: str, outputs: Mapping[int, str]
) -> None:
    """Refuse parameters that would be updated by inner gradients, on each rank by its own.

    Args:
        graph: The traced step.
        group: The ranks that gradients are reduced over.
        outputs: The names of outputs that must be equal on these ranks, by place.
    """
    if not any(_INNER in node.meta for node in graph.nodes):
        return
    root = find_aliases(graph).root
    own: set[fx.Node] = set()  # memory with values of this rank alone
    for node in graph.nodes:
        if makes_equal(node, group):
            own -= written_by(node, root)
        elif _INNER in node.meta or any(root[n] in own for n in node.all_input_nodes):
            own |= {root[node], *written_by(node, root)}
    (values,) = graph.output_node().args
    assert isinstance(values, (list, tuple))
    names = [
        name
        for place, name in outputs.items()
        if isinstance(value := values[place], fx.Node) and root[value] in own
    ]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise CaptureError(
            f"compile: {names[0]}{more} would be updated by gradients of "
            "torch.autograd.grad(..., create_graph=True), which each rank has of its own "
            "batch, so that ranks would train other models. Make a loss of them and call "
            "its backward(), which reduces; or leave create_graph out."
        )
