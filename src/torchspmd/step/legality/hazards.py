"""Reads and writes of the same memory keep their order, aliases included."""

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.step.graph.aliases import find_aliases, operator_of
from torchspmd.step.graph.roles import readable_name
from torchspmd.step.legality.edit import Edit, Problem
from torchspmd.step.legality.equivalence import random_nodes
from torchspmd.step.legality.symbolic.call import Fakes
from torchspmd.step.legality.symbolic.evaluate import nodes_written_by, written_nodes
from torchspmd.step.legality.unknown_calls import check_unknown_calls
from torchspmd.step.legality.waits import find_starts

_ORDER = "Nodes that access the same memory keep their order when one of them writes."
_RANDOM = "Nodes that take random numbers keep their order, and none is added or lost."
_OVERLAP = "Write into a clone: elements that share a place cannot each be written."
_FLIGHT = "Write after the wait: the collective still uses the memory."

# Where a node's access stands: the node and the root of the memory.
_Access: TypeAlias = tuple[fx.Node, fx.Node]


class Accesses:
    """Who reads and writes which memory of a graph.

    Attributes:
        root: The node that brought each node's memory; empty where nothing is written.
        last_write: For each access of memory that is written, the write before it.
        writes: For each root that is written, who writes it, in order.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.last_write: dict[_Access, fx.Node | None] = {}
        self.writes: dict[fx.Node, list[fx.Node]] = {}
        written = written_nodes(graph)
        self.root = find_aliases(graph).root if written else {}
        shared = {self.root[node] for node in written}
        for node in graph.nodes if written else ():
            for root in self._used_by(node) & shared:
                before = self.writes.get(root)
                self.last_write[node, root] = before[-1] if before else None
            for root in self._written_by(node):
                self.writes.setdefault(root, []).append(node)

    def _written_by(self, node: fx.Node) -> set[fx.Node]:
        return {self.root[each] for each in nodes_written_by(node)}

    def _used_by(self, node: fx.Node) -> set[fx.Node]:
        """The memory that a node reads or writes; making a view touches none."""
        target = operator_of(node)
        if target is not None and not _torch.written_arguments(target):
            if _torch.shared_arguments(target):
                return set()
        return {self.root[source] for source in node.all_input_nodes}


def check_hazards(edit: Edit, fakes: Fakes) -> list[Problem]:
    """Each access sees the same write as before; random draws keep their order.

    Args:
        edit: The edit.
        fakes: What the nodes of the edited graph give, without values.
    """
    before, after = Accesses(edit.before), Accesses(edit.after)
    return [
        *_check_accesses(edit, before, after),
        *_check_flights(edit, before, after),
        *_check_draws(edit),
        *_check_overlaps(edit, fakes),
        *check_unknown_calls(edit),
    ]


def _check_accesses(edit: Edit, before: Accesses, after: Accesses) -> Iterator[Problem]:
    told: set[frozenset[fx.Node]] = set()
    for (node, root), write in after.last_write.items():
        earlier, memory = edit.old.get(node), edit.old.get(root)
        if earlier is None or memory is None:
            continue
        if (earlier, memory) not in before.last_write:
            continue  # what was not accessed or not written before is compared by value
        was = before.last_write[earlier, memory]
        if was is not None and was not in edit.new:
            continue  # this write was replaced: values tell whether rightly
        if write is not None and write not in edit.old:
            continue
        if (None if write is None else edit.old[write]) is was:
            continue
        crossed = _crossed(edit, earlier, was, write)
        pair = frozenset({node, crossed})
        if pair not in told:
            told.add(pair)
            text = (
                f"{readable_name(node)} and {readable_name(crossed)} changed their order; "
                f"both access {readable_name(root)}, and {readable_name(crossed)} writes it"
            )
            yield Problem("state", text, _ORDER)


def _crossed(
    edit: Edit, earlier: fx.Node, was: fx.Node | None, write: fx.Node | None
) -> fx.Node:
    """Which write an access was moved across."""
    if write is not None:
        place = edit.place_before[edit.old[write]]
        if was is None or place > edit.place_before[earlier]:
            return write
    assert was is not None
    return edit.new[was]


def _check_flights(edit: Edit, before: Accesses, after: Accesses) -> Iterator[Problem]:
    """Nothing is written that a collective under way reads."""
    allowed = set(_in_flight(edit.before, before, edit.place_before))
    for start, write in _in_flight(edit.after, after, edit.place_after):
        old = edit.old.get(start), edit.old.get(write)
        if old not in allowed:
            text = (
                f"{readable_name(write)} writes what {readable_name(start)} sends, before "
                "the wait"
            )
            yield Problem("state", text, _FLIGHT)


def _in_flight(
    graph: fx.Graph, accesses: Accesses, places: Mapping[fx.Node, int]
) -> Iterator[tuple[fx.Node, fx.Node]]:
    if not accesses.writes:
        return
    for started in find_starts(graph):
        start = started.start
        last = max((places[wait] for wait in started.waits), default=places[start])
        for source in start.all_input_nodes:
            for write in accesses.writes.get(accesses.root[source], ()):
                if places[start] < places[write] < last:
                    yield start, write


def _check_overlaps(edit: Edit, fakes: Fakes) -> Iterator[Problem]:
    """Nothing is written into memory that overlaps itself: torch refuses to."""
    for node in edit.after.nodes:
        for written in nodes_written_by(node):
            twin = edit.old.get(written)
            was_so = twin is not None and _overlaps(twin.meta.get("val"))
            if _overlaps(fakes.get(written)) and not (was_so and node in edit.old):
                text = (
                    f"{readable_name(node)} writes into {readable_name(written)}, whose "
                    "elements share memory"
                )
                yield Problem("state", text, _OVERLAP)


def _overlaps(value: object) -> bool:
    """Whether a tensor is expanded; other overlaps torch does not look for either."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    pairs = zip(value.shape, value.stride(), strict=True)
    return any(stride == 0 and size > 1 for size, stride in pairs)


def _check_draws(edit: Edit) -> Iterator[Problem]:
    old, new = random_nodes(edit.before), random_nodes(edit.after)
    for was, now in zip(old, new, strict=False):
        if edit.old.get(now) is not was:
            text = (
                f"{readable_name(now)} takes the random numbers that "
                f"{readable_name(was)} took"
            )
            yield Problem("random", text, _RANDOM)
            return  # the rest follows from it
    if len(old) != len(new):
        one = (old if len(old) > len(new) else new)[min(len(old), len(new))]
        what = "no longer takes" if len(old) > len(new) else "now takes"
        text = f"{readable_name(one)} {what} random numbers"
        yield Problem("random", text, _RANDOM)
