"""Copies of inputs for the next iteration, laid out as the inputs are.

Kernels choose by strides, bits follow; and compiled code refuses other strides than it was
made for.
"""

import torch
from torch import fx

from torchspmd.step.graph.new_nodes import NodeMaker
from torchspmd.step.graph.owners import owner_of

_ATEN = torch.ops.aten


def add_copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Copy what the caller may overwrite; the copy has the strides of the original.

    ``clone`` keeps them where no element is repeated or left out. Of an expanded tensor one
    row is copied and expanded again; where elements are left out, memory with the same
    gaps is filled. Inductor drops the gaps where both are so; the compiled step that takes
    the copy then ends with an error about its strides.
    """
    make = NodeMaker(graph, owner_of(node))
    value: torch.Tensor = node.meta["val"]
    row = node
    for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        if size > 1 and stride == 0:
            row = make.call(_ATEN.slice.Tensor, row, dim, 0, 1)
    held: torch.Tensor = row.meta["val"]
    if torch.empty_like(held).stride() == held.stride():
        copy = make.call(_ATEN.clone.default, row)
    else:
        sizes, strides = list(held.shape), list(held.stride())
        memory = make.call(_ATEN.new_empty_strided.default, row, sizes, strides)
        copy = make.call(_ATEN.copy.default, memory, row)
    if row is not node:
        copy = make.call(_ATEN.expand.default, copy, list(value.shape))
    copy.meta = {**node.meta, "val": copy.meta["val"]}
    return copy
