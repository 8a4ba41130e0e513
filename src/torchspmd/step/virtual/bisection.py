"""The first node at which two graphs part, found by running both."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchspmd.step.graph.owners import owner_of
from torchspmd.step.graph.roles import output_values, readable_name, written_state
from torchspmd.step.virtual.differences import Difference, digest, find_difference
from torchspmd.step.virtual.ranks import Watcher

# Runs a graph for all steps; the watcher is told the step too.
Runner = Callable[[fx.Graph, Callable[[int], Watcher]], None]


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where two runs part.

    Attributes:
        node: The first node of the edited graph whose value is not its twin's; empty
            when all such nodes are equal and only the outputs are put together otherwise.
        where: Its module and phase.
        step: At which step, from 0.
        rank: On which virtual rank.
        difference: Statistics of both values.
        added: Nodes that the edit added and that this one is computed from.
        relaid: The first node before it whose value has the same bits with other strides,
            which may change how a kernel adds; empty when there is none.
    """

    node: str
    where: str
    step: int
    rank: int
    difference: Difference
    added: tuple[str, ...]
    relaid: str


class _Found(Exception):  # noqa: N818 - not an error, the end of a search
    def __init__(self, node: fx.Node, step: int, rank: int, value: Any) -> None:
        super().__init__()
        self.node, self.step, self.rank, self.value = node, step, rank, value


def find_first_difference(
    before: fx.Graph, after: fx.Graph, run: Runner
) -> FirstDifference | None:
    """The first node of ``after`` that differs from the node of its name in ``before``.

    Three runs: the digests of one graph, the other up to where it differs, and the first
    again for that node's value.
    """
    expected: dict[tuple[int, int, str], tuple[str, str]] = {}
    relaid: list[str] = []
    twins = _twins(before, after)

    def record(step: int) -> Watcher:
        def watch(rank: int, node: fx.Node, value: Any) -> None:
            if node.name in twins:
                expected[step, rank, node.name] = digest(value), _strides(value)

        return watch

    def compare(step: int) -> Watcher:
        def watch(rank: int, node: fx.Node, value: Any) -> None:
            wanted, lay = expected.get((step, rank, node.name), (None, ""))
            if wanted is not None and digest(value) != wanted:
                raise _Found(node, step, rank, value)
            if wanted is not None and _strides(value) != lay:
                relaid.append(f"{readable_name(node)}, {lay} -> {_strides(value)}")

        return watch

    run(before, record)
    try:
        run(after, compare)
    except _Found as found:
        return _describe(before, found, twins, (*relaid, "")[0], run)
    return None


def _describe(
    before: fx.Graph, found: _Found, twins: set[str], relaid: str, run: Runner
) -> FirstDifference:
    def fetch(step: int) -> Watcher:
        def watch(rank: int, node: fx.Node, value: Any) -> None:
            place = step, rank, node.name
            if place == (found.step, found.rank, found.node.name):
                raise _Found(node, step, rank, value)

        return watch

    try:
        run(before, fetch)
    except _Found as original:
        owner = owner_of(found.node)
        return FirstDifference(
            readable_name(found.node),
            f"{owner.module}, {owner.phase}",
            found.step,
            found.rank,
            find_difference(original.value, found.value),
            _added(found.node, twins),
            relaid,
        )
    raise AssertionError("a node that was recorded did not run again")


def _strides(value: Any) -> str:
    return str(value.stride()) if isinstance(value, torch.Tensor) else ""


def _twins(before: fx.Graph, after: fx.Graph) -> set[str]:
    """Names that mean the same node in both, and that have a value at all."""
    targets = {node.name: node.target for node in before.nodes}
    return {
        node.name
        for node in after.nodes
        if node.op in ("call_function", "placeholder")
        and targets.get(node.name) == node.target
        and "empty" not in str(node.target)  # memory that nobody has written yet
    }


def _added(node: fx.Node, twins: set[str]) -> tuple[str, ...]:
    """New nodes among those that a node is computed from, nearest first."""
    found: dict[str, None] = {}
    waiting = list(node.all_input_nodes)
    while waiting:
        each = waiting.pop(0)
        if each.name not in twins and each.name not in found:
            found[each.name] = None
            waiting += each.all_input_nodes
    return tuple(found)


def output_name(graph: fx.Graph, index: int) -> str:
    """What an output is called in messages: by the state that it is a new value of."""
    state = written_state(graph).get(index)
    if state is not None:
        return readable_name(state)
    value = output_values(graph)[index]
    node = readable_name(value) if isinstance(value, fx.Node) else repr(value)
    return f"output {index} ({node})"
