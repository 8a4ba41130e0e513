"""How tensors lie in a bucket, and how they come out of it again."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import Kind
from torchspmd.step.graph.comm_blocks import CommBlock
from torchspmd.step.graph.new_nodes import NodeMaker
from torchspmd.step.graph.reductions import ring_chunks

_aten = torch.ops.aten
STARTS: dict[Kind, Any] = {
    Kind.ALL_REDUCE: _torch.ALL_REDUCE,
    Kind.ALL_GATHER: _torch.ALL_GATHER,
    Kind.REDUCE_SCATTER: _torch.REDUCE_SCATTER,
}


@dataclass(frozen=True, slots=True)
class Rows:
    """A bucket of ``num_rows`` rows, each with a piece of every tensor.

    Attributes:
        num_rows: One, or one for each rank.
        widths: How much of a row each tensor takes.
        spare: Elements at the end of a row that hold nothing.
    """

    num_rows: int
    widths: tuple[int, ...]
    spare: int = 0


def lay_out(blocks: Sequence[CommBlock], layout: str) -> Rows:
    """The rows of a bucket of all-reduces, reduce-scatters or all-gathers."""
    kind, num_ranks = blocks[0].kind, blocks[0].group.size
    sizes = [_value(block.inputs[0]).numel() for block in blocks]
    if kind is Kind.REDUCE_SCATTER:
        widths = tuple(size // num_ranks for size in sizes)
    elif kind is Kind.ALL_GATHER or layout == "plain":
        return Rows(1, tuple(sizes))
    else:
        widths = tuple(_ring_chunk(blocks, size) for size in sizes)
    spare = _spare(blocks, sum(widths)) if layout == "rank_major" else 0
    return Rows(num_ranks, widths, spare)


def pack(make: NodeMaker, blocks: Sequence[CommBlock], rows: Rows) -> fx.Node:
    """Join the inputs of blocks to one flat tensor."""
    parts = [
        _as_rows(make, block.inputs[0], rows.num_rows, width)
        for block, width in zip(blocks, rows.widths, strict=True)
    ]
    if rows.num_rows == 1:
        return make.call(_aten.cat.default, parts)
    joined = make.call(_aten.cat.default, parts, 1)
    if rows.spare:
        joined = make.call(_aten.constant_pad_nd.default, joined, [0, rows.spare])
    return make.call(_aten.view.default, joined, [-1])


def unpack(
    make: NodeMaker, bucket: fx.Node, blocks: Sequence[CommBlock], rows: Rows
) -> list[fx.Node]:
    """The results of blocks, from the result of their bucket.

    What leaves the graph is copied: whoever gets it must not hold the whole bucket, nor
    share memory with another.
    """
    kind, num_ranks = blocks[0].kind, blocks[0].group.size
    num_rows = 1 if kind is Kind.REDUCE_SCATTER else rows.num_rows
    if kind is Kind.ALL_GATHER:
        num_rows = num_ranks
    widths = [*rows.widths, rows.spare] if rows.spare else list(rows.widths)
    if num_rows == 1:
        pieces = make.call(_aten.split_with_sizes.default, bucket, widths)
    else:
        width = sum(widths)
        table = make.call(_aten.view.default, bucket, [num_rows, width])
        pieces = make.call(_aten.split_with_sizes.default, table, widths, 1)
    return [
        _restore(make, pieces, number, block) for number, block in enumerate(blocks)
    ]


def keeps_ring_bits(blocks: Sequence[CommBlock], rows: Rows) -> bool:
    """Whether each element of a sum keeps its place in gloo's ring.

    Gloo scatters what it has reduced whole, so that a ring's chunks and a rank's part of
    the result may have different edges.
    """
    num_ranks = blocks[0].group.size
    if rows.num_rows != num_ranks:
        return False
    row = sum(rows.widths) + rows.spare
    sizes = [_value(block.inputs[0]).numel() for block in blocks]
    chunks = tuple(_ring_chunk(blocks, size) for size in sizes)
    return chunks == rows.widths and _ring_chunk(blocks, row * num_ranks) == row


def _as_rows(make: NodeMaker, source: fx.Node, num_rows: int, width: int) -> fx.Node:
    value = _value(source)
    if num_rows == 1:
        is_flat = value.ndim == 1
        return source if is_flat else make.call(_aten.reshape.default, source, [-1])
    missing = num_rows * width - value.numel()
    if missing:
        source = make.call(_aten.reshape.default, source, [-1])
        source = make.call(_aten.constant_pad_nd.default, source, [0, missing])
    return make.call(_aten.reshape.default, source, [num_rows, width])


def _restore(
    make: NodeMaker, pieces: fx.Node, number: int, block: CommBlock
) -> fx.Node:
    like = _value(block.wait)
    piece = make.call(operator.getitem, pieces, number)
    if any(reader.op == "output" for reader in block.readers()):
        piece = make.call(_aten.clone.default, piece)
    if _value(piece).numel() != like.numel():
        flat = make.call(_aten.reshape.default, piece, [-1])
        piece = make.call(_aten.slice.Tensor, flat, 0, 0, like.numel())
    if _value(piece).shape != like.shape:
        piece = make.call(_aten.reshape.default, piece, list(like.shape))
    if _value(piece).stride() != like.stride():
        # With other strides some operators take another kernel, and give other bits.
        piece = make.call(_aten.clone.default, piece)
    return piece


def _spare(blocks: Sequence[CommBlock], width: int) -> int:
    """How much longer a row must be for a ring to cut the bucket between rows."""
    longer = width
    while (cut := _ring_chunk(blocks, longer * blocks[0].group.size)) != longer:
        longer = cut  # never shorter than a row, and it stays once it is even
    return longer - width


def _ring_chunk(blocks: Sequence[CommBlock], num_elements: int) -> int:
    element = _value(blocks[0].inputs[0]).element_size()
    return ring_chunks(num_elements, element, blocks[0].group.size)[0][1]


def _value(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor), type(value)
    return value
