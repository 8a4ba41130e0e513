"""Moving collectives in a graph without moving anything else."""

from collections.abc import Callable, Sequence

from torch import fx

from torchspmd.step.graph.comm_blocks import CommBlock


def earliest_place(block: CommBlock, after: fx.Node | None = None) -> fx.Node:
    """The node directly after which a block's head and start can stand.

    Args:
        block: The block.
        after: A node that the start must not overtake, usually the start before it on
            the same group.
    """
    last_input = _last_input(block.start.graph)
    places = [source for source in block.sources() if source.op != "placeholder"]
    places += [node for node in (last_input, after) if node is not None]
    return max(places) if places else block.start.prev


def hoist(block: CommBlock, place: fx.Node) -> None:
    """Put a block's head and start directly after a node, where they come later."""
    floor = place
    for node in (*block.head, block.start):
        if floor < node:
            place.append(node)
            place = node


def latest_place(block: CommBlock) -> fx.Node:
    """The node directly before which a block's waits and tail can stand."""
    return min(block.readers(), default=_output(block.start.graph))


def sink(block: CommBlock, place: fx.Node) -> None:
    """Put what stands behind a block's start directly before a node, if it is earlier."""
    for node in after_start(block):
        if node < place:
            place.prepend(node)


def after_start(block: CommBlock) -> list[fx.Node]:
    """What stands behind a block's start: items, waits and tail, in order."""
    items = [node for node in block.start.users if node not in block.waits]
    return [*items, *block.waits, *block.tail]


def remember(nodes: Sequence[fx.Node]) -> Callable[[], None]:
    """What puts nodes, given in graph order, back to where they are now."""
    places = [(node, node.prev) for node in nodes]

    def restore() -> None:
        for node, before in places:
            before.append(node)

    return restore


def _last_input(graph: fx.Graph) -> fx.Node | None:
    nodes = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
    return nodes[-1] if nodes else None


def _output(graph: fx.Graph) -> fx.Node:
    node: fx.Node = graph.output_node()
    return node
