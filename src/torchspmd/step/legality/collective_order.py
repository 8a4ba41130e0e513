"""Collectives keep their order on each group, or the pass says that it changes it.

All ranks run the same graph, so a changed order is the same on all of them; but a pass
that changes it by accident has usually moved more than it meant to, and two programs that
were split (setup and steady state) would no longer agree. So it is an error unless
declared, and then it is told.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from torchspmd import _torch
from torchspmd.comm import find_operator
from torchspmd.step.graph.aliases import operator_of
from torchspmd.step.graph.roles import readable_name
from torchspmd.step.legality.edit import Edit, Problem
from torchspmd.step.legality.symbolic.call import read_call

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
