"""Memory: who reads and writes it, in what order, what outputs share, how tensors lie."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from torchspmd.step.graph.aliases import (
    find_aliases,
    is_view,
    is_wait,
    memory_root,
    view_source,
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
from torchspmd.step.legality.values import (
    Fakes,
    OpCall,
    Reader,
    are_integers,
    find_tensor,
    read_call,
    split_arguments,
)

# ----------------------------------------------------------------------------
# Reads and writes of the same memory keep their order, aliases included.

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

    def __init__(self, graph: fx.Graph) -> None:
        self.last_write: dict[_Access, fx.Node | None] = {}
        self.writes: dict[fx.Node, list[fx.Node]] = {}
        written = [each for node in graph.nodes for each in written_nodes(node)]
        self.root = find_aliases(graph).root if written else {}
        shared = {self.root[node] for node in written}
        for node in graph.nodes if written else ():
            for root in self._used_by(node) & shared:
                before = self.writes.get(root)
                self.last_write[node, root] = before[-1] if before else None
            for root in self._written_by(node):
                self.writes.setdefault(root, []).append(node)

    def _written_by(self, node: fx.Node) -> set[fx.Node]:
        return {self.root[each] for each in written_nodes(node)}

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
    before, after = Accesses(edit.before), Accesses(edit.after)
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
    for node in edit.after.nodes:
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


# ----------------------------------------------------------------------------
# Outputs keep memory of their own: new states are written where the old ones lie.

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


# ----------------------------------------------------------------------------
# How tensors lie in memory, for the few operators whose result depends on it.
#
# Values do not say how their elements lie. ``as_strided`` reads elements by their places in
# memory, and random numbers are given out in the order of memory: such calls also take what
# is known about the layout of their operand, so that a clone in another memory format in
# front of them is not taken for the same. Fused optimizers walk through the memory of a
# parameter, its gradient and its states at once, and take the layouts of all of them.

_BY_PLACE = frozenset(
    f"aten::{name}"
    for name in (
        "as_strided",
        "as_strided_copy",
        "as_strided_scatter",
        "is_contiguous",
        "storage_offset",
        "stride",
        "sym_is_contiguous",
        "sym_storage_offset",
        "sym_stride",
    )
)
_KEEPING = frozenset(
    {"aten::alias", "aten::detach", "_c10d_functional::wait_tensor"}
)  # views of the same places


def reads_layout(call: OpCall) -> bool:
    """Whether what a call computes depends on how its operand lies in memory."""
    if call.signature is None or not isinstance(call.first, fx.Node):
        return False
    return call.signature.name in _BY_PLACE or call.signature.is_random


def layouts_walked(reader: Reader, items: Sequence[Any]) -> list[int]:
    """A value for the layouts of tensors that are walked through together.

    None where they lie in the same way: element i of each then belongs to element i of
    the others, however they lie. Like all layouts, it makes nothing certain.
    """
    tensors = [find_tensor(reader, item) for item in items]
    shape = () if tensors[0] is None else tensors[0].shape
    # Numbers, as counts of steps are, lie nowhere else; other shapes are other values.
    lying = [reader.layout(i) if isinstance(i, fx.Node) else None for i in items]
    walked = {
        layout
        for layout, found in zip(lying, tensors, strict=True)
        if shape and found is not None and found.shape == shape
    }
    if len(walked) < 2 and all(_leaves_no_gaps(shape, each) for each in walked):
        return []
    return [reader.table.term(f"layouts {lying!r}", None, ())]


def layout_read(reader: Reader, call: OpCall) -> int:
    """A value for the layout of a call's operand, and for the memory that it lies in.

    It has no parts: where two of them differ, nothing is certain about the results.
    """
    node, chain = call.first, []
    while call.name in _BY_PLACE and (source := view_source(node)) is not None:
        view = read_call(node)
        if view.name not in _KEEPING:
            rest = dict(list(view.arguments.items())[1:])
            chain.append((view.head, split_arguments(reader, rest)))
        node = source
    # Through a view, places outside of it can be read too.
    memory = reader.value(node) if call.name in _BY_PLACE else None
    head = f"layout {reader.layout(node)!r} of {memory} through {chain!r}"
    return reader.table.term(head, None, ())


def unknown_layout(reader: Reader, node: fx.Node) -> Hashable:
    """The layout of a node of whose value nothing is known: it follows from its call."""
    call = (str(node.target), repr(node.args), repr(node.kwargs))
    follows = tuple(map(reader.layout, node.all_input_nodes))
    # By number: written out, layouts of layouts would grow without end.
    return "unknown", reader.table.term("unknown layout", (*call, follows), ())


def _leaves_no_gaps(shape: Sequence[Any], strides: Hashable) -> bool:
    """Whether memory with these strides, in short, holds each element once, and no more."""
    sizes = [size for size in shape if size != 1]
    if not isinstance(strides, tuple) or len(strides) != len(sizes):
        return False
    if not are_integers((*sizes, *strides)):
        return False
    expected = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if stride != expected:
            return False
        expected *= size
    return True


def known_layout(value: object) -> Hashable:
    """The strides of a fake tensor.

    >>> known_layout(torch.empty(3, 2).t()), known_layout(torch.empty(3, 1, 2))
    ((1, 2), (2, 1))
    """
    if isinstance(value, (list, tuple)):
        return tuple(map(known_layout, value))
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    shape, strides = value.shape, value.stride()
    if not are_integers((*shape, *strides)):
        return repr((shape, strides))
    # The stride of a dimension of one place says nothing.
    pairs = zip(shape, strides, strict=False)
    return tuple(stride for size, stride in pairs if size != 1)
