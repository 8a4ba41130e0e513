"""What each output of a captured graph is for, written on the graph itself.

A pass sees only a graph; whether an output is the next value of an input or something
that the user gets decides what may be done with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from torch import fx

_META_KEY = "torchspmd_roles"
_GUARDED_KEY = "torchspmd_guarded"


class OutputKind(Enum):
    """Where an output goes."""

    STATE = "state"  # the next value of an input, written back into the user's tensor
    GRADIENT = "gradient"  # becomes a parameter's `grad`
    CREATED = "created"  # optimizer state that did not exist before
    RESULT = "result"  # returned to the user


@dataclass(frozen=True, slots=True)
class OutputRole:
    """What one output is for.

    Attributes:
        kind: Where it goes.
        placeholder: For state, the index of the input whose next value it is.
        may_wait: For a gradient, whether the next step clears it unread.
    """

    kind: OutputKind
    placeholder: int = -1
    may_wait: bool = False

    @property
    def leaves(self) -> str:
        """How the caller or the next step gets it at the end of this one, if at all.

        >>> OutputRole(OutputKind.RESULT).leaves
        'is returned by the step'
        """
        if self.kind is OutputKind.RESULT:
            return "is returned by the step"
        if self.kind is OutputKind.GRADIENT and not self.may_wait:
            return (
                "becomes a gradient that the step leaves in .grad, where the next one adds "
                "to it unless the step clears it (optim.zero_grad(), first or last)"
            )
        return ""


def set_roles(graph: fx.Graph, roles: Sequence[OutputRole]) -> None:
    """Write the roles of all outputs on a graph."""
    output_node(graph).meta[_META_KEY] = tuple(roles)


def roles_of(graph: fx.Graph) -> tuple[OutputRole, ...]:
    """The role of each output; results, where nothing else was written on the graph."""
    output = output_node(graph)
    roles: tuple[OutputRole, ...] | None = output.meta.get(_META_KEY)
    if roles is None:
        return (OutputRole(OutputKind.RESULT),) * len(output_values(graph))
    return roles


def written_state(graph: fx.Graph) -> dict[int, fx.Node]:
    """The placeholder that each state output is the next value of, by output index."""
    placeholders = graph.find_nodes(op="placeholder")
    return {
        index: placeholders[role.placeholder]
        for index, role in enumerate(roles_of(graph))
        if role.kind is OutputKind.STATE
    }


def mark_guarded(graph: fx.Graph, places: Sequence[int]) -> None:
    """Write on inputs that their values decide, before each run, which graph is run."""
    placeholders = graph.find_nodes(op="placeholder")
    for place in places:
        placeholders[place].meta[_GUARDED_KEY] = True


def is_guarded(node: fx.Node) -> bool:
    """Whether the value of an input decides which graph is run."""
    return bool(node.meta.get(_GUARDED_KEY))


def output_node(graph: fx.Graph) -> fx.Node:
    """The node that ends a graph."""
    node: fx.Node = graph.output_node()
    return node


def output_values(graph: fx.Graph) -> list[object]:
    """What a graph returns, one by one."""
    (values,) = output_node(graph).args
    return list(values) if isinstance(values, (list, tuple)) else [values]


def readable_name(node: fx.Node) -> str:
    """What a node is called in messages: an input by what it holds.

    >>> graph = fx.symbolic_trace(lambda x: x + 1).graph
    >>> [readable_name(node) for node in graph.nodes]
    ['x', 'add', 'output']
    """
    held = node.meta.get("torchspmd_name")
    return f"{node.name} ({held})" if held else node.name
