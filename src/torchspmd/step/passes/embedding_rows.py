"""Gradients of embeddings sent as the rows that were looked up, not as whole tables.

The gradient of a table has a row for each token of the vocabulary, though a batch has used
a few of them. Where all ranks know the rows' gradients and the indices of all, each adds
them up by itself: that sends less when the batch is small beside the vocabulary, and what
the next forward needs first, the table at its entrance, is there sooner.
"""

from dataclasses import dataclass, field

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import Kind, Owner, Phase, format_bytes
from torchspmd.step.graph.aliases import node_arguments
from torchspmd.step.graph.collectives import (
    CommBlock,
    events_of,
    get_all_comm_blocks,
    writes_in_place,
)
from torchspmd.step.graph.cost import CostModel, check_cost, device_of
from torchspmd.step.graph.metadata import META_KEY, owner_of
from torchspmd.step.graph.nodes import HasGraph, NodeMaker, tensor_value
from torchspmd.step.graph.reports import Outcome
from torchspmd.step.passes.runner import graph_optimization_pass

_aten = torch.ops.aten
_GRADIENT = _aten.embedding_dense_backward.default
_ADD = _aten.add.Tensor


@graph_optimization_pass(prerequisites=[], apply_after=[], undoes_others=False)
def gather_embedding_gradients(
    gm: HasGraph, *, cost: CostModel | None = None
) -> Outcome:
    """Gather looked-up rows and indices instead of reducing an embedding's gradient.

    A gradient that is a sum, as of a weight that embedding and head share, is decomposed:
    the rest is reduced by itself, as soon as backward has it. That sends more in all, and
    less at the end.

    Every rank must have as many indices as the others: all look up batches of one shape.
    Sums are made in another order, so results differ in their last bits.

    Args:
        gm: The graph module to edit, before its collectives are fused.
        cost: How long collectives take; the same on all ranks. A guess by default.
    """
    check_cost(cost, "gather_embedding_gradients")
    blocks = get_all_comm_blocks(gm, [Kind.ALL_REDUCE])
    found = [each for each in map(_Gradient.of, blocks) if each.looked_up]
    if (writer := writes_in_place(gm.graph)) is not None:
        reason = f"{writer.name} writes in place: gather before new values do"
        return Outcome(len(found), 0, (reason,))
    work = _Gathering(gm, cost or CostModel.for_device(device_of(gm.graph)))
    refused, detail = [], []
    for gradient in found:
        reason = _obstacle(gradient) or work.too_much(gradient)
        if reason:
            refused.append(f"{gradient.block.start.name}: {reason}")
        else:
            detail.append(work.rewrite(gradient))
    # Rows are added up in another order than ranks' sums of rows.
    return Outcome(len(found), len(detail), tuple(refused), tuple(detail), ())


@dataclass(frozen=True, slots=True)
class _Gradient:
    """A gradient that is reduced, and what it is the sum of.

    Attributes:
        block: Its reduction.
        looked_up: The gradients of embeddings in it.
        has_rest: Whether there is anything else in it.
    """

    block: CommBlock
    looked_up: tuple[fx.Node, ...]
    has_rest: bool

    @classmethod
    def of(cls, block: CommBlock) -> "_Gradient":
        parts = [part for source in block.inputs for part in _parts(source)]
        looked_up = tuple(part for part in parts if part.target is _GRADIENT)
        return cls(block, looked_up, len(looked_up) < len(parts))

    @property
    def sent_bytes(self) -> int:
        """What a rank sends when rows and indices are gathered."""
        read = [node for each in self.looked_up for node in _read(each)]
        own = sum(
            value.numel() * value.element_size() for value in map(tensor_value, read)
        )
        return own * (self.block.group.size - 1)


def _parts(node: fx.Node) -> list[fx.Node]:
    """What a gradient is the sum of, as far as embeddings have a part in it."""
    if node.target is not _ADD:
        return [node]
    parts = [part for source in node.all_input_nodes for part in _parts(source)]
    return parts if any(part.target is _GRADIENT for part in parts) else [node]


