"""One wait for each collective, before anything else uses its result."""

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import find_operator
from torchspmd.step.graph.aliases import (
    find_aliases,
    is_view,
    is_wait,
    operator_of,
)
from torchspmd.step.graph.metadata import readable_name
from torchspmd.step.legality.edit import Edit, Problem
from torchspmd.step.legality.equivalence import random_nodes
from torchspmd.step.legality.evaluate import nodes_written_by, written_nodes
from torchspmd.step.legality.values import Fakes, read_call

_ASYNCHRONOUS = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
_ONE = "Each collective has one wait for each tensor that it gives."
_BEHIND = "Use the result of the wait."


@dataclass(slots=True)
class Started:
    """A collective, what waits for it, and what uses it without a wait.

    Attributes:
        start: The node that starts it.
        items: The waits for each of its tensors, by the tensor's number.
        early: Nodes that use a tensor without a wait.
    """

    start: fx.Node
    items: dict[object, list[fx.Node]] = field(default_factory=dict)
    early: list[fx.Node] = field(default_factory=list)

    @property
    def waits(self) -> list[fx.Node]:
        """All waits."""
        return [wait for waits in self.items.values() for wait in waits]


def is_start(node: fx.Node) -> bool:
    """Whether a node starts a collective that must be waited for."""
    target = operator_of(node)
    if target is None:
        return False
    name = _torch.packet_name(target)
    is_asynchronous = name.partition("::")[0] in _ASYNCHRONOUS
    return is_asynchronous and find_operator(name) is not None


def find_starts(graph: fx.Graph) -> list[Started]:
    """The collectives of a graph, in order, with their waits."""
    return [_follow(node) for node in graph.nodes if is_start(node)]


def _follow(start: fx.Node) -> Started:
    found = Started(start)
    waiting: list[tuple[fx.Node, object]] = [(start, None), *_written_buffers(start)]
    while waiting:
        node, item = waiting.pop()
        for user in node.users:
            if node is not start and not is_behind(user, start):
                continue  # uses of a buffer before the collective writes into it
            if is_wait(user):
                found.items.setdefault(item, []).append(user)
            elif user.target is operator.getitem:
                waiting.append((user, user.args[1]))
            elif is_view(user):
                waiting.append((user, item))
            elif user is not start:
                found.early.append(user)
    return found


def _written_buffers(start: fx.Node) -> list[tuple[fx.Node, object]]:
    """What an in-place collective writes into: it too must not be used before the wait."""
    target = operator_of(start)
    places = _torch.written_arguments(target)
    given = [start.args[place] for place in places if place < len(start.args)]
    given += [start.kwargs[name] for name in start.kwargs if name == "out"]
    return [(node, None) for node in given if isinstance(node, fx.Node)]


def is_behind(node: fx.Node, other: fx.Node) -> bool:
    """Whether a node stands behind another one of its graph."""
    return bool(other < node)


def check_waits(edit: Edit) -> list[Problem]:
    """Every wait of the edited graph is right, as far as it was right before."""
    before = {started.start: started for started in find_starts(edit.before)}
    problems: list[Problem] = []
    waited: set[fx.Node] = set()
    for started in find_starts(edit.after):
        waited |= set(started.waits)
        old = edit.old.get(started.start)
        problems += _check(started, before.get(old) if old else None)
    problems += _check_strays(edit, waited)
    return problems


def _check(started: Started, old: Started | None) -> Iterator[Problem]:
    name = readable_name(started.start)
    if not started.items and (old is None or old.items):
        user = started.early[0] if started.early else None
        use = f", and {readable_name(user)} uses it" if user is not None else ""
        yield Problem("wait", f"nothing waits for {name}{use}", _ONE)
    most = max((len(waits) for waits in old.items.values()), default=1) if old else 1
    for waits in started.items.values():
        if len(waits) > most:
            names = " and ".join(readable_name(each) for each in waits)
            yield Problem("wait", f"{names} both wait for {name}", _ONE)
    if old is None or not old.early:
        for user in started.early if started.items else ():
            text = f"{readable_name(user)} uses {name} without its wait"
            yield Problem("wait", text, _BEHIND)


def _check_strays(edit: Edit, waited: set[fx.Node]) -> Iterator[Problem]:
    """Waits for something that no collective gave."""
    for node in edit.after.nodes:
        if not is_wait(node) or node in waited:
            continue
        old, (source, *_) = edit.old.get(node), node.all_input_nodes
        old_source = edit.old.get(source)
        if old is not None and old_source in old.all_input_nodes:
            continue  # so it was before
        text = (
            f"{readable_name(node)} waits for {readable_name(source)}, which no "
            "collective started, or which was waited for already"
        )
        yield Problem("wait", text, _ONE)


# ----------------------------------------------------------------------------
# Calls that are no operators of torch, but tell by their name that they write or draw.
#
# Values are compared by operators. A method, a Python function or a module in a graph is
# taken for one that only computes; these are not.

_WRITES = "Take the operator of torch.ops.aten, whose writes are checked."
_DRAWS = "Leave it out: what the step draws would change."
_IN_PLACE = (
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv),
    *(operator.ifloordiv, operator.imod, operator.ipow, operator.imatmul),
    *(operator.iand, operator.ior, operator.ixor, operator.setitem),
)
_DRAW = frozenset(
    {"bernoulli", "manual_seed", "multinomial", "normal", "poisson", "seed"}
)


