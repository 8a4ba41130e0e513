"""Collectives that send the same thing twice, sent once."""

import math
from typing import Any

from torch import fx

from torchspmd.comm import Kind, format_bytes, format_count
from torchspmd.step.graph.aliases import is_wait
from torchspmd.step.graph.argument_checks import check_budget, check_flags
from torchspmd.step.graph.collectives import (
    CommBlock,
    get_all_comm_blocks,
    graph_size,
    writes_in_place,
)
from torchspmd.step.graph.memory import value_bytes
from torchspmd.step.graph.metadata import owner_of
from torchspmd.step.graph.nodes import HasGraph
from torchspmd.step.graph.reports import ORDERS, Outcome
from torchspmd.step.passes.runner import graph_optimization_pass

# Each of them pairs with one on another rank, or orders ranks.
_NEVER = (Kind.SEND, Kind.RECV, Kind.SEND_RECV, Kind.BARRIER, Kind.UNKNOWN)


@graph_optimization_pass(prerequisites=[], apply_after=[], undoes_others=False)
def dedupe_collectives(
    gm: HasGraph, *, across_phases: bool = False, keep_mb: float = 0.0
) -> Outcome:
    """Keep one of several equal collectives on the same value.

    Equal means: the same operator, group and arguments, and the same input, or the same
    views and casts of the same value.

    Args:
        gm: The graph module to edit.
        across_phases: Also join collectives of different phases. The result then lives
            from one phase to the other: fully sharded parameters that backward gathers
            again would stay gathered.
        keep_mb: MiB of such results that may live from one phase to the other all the
            same, those first that are needed again soonest.
    """
    check_flags("dedupe_collectives", across_phases=across_phases)
    check_budget(keep_mb, "dedupe_collectives", "or leave it out", "keep_mb")
    blocks = [each for each in get_all_comm_blocks(gm) if each.kind not in _NEVER]
    if (writer := writes_in_place(gm.graph)) is not None:
        reason = f"{writer.name} writes in place: join collectives before new values do"
        return Outcome(len(blocks), 0, (reason,))
    first: dict[Any, CommBlock] = {}
    detail, refused = [], []
    room = math.inf if across_phases else keep_mb * 2**20
    for block in blocks:  # of those of backward, the first are needed again soonest
        kept = first.setdefault(_key(block), block)
        if kept is block:
            continue
        names = f"{block.start.name} is {kept.start.name}"
        is_across = owner_of(kept.start).phase is not owner_of(block.start).phase
        size = value_bytes(block.wait.meta.get("val")) if is_across else 0
        reason = _obstacle(kept, block) or (
            "" if size <= room else _too_long(kept, block)
        )
        if reason:
            refused.append(f"{names}: {reason}")
            first[_key(block)] = block
        else:
            room -= size
            _join(gm.graph, kept, block)
            detail.append(f"{names}: {format_bytes(block.event.payload_bytes)} saved")
    found = len(detail) + len(refused)
    return Outcome(found, len(detail), tuple(refused), tuple(detail), ORDERS)


def _key(block: CommBlock) -> Any:
    return _form(block.start, {*block.head, block.start})


def _form(value: Any, own: set[fx.Node]) -> Any:
    """What a node of a block computes, as a value that can be compared."""
    if isinstance(value, fx.Node):
        if value not in own:
            return value
        kwargs = tuple((key, _form(each, own)) for key, each in value.kwargs.items())
        return value.target, _form(value.args, own), kwargs
    if isinstance(value, (list, tuple)):
        return tuple(_form(each, own) for each in value)
    return repr(value)


def _obstacle(kept: CommBlock, block: CommBlock) -> str:
    for each in (kept, block):
        if each.problem:
            return each.problem
        if list(each.start.users) != [each.wait]:
            return "it has several waits"
    if all(_is_output(each.wait) for each in (kept, block)):
        return "both are outputs of the step, which have memory of their own"
    return ""


def _too_long(kept: CommBlock, block: CommBlock) -> str:
    phases = owner_of(kept.start).phase, owner_of(block.start).phase
    return (
        f"joining {phases[0]} and {phases[1]} keeps the result alive in between; "
        "across_phases=True does it"
    )


def _is_output(node: fx.Node | None) -> bool:
    return node is not None and any(user.op == "output" for user in node.users)


def _join(graph: fx.Graph, kept: CommBlock, block: CommBlock) -> None:
    """Let the readers of one block read the result of an earlier one."""
    if block.wait < kept.wait:
        block.wait.prepend(kept.wait)
    block.wait.replace_all_uses_with(kept.wait)
    for node in (block.wait, block.start, *reversed(block.head)):
        graph.erase_node(node)


# ----------------------------------------------------------------------------
# Nodes whose results are not read are removed, collectives too.


@graph_optimization_pass(prerequisites=[], apply_after=[], undoes_others=False)
def remove_dead_code(gm: HasGraph) -> Outcome:
    """Remove computation and communication whose result is not read.

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
    detail = (
        (f"{format_count(collectives, 'collective')} of {size}",) if collectives else ()
    )
    return Outcome(removed, removed, (), detail, ORDERS)


def _has_effect(node: fx.Node) -> bool:
    return bool(node.is_impure()) and not is_wait(node)
