"""An edit of a graph: before, after, and which node was which."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import fx

_PLAIN = (int, float, complex, str, slice, torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class Edit:
    """A graph before and after an edit.

    Attributes:
        before: The graph before.
        after: The edited graph.
        old: For nodes of ``after`` that were there before: their node of ``before``.
        new: The other way round, for nodes of ``before`` that still are in ``after``.
        place_before: Each node's place in ``before``.
        place_after: Each node's place in ``after``.
    """

    before: fx.Graph
    after: fx.Graph
    old: Mapping[fx.Node, fx.Node]
    new: Mapping[fx.Node, fx.Node]
    place_before: Mapping[fx.Node, int]
    place_after: Mapping[fx.Node, int]

    @classmethod
    def of(
        cls, before: fx.Graph, after: fx.Graph, twins: Mapping[fx.Node, fx.Node]
    ) -> Self:
        """Look an edit up; ``twins`` may still hold nodes that were erased."""
        place_before = {node: place for place, node in enumerate(before.nodes)}
        place_after = {node: place for place, node in enumerate(after.nodes)}
        old = {node: twins[node] for node in place_after if node in twins}
        new = {earlier: node for node, earlier in old.items()}
        return cls(before, after, old, new, place_before, place_after)

    @property
    def is_empty(self) -> bool:
        """Whether every node is where it was and takes what it took."""
        if len(self.place_before) != len(self.place_after):
            return False
        return all(map(self.is_same, self.after.nodes, self.before.nodes))

    def is_same(self, now: fx.Node, was: fx.Node) -> bool:
        """Whether a node does what another did before, with what was given to it."""
        given: Any = fx.node.map_arg((now.args, now.kwargs), self.old.get)
        is_kept = self.old.get(now) is was and now.target == was.target
        return is_kept and now.op == was.op and is_equal(given, (was.args, was.kwargs))


def is_equal(one: Any, other: Any) -> bool:
    """Whether arguments are the same beyond doubt; 0.0 and -0.0 are not.

    >>> is_equal(([1, 2.0], {"a": torch.float32}), ([1, 2.0], {"a": torch.float32}))
    True
    >>> is_equal([0.0], [-0.0]), is_equal(1, True), is_equal(object(), object())
    (False, False, False)
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_equal, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(
            map(is_equal, one.values(), other.values())
        )
    return isinstance(one, _PLAIN) and repr(one) == repr(other)


@dataclass(frozen=True, slots=True)
class Problem:
    """One way in which an edit is wrong.

    Attributes:
        check: Which check found it.
        text: What is wrong, with the names of the two nodes.
        rule: What must hold, and so what to change.
    """

    check: str
    text: str
    rule: str

    def __str__(self) -> str:
        """A line for people.

        >>> print(Problem("wait", "a has no wait", "Add one."))
        wait: a has no wait. Add one.
        """
        return f"{self.check}: {self.text}. {self.rule}"
