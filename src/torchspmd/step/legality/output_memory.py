"""Outputs keep memory of their own: the caller writes new states back after the run."""

import operator
from collections.abc import Callable, Hashable, Iterator

from torch import fx

from torchspmd import _torch
from torchspmd.step.graph.aliases import operator_of
from torchspmd.step.graph.roles import (
    OutputKind,
    output_values,
    readable_name,
    roles_of,
    written_state,
)
from torchspmd.step.legality.edit import Edit, Problem
from torchspmd.step.legality.interfaces import output_name

_OVERWRITTEN = (
    "Keep the copy: the state is written back before the caller sees the output."
)
_SHARED = "Keep the copy: a write into one of them would change the other."


def check_output_memory(
    edit: Edit, elements: Callable[[fx.Node], Hashable]
) -> list[Problem]:
    """No output newly lies in a state that is written back, or in another output.

    Args:
        edit: The edit.
        elements: Which elements a node of the edited graph holds; parts of one bucket
            lie in the same memory without touching each other.
    """
    return [*_overwritten(edit), *_shared(edit, elements)]


def _overwritten(edit: Edit) -> Iterator[Problem]:
    holders = written_state(edit.after)
    states = set(holders.values())
    old = output_values(edit.before)
    for place, value in enumerate(output_values(edit.after)):
        if not isinstance(value, fx.Node):
            continue
        memory = memory_of(value)
        if memory not in states or memory is holders.get(place):
            continue
        was = old[place]
        if isinstance(was, fx.Node) and memory_of(was) is edit.old.get(memory):
            continue
        text = (
            f"{output_name(edit.after, place)} now lies in the memory of "
            f"{readable_name(memory)}, which gets a new value"
        )
        yield Problem("memory", text, _OVERWRITTEN)


def _shared(edit: Edit, elements: Callable[[fx.Node], Hashable]) -> Iterator[Problem]:
    """States are written back by copying; other outputs are handed out as they are."""
    owner: dict[tuple[fx.Node, Hashable], int] = {}
    roles, old = roles_of(edit.after), output_values(edit.before)
    for place, value in enumerate(output_values(edit.after)):
        if not isinstance(value, fx.Node) or roles[place].kind is OutputKind.STATE:
            continue
        first = owner.setdefault((memory_of(value), elements(value)), place)
        one, two = old[first], old[place]
        if (
            first == place
            or not isinstance(one, fx.Node)
            or not isinstance(two, fx.Node)
        ):
            continue
        if memory_of(one) is not memory_of(two):
            names = [output_name(edit.before, each) for each in (first, place)]
            text = f"{names[0]} and {names[1]} now lie in the same memory"
            yield Problem("memory", text, _SHARED)


def memory_of(node: fx.Node) -> fx.Node:
    """The node that made the memory in which a node's value lies.

    >>> import torch
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> view = graph.call_function(torch.ops.aten.t.default, (x,))
    >>> memory_of(view) is x
    True
    """
    while True:
        source = looked_at(node)
        if source is None:
            return node
        node = source


def looked_at(node: fx.Node) -> fx.Node | None:
    """What a view was taken of; None for anything else."""
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return source if looked_at(source) is not None else None
    target = operator_of(node)
    places = () if target is None else _torch.shared_arguments(target)
    found = node.args[places[0]] if places and places[0] < len(node.args) else None
    return found if isinstance(found, fx.Node) else None
