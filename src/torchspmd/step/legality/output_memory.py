"""Outputs keep memory of their own: new states are written where the old ones lie."""

import operator
from collections.abc import Callable, Hashable, Iterator

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.step.graph.aliases import operator_of
from torchspmd.step.graph.memory import ROLE_KEY
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
        memory = memory_of(value)
        is_written = memory in states
        is_state = place in holders  # and is copied to where it belongs
        is_others = is_written or (not is_state and _is_callers(memory))
        if not is_others or memory is holders.get(place):
            continue
        was = old[place]
        if isinstance(was, fx.Node) and memory_of(was) is edit.old.get(memory):
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
        memory = memory_of(value)
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
    return memory_of(one) is not memory_of(two)


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
