"""Values left by the step before that one owed update alone needs: it may overwrite them.

A gradient that is averaged, or to which weight decay is added, needs no second tensor then.
"""

from collections import Counter
from collections.abc import Collection

import torch
from torch import fx

from torchspmd.step.graph.aliases import find_aliases
from torchspmd.step.graph.roles import output_values
from torchspmd.step.iterate.pipeline import CARRIED_KEY, OWED_KEY


def find_spare(steady: fx.Graph) -> frozenset[int]:
    """The carried values whose memory nothing else lies in, by their place.

    Args:
        steady: The steady form: it takes them in and leaves new ones behind.
    """
    values = output_values(steady)
    left = values[len(values) - len(_carried(steady)) :]
    aliases = find_aliases(steady)
    shared = Counter(aliases.root[v] for v in values if isinstance(v, fx.Node))
    found = set()
    for place, value in enumerate(left):
        if isinstance(value, fx.Node):
            root = aliases.root[value]
            is_made = root.op == "call_function" and root not in aliases.pinned
            if is_made and shared[root] == 1:
                found.add(place)
    return frozenset(found)


def find_scratch(
    graph: fx.Graph, spare: Collection[int], regions: Collection[int]
) -> dict[fx.Node, int]:
    """The inputs that one of these regions, and nothing else, reads: with its number."""
    root = find_aliases(graph).root
    readers: dict[fx.Node, set[int | None]] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            readers.setdefault(root[source], set()).add(node.meta.get(OWED_KEY))
    found = {}
    for place, node in _carried(graph).items():
        numbers = readers.get(node, set())
        is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
        if place in spare and is_tensor and len(numbers) == 1:
            (number,) = numbers
            if number is not None and number in regions:
                found[node] = number
    return found


def _carried(graph: fx.Graph) -> dict[int, fx.Node]:
    return {
        node.meta[CARRIED_KEY]: node
        for node in graph.find_nodes(op="placeholder")
        if CARRIED_KEY in node.meta
    }
