"""Autograd: which node of the backward graph is running.

These are asked for every operator that is listed, so they are torch's own functions where
they can be, without a Python function around them.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd

_autograd: Any = torch.autograd  # its annotations do not export private names

# The number that the next autograd node created by this thread will get.
sequence_number: Callable[[], int] = _autograd._get_sequence_nr

# The id of the backward pass that this thread works on; -1 outside of one.
graph_task: Callable[[], int] = torch._C._current_graph_task_id

# The autograd node whose backward runs now in this thread; None outside of one.
current_node: Callable[[], Any] = torch._C._current_autograd_node

# The number of the nodes that add to a parameter's gradient: they run as soon as they can.
ACCUMULATE_SEQUENCE = 2**64 - 1


def node_sequence(node: Any) -> int:
    """The sequence number under which a node was created."""
    return int(node._sequence_nr())
