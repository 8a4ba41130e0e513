"""Who reads and writes which memory of an edited graph, and in whose memory outputs lie."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TypeAlias

import torch
from torch import fx

from torchspmd.step.graph.aliases import (
    Written,
    is_view,
    is_wait,
    memory_root,
    written_nodes,
)
from torchspmd.step.graph.memory import ROLE_KEY
from torchspmd.step.graph.metadata import (
    OutputKind,
    output_values,
    readable_name,
    roles_of,
    written_state,
)
from torchspmd.step.legality.edit import Edit, Problem, output_name
from torchspmd.step.legality.graph_rules import find_starts
from torchspmd.step.legality.values import Fakes

_ORDER = "Nodes that access the same memory keep their order when one of them writes."
_OVERLAP = "Write into a clone: elements that share a place cannot each be written."
_FLIGHT = "Write after the wait: the collective still uses the memory."

# An access: the node and the root of the memory.
_Access: TypeAlias = tuple[fx.Node, fx.Node]


class Accesses:
    """Who reads and writes which memory of a graph.

    Attributes:
        root: The node that brought each node's memory; empty where nothing is written.
        last_write: For each access of memory that is written, the write before it.
        writes: For each root that is written, who writes it, in order.
    """

    def __init__(self, graph: fx.Graph, memory: Written) -> None:
        self.last_write: dict[_Access, fx.Node | None] = {}
        self.writes: dict[fx.Node, list[fx.Node]] = {}
        self.root = memory.root
        for node in graph.nodes if memory.roots else ():
            for root in self._used_by(node) & memory.roots:
                before = self.writes.get(root)
                self.last_write[node, root] = before[-1] if before else None
            for root in {self.root[each] for each in written_nodes(node)}:
                self.writes.setdefault(root, []).append(node)

    def _used_by(self, node: fx.Node) -> set[fx.Node]:
        """The memory that a node reads or writes; making a view touches none."""
        if is_view(node) or is_wait(node):
            return set()
        return {self.root[source] for source in node.all_input_nodes}


def check_hazards(edit: Edit, fakes: Fakes) -> list[Problem]:
    """Each access sees the same write as before, and each write is possible.

    Args:
        edit: The edit.
        fakes: What the nodes of the edited graph give, without values.
    """
    before = Accesses(edit.before, edit.written_before)
    after = Accesses(edit.after, edit.written_after)
    return [
        *_check_accesses(edit, before, after),
        *_check_flights(edit, before, after),
        *_check_overlaps(edit, fakes),
    ]


def _check_accesses(edit: Edit, before: Accesses, after: Accesses) -> Iterator[Problem]:
    reported: set[frozenset[fx.Node]] = set()
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
        if pair not in reported:
            reported.add(pair)
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
    for node in edit.after.nodes if edit.written_after.roots else ():
        for written in written_nodes(node):
            old = edit.old.get(written)
            was_so = old is not None and _overlaps(old.meta.get("val"))
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


_OVERWRITTEN = (
    "Keep the copy: the state is written back before the caller sees the output."
)

_SHARED = "Keep the copy: a write into one of them would change the other."


def check_output_memory(
    edit: Edit, elements: Callable[[fx.Node], Hashable]
) -> list[Problem]:
    """No output newly lies in an input, or in another output.

    Args:
        edit: The edit.
        elements: Which elements a node of the edited graph holds; parts of one bucket
            lie in the same memory without touching each other.
    """
    return [*_in_inputs(edit), *_shared(edit, elements)]


def _in_inputs(edit: Edit) -> Iterator[Problem]:
    """An input belongs to the caller, and a state among them is overwritten."""
    holders = written_state(edit.after)
    states = set(holders.values())
    old = output_values(edit.before)
    for place, value in enumerate(output_values(edit.after)):
        if not isinstance(value, fx.Node):
            continue
        memory = memory_root(value)
        is_written = memory in states
        is_state = place in holders  # and is copied to where it belongs
        is_others = is_written or (not is_state and _is_callers(memory))
        if not is_others or memory is holders.get(place):
            continue
        was = old[place]
        if isinstance(was, fx.Node) and memory_root(was) is edit.old.get(memory):
            continue
        what = "gets a new value" if is_written else "belongs to the caller"
        text = (
            f"{output_name(edit.after, place)} now lies in the memory of "
            f"{readable_name(memory)}, which {what}"
        )
        yield Problem("memory", text, _OVERWRITTEN if is_written else _SHARED)


def _is_callers(memory: fx.Node) -> bool:
    """Whether it is an input of a captured step; graphs made by hand say nothing."""
    is_known = memory.op == "placeholder" and ROLE_KEY in memory.meta
    return is_known and _may_be_tensor(memory)


def _may_be_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return value is None or isinstance(value, torch.Tensor)


def _shared(edit: Edit, elements: Callable[[fx.Node], Hashable]) -> Iterator[Problem]:
    """A state's next value may become the memory of the state; others are handed out.

    Only two states may share: what does not lie in its own place is copied there.
    """
    found: dict[fx.Node, dict[Hashable, int]] = {}  # by memory: its parts, one each
    for place, value in enumerate(output_values(edit.after)):
        if not isinstance(value, fx.Node) or not _may_be_tensor(value):
            continue
        memory = memory_root(value)
        parts = found.setdefault(memory, {})
        part = None if value is memory else elements(value)  # None for all of it
        keys = list(parts) if part is None else [None, part]
        touched = [parts[key] for key in keys if key in parts]
        first = next((each for each in touched if _is_new(edit, each, place)), None)
        if first is not None:
            names = [output_name(edit.before, each) for each in (first, place)]
            text = f"{names[0]} and {names[1]} now lie in the same memory"
            yield Problem("memory", text, _SHARED)
        parts.setdefault(part, place)


def _is_new(edit: Edit, first: int, place: int) -> bool:
    """Whether two outputs had memory of their own, and one of them is handed out."""
    roles, old = roles_of(edit.after), output_values(edit.before)
    if roles[first].kind is roles[place].kind is OutputKind.STATE:
        return False
    one, two = old[first], old[place]
    if not isinstance(one, fx.Node) or not isinstance(two, fx.Node):
        return False
    return memory_root(one) is not memory_root(two)
