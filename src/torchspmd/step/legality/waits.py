"""One wait for each collective, before anything else uses its result."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from torchspmd import _torch
from torchspmd.comm import find_operator
from torchspmd.step.graph.aliases import operator_of
from torchspmd.step.graph.roles import readable_name
from torchspmd.step.legality.edit import Edit, Problem

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
            if _is_wait(user):
                found.items.setdefault(item, []).append(user)
            elif user.target is operator.getitem:
                waiting.append((user, user.args[1]))
            elif _is_view(user):
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


def _is_wait(node: fx.Node) -> bool:
    target = operator_of(node)
    return target is not None and _torch.packet_name(target).endswith("::wait_tensor")


def _is_view(node: fx.Node) -> bool:
    target = operator_of(node)
    if target is None or _torch.written_arguments(target):
        return False
    return bool(_torch.shared_arguments(target))


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
        if not _is_wait(node) or node in waited:
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