def _read(gradient: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The rows and the indices that the gradient of an embedding is made of."""
    given = node_arguments(gradient)
    return given["grad_output"], given["indices"]


def _obstacle(gradient: _Gradient) -> str:
    """Why a gradient cannot be gathered; empty where it can."""
    block, looked_up = gradient.block, gradient.looked_up
    if block.problem or len(block.waits) != 1:
        return block.problem or "it has several waits"
    if block.argument("reduce_op") != "sum":
        return f"it is no sum over ranks but {block.argument('reduce_op')!r}"
    if any(node_arguments(each)["scale_grad_by_freq"] for each in looked_up):
        return "scale_grad_by_freq counts the indices of this rank alone"
    if any(not tensor_value(_read(each)[1]).ndim for each in looked_up):
        return "a single index is looked up"
    return _shared(block.inputs[0])


def _shared(node: fx.Node) -> str:
    """What else reads a part of the gradient; empty where nothing does."""
    if len(node.users) > 1:
        names = ", ".join(user.name for user in node.users)
        return f"{node.name} is read by {names}"
    if _parts(node) == [node]:
        return ""
    if node_arguments(node).get("alpha", 1) != 1 or len(node.all_input_nodes) != 2:
        return f"{node.name} is more than a sum of two"
    if any(not _is_like(tensor_value(node), source) for source in node.all_input_nodes):
        return f"{node.name} adds tensors of another shape or dtype"
    return next(filter(None, map(_shared, node.all_input_nodes)), "")


def _is_like(value: torch.Tensor, node: fx.Node) -> bool:
    other = tensor_value(node)
    return other.shape == value.shape and other.dtype == value.dtype


@dataclass(slots=True)
class _Gathering:
    """Rewrites one gradient after the other."""

    gm: HasGraph
    cost: CostModel
    indices: dict[tuple[fx.Node, str], fx.Node] = field(default_factory=dict)

    def too_much(self, gradient: _Gradient) -> str:
        """Why gathering would take longer; empty where it pays."""
        block, sent = gradient.block, gradient.sent_bytes
        link = self.cost.link_of(block.event)
        seconds = 2 * len(gradient.looked_up) * link.latency_seconds
        seconds += sent / link.network_bytes
        reduced = self.cost.comm_seconds(block.event)
        told = (
            f"gathering rows is estimated at {_milliseconds(seconds)} "
            f"({format_bytes(sent)} from each rank), reducing the table at "
            f"{_milliseconds(reduced)} ({format_bytes(block.event.wire_bytes)})"
        )
        if seconds >= reduced:
            return told
        if not gradient.has_rest or seconds <= reduced / 2:
            return ""
        # The rest is reduced as well: that pays where the wire has time for both.
        wire = sum(self.cost.comm_seconds(each) for _, each in events_of(self.gm.graph))
        computing = sum(map(self.cost.compute_seconds, self.gm.graph.nodes))
        if wire + seconds <= computing:
            return ""
        return f"{told}, and the rest of the sum must be reduced all the same"

    def rewrite(self, gradient: _Gradient) -> str:
        """Gather what a gradient is made of, and add it up behind the wait."""
        block = gradient.block
        whole = self._whole(block.inputs[0], block)
        block.wait.replace_all_uses_with(whole)
        for node in block.tail:  # scales what is now a part of the update
            node.meta[META_KEY] = Owner(Phase.OPTIMIZER, owner_of(node).module)
        for node in (block.wait, block.start):
            self.gm.graph.erase_node(node)
        rows = ", ".join(_read(each)[0].name for each in gradient.looked_up)
        rest = "; the rest of the sum is reduced by itself" * gradient.has_rest
        return (
            f"{block.start.name}: {rows} gathered, "
            f"{format_bytes(gradient.sent_bytes)} sent from each rank instead of "
            f"{format_bytes(block.event.wire_bytes)}{rest}"
        )

    def _whole(self, node: fx.Node, block: CommBlock) -> fx.Node:
        """The sum over ranks of a gradient, behind the block's wait."""
        if node.target is _GRADIENT:
            return self._gathered(node, block)
        if _parts(node) == [node]:
            return self._reduced(node, block)
        parts = [self._whole(source, block) for source in node.all_input_nodes]
        return self._behind(block, node, _ADD, *parts)

    def _reduced(self, node: fx.Node, block: CommBlock) -> fx.Node:
        rest = list(node_arguments(block.start).values())[1:]
        with self.gm.graph.inserting_after(node):
            make = NodeMaker(self.gm.graph, owner_of(node))
            start = make.call(_torch.ALL_REDUCE, node, *rest)
        return self._behind(block, node, _torch.WAIT, start)

    def _gathered(self, gradient: fx.Node, block: CommBlock) -> fx.Node:
        rows, indices = _read(gradient)
        with self.gm.graph.inserting_before(gradient):
            make = NodeMaker(self.gm.graph, owner_of(gradient))
            start = _gather(make, rows, block)
        all_rows = self._behind(block, gradient, _torch.WAIT, start)
        all_indices = self._all_indices(indices, gradient, block)
        rest = list(node_arguments(gradient).values())[2:]
        return self._behind(block, gradient, _GRADIENT, all_rows, all_indices, *rest)

    def _all_indices(
        self, indices: fx.Node, gradient: fx.Node, block: CommBlock
    ) -> fx.Node:
        """The indices of all ranks, which forward can send already."""
        key = indices, block.group.name
        if key not in self.indices:
            owner = Owner(Phase.FORWARD, owner_of(gradient).module)
            with self.gm.graph.inserting_before(min(indices.users)):
                start = _gather(NodeMaker(self.gm.graph, owner), indices, block)
            self.indices[key] = self._behind(block, gradient, _torch.WAIT, start)
        return self.indices[key]

    def _behind(
        self, block: CommBlock, made_of: fx.Node, target: object, *args: object
    ) -> fx.Node:
        """Add a call where the reduction was waited for: as a part of the update."""
        owner = Owner(Phase.OPTIMIZER, owner_of(made_of).module)
        with self.gm.graph.inserting_before(block.wait):
            return NodeMaker(self.gm.graph, owner).call(target, *args)


def _gather(make: NodeMaker, node: fx.Node, block: CommBlock) -> fx.Node:
    if not tensor_value(node).is_contiguous():
        form = torch.contiguous_format
        node = make.call(_aten.clone.default, node, memory_format=form)
    group = block.argument("group_name")
    return make.call(_torch.ALL_GATHER, node, block.group.size, group)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
