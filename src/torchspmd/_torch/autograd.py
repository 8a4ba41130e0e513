"""Autograd: which node of the backward graph is running."""

from typing import Any

import torch
import torch.autograd

_autograd: Any = torch.autograd  # its annotations do not export private names


def sequence_number() -> int:
    """The number that the next autograd node created by this thread will get."""
    return int(_autograd._get_sequence_nr())


def graph_task() -> int:
    """The id of the backward pass that this thread works on; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def current_node() -> Any | None:
    """The autograd node whose backward runs now in this thread."""
    return torch._C._current_autograd_node()


# The number of the nodes that add to a parameter's gradient: they run as soon as they can.
ACCUMULATE_SEQUENCE = 2**64 - 1


def node_sequence(node: Any) -> int:
    """The sequence number under which a node was created."""
    return int(node._sequence_nr())
