"""Nodes whose results nobody reads, removed; collectives too."""

from torch import fx

from torchspmd.comm import format_bytes
from torchspmd.step.graph.comm_blocks import is_wait
from torchspmd.step.graph.ledger import graph_size
from torchspmd.step.graph.queries import HasGraph
from torchspmd.step.graph.reports import ORDERS, Outcome
from torchspmd.step.passes.ordering import graph_optimization_pass


@graph_optimization_pass(prerequisites=[], apply_after=[], undoes_others=False)
def remove_dead_code(gm: HasGraph) -> Outcome:
    """Remove what computes or communicates for nobody.

    Torch's own removal keeps every wait, and so every collective. What has an effect
    stays: random numbers, which move the generator on, and what writes or checks.

    Example:
        >>> gm = fx.symbolic_trace(lambda x: [x + 1, abs(x)][0])
        >>> print(remove_dead_code(gm))
        remove_dead_code: changed 1 of 1, 4 -> 3 nodes, 0 -> 0 collectives, proved equal
    """
    before = graph_size(gm.graph)
    gm.graph.eliminate_dead_code(is_impure_node=_has_effect)
    after = graph_size(gm.graph)
    removed = before.nodes - after.nodes
    collectives = before.collectives - after.collectives
    size = format_bytes(before.payload_bytes - after.payload_bytes)
    detail = (f"{collectives} collectives of {size}",) if collectives else ()
    return Outcome(removed, removed, (), detail, ORDERS)


def _has_effect(node: fx.Node) -> bool:
    return bool(node.is_impure()) and not is_wait(node)
