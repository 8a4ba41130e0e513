"""Collectives as they run: all-reduces in place, gathers on gloo into given memory.

The functional all-reduce works on a copy: for gradients of many megabytes that is time, and
memory twice. Only the graph that is run is changed.
"""

import math
import operator

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.step.graph.aliases import Aliases, find_aliases, operator_of
from torchspmd.step.graph.comm_blocks import is_wait
from torchspmd.step.graph.ledger import is_communication


def reduce_in_place(graph: fx.Graph) -> int:
    """Change the reductions of a graph that need no copy; how many there are."""
    aliases = find_aliases(graph)
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            readers.setdefault(aliases.root[source], []).append(node)
    changed = 0
    for start in graph.nodes:
        form = _torch.reduction_in_place(operator_of(start))
        if form is None:
            continue
        source = start.args[0]
        assert isinstance(source, fx.Node), type(source)
        memory = aliases.root[source]
        if _is_own(source, memory) and _ends_with(start, readers[memory], aliases):
            start.target = form
            changed += 1
    return changed


def gather_into_memory(graph: fx.Graph) -> int:
    """Make gathers on gloo write into memory that is given to them; how many there are.

    The functional gather is made by gloo's coalesced one, which corrupts the heap when
    several are in flight (torch 2.11 to 2.13). The operator with an ``out`` takes another
    path and holds.
    """
    gathers = [
        node
        for node in graph.find_nodes(op="call_function", target=_torch.ALL_GATHER)
        if _torch.uses_gloo(str(node.args[2]))
    ]
    for node in gathers:
        with graph.inserting_before(node):
            value = node.meta["val"]
            memory = graph.call_function(
                torch.ops.aten.new_empty.default, (node.args[0], list(value.shape))
            )
        memory.meta = {**node.meta, "val": value}
        node.target = _torch.ALL_GATHER_OUT
        node.kwargs = {"out": memory}
    return len(gathers)


def _is_own(source: fx.Node, memory: fx.Node) -> bool:
    """Whether the graph made the memory, and all of it is reduced."""
    value, base = source.meta.get("val"), memory.meta.get("val")
    return (
        memory.op == "call_function"
        and isinstance(value, torch.Tensor)
        and isinstance(base, torch.Tensor)
        and value.is_contiguous()
        and value.numel() == base.numel()
    )


def _ends_with(start: fx.Node, readers: list[fx.Node], aliases: Aliases) -> bool:
    """Whether nobody else reads the memory once the reduction has started."""
    return all(
        _reads_until(reader, aliases) < aliases.position[start]
        and (operator_of(reader) is not None or reader.target is operator.getitem)
        for reader in readers
        if reader is not start
    )


def _reads_until(reader: fx.Node, aliases: Aliases) -> float:
    """The last place at which a node reads: a collective does so until its waits."""
    if not is_communication(reader):
        return aliases.position[reader]
    items = [user for user in reader.users if user.target is operator.getitem]
    waits = [
        [aliases.position[user] for user in item.users if is_wait(user)]
        for item in items or [reader]
    ]
    return max(min(each, default=math.inf) for each in waits)