def check_unknown_calls(edit: Edit) -> Iterator[Problem]:
    """What an edit adds; what was there before is the step's own."""
    for node in edit.after.nodes:
        if node in edit.old or operator_of(node) is not None:
            continue
        if _writes(node):
            text = f"{readable_name(node)} is new and writes in place ({_name(node)})"
            yield Problem("state", text, _WRITES)
        elif _draws(node):
            text = (
                f"{readable_name(node)} is new and takes random numbers ({_name(node)})"
            )
            yield Problem("random", text, _DRAWS)


def _writes(node: fx.Node) -> bool:
    if node.op == "call_function" and node.target in _IN_PLACE:
        return True
    if node.op == "call_module":
        module = _module(node)
        return getattr(module, "inplace", False) is True
    name = _name(node)
    is_marked = name.endswith("_") and not name.endswith("__")
    if node.op == "call_function":  # a function of the user's may be called anything
        return is_marked and _is_torch(node)
    return node.op == "call_method" and (is_marked or name == "__setitem__")


def _draws(node: fx.Node) -> bool:
    is_known = node.op == "call_method" or (
        node.op == "call_function" and _is_torch(node)
    )
    name = _name(node)
    return is_known and (name in _DRAW or name.startswith("rand"))


def _is_torch(node: fx.Node) -> bool:
    module = getattr(node.target, "__module__", None) or ""  # none, if it is built in
    is_built_in = getattr(torch, _name(node), None) is node.target
    return is_built_in or module.partition(".")[0] == "torch"


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _module(node: fx.Node) -> object:
    owner = node.graph.owning_module
    if owner is None:
        return None
    try:
        return owner.get_submodule(str(node.target))
    except AttributeError:
        return None


# ----------------------------------------------------------------------------
# Reads and writes of the same memory keep their order, aliases included.

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
        if is_view(node) or is_wait(node):
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


# ----------------------------------------------------------------------------
# Collectives keep their order on each group, or the pass says that it changes it.
#
# All ranks run the same graph, so a changed order is the same on all of them; but a pass
# that changes it by accident has usually moved more than it meant to, and two programs that
# were split (setup and steady state) would no longer agree. So it is an error unless
# declared, and then it is told.

_RULE = (
    "Keep the order of collectives on one group, or declare the pass with "
    "reorders_collectives=True."
)
_GROUPS = ("group_name", "group", "process_group", "ranks", "tag")


@dataclass(frozen=True, slots=True)
class OrderReport:
    """What became of the order of collectives.

    Attributes:
        problems: Changes that nobody declared.
        explained: Changes that the pass declared, a line each.
    """

    problems: tuple[Problem, ...]
    explained: tuple[str, ...]


def collectives_by_group(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    """The collectives on each group, in order."""
    groups: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        target = operator_of(node)
        if target is not None and find_operator(_torch.packet_name(target)):
            groups.setdefault(_group_of(node), []).append(node)
    return groups


def _group_of(node: fx.Node) -> str:
    arguments = read_call(node).arguments
    named = [arguments[name] for name in _GROUPS if arguments.get(name) is not None]
    return str(named[0]) if named else ""


def check_order(
    edit: Edit,
    value_before: Callable[[fx.Node], int],
    value_after: Callable[[fx.Node], int],
    may_reorder: bool | Collection[str],
) -> OrderReport:
    """Compare the order of collectives on each group.

    Args:
        edit: The edit.
        value_before: The value of a node before; collectives that a pass made anew are
            known again by their values.
        value_after: The same for the edited graph.
        may_reorder: Whether the order may change, or on which groups.
    """
    problems: list[Problem] = []
    explained: list[str] = []
    old = collectives_by_group(edit.before)
    for group, nodes in collectives_by_group(edit.after).items():
        was = _matched(edit, old.get(group, []), nodes, value_before, value_after)
        for one, two in _inversions(nodes, was, edit):
            names = f"{readable_name(one)} now starts before {readable_name(two)}"
            if may_reorder is True or (may_reorder and group in may_reorder):
                explained.append(f"{names} on group {group!r}")
            else:
                text = f"{names} on group {group!r}; it started after it"
                problems.append(Problem("order", text, _RULE))
    return OrderReport(tuple(problems), tuple(explained))


def _matched(
    edit: Edit,
    old: list[fx.Node],
    new: list[fx.Node],
    value_before: Callable[[fx.Node], int],
    value_after: Callable[[fx.Node], int],
) -> dict[fx.Node, fx.Node]:
    """The collective before for each of the edited graph that was there before."""
    kept = {node: edit.old[node] for node in new if node in edit.old}
    gone: dict[int, list[fx.Node]] = {}
    taken = set(kept.values())
    for node in reversed(old):
        if node not in taken:
            gone.setdefault(value_before(node), []).append(node)
    for node in new:
        same = gone.get(value_after(node)) if node not in kept else None
        if same:
            kept[node] = same.pop()
    return kept


def _inversions(
    nodes: list[fx.Node], was: dict[fx.Node, fx.Node], edit: Edit
) -> list[tuple[fx.Node, fx.Node]]:
    """Neighbours in the new order that stood the other way round."""
    known = [(node, edit.place_before[was[node]]) for node in nodes if node in was]
    return [(one, two) for (one, a), (two, b) in pairwise(known) if a > b]
