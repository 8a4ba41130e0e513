"""Small graphs with collectives, as capture makes them, for tests of the passes."""

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.step.graph.snapshot import copy_graph

ops = torch.ops._c10d_functional
GROUP = "0"  # the name of the default group


def captured(function, *tensors):
    """A graph of a function, with fake values on its nodes."""
    world = _torch.FakeWorld()
    fakes = [world.fake(tensor) for tensor in tensors]
    with world.mode, torch.no_grad():
        return _torch.trace(function, fakes)


def all_reduce(tensor, op="sum", group=GROUP):
    return ops.wait_tensor(ops.all_reduce(tensor, op, group))


def all_gather(tensor, size, group=GROUP):
    return ops.wait_tensor(ops.all_gather_into_tensor(tensor, size, group))


def reduce_scatter(tensor, size, op="sum", group=GROUP):
    return ops.wait_tensor(ops.reduce_scatter_tensor(tensor, op, size, group))


def copied(gm):
    """A copy that a pass may edit."""
    graph, _ = copy_graph(gm.graph)
    return fx.GraphModule(gm, graph)


def names(gm, *words):
    """The names of calls whose name contains one of these words, in graph order."""
    return [
        node.name
        for node in gm.graph.nodes
        if node.op == "call_function" and any(word in node.name for word in words)
    ]
