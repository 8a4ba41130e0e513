"""An edit of a graph: before, after, and which node was which."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from torch import fx


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
