"""An edit of a graph: before, after, and which node was which."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import fx

from torchspmd.step.graph.metadata import (
    OutputKind,
    output_values,
    readable_name,
    roles_of,
    written_state,
)

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


# ----------------------------------------------------------------------------
# The same inputs and outputs, and each value computed before it is used.

_DEFINED = "Insert a node behind the nodes that it takes."
_INPUTS = (
    "A pass keeps the placeholders, all and in their order: the caller gives them."
)
_OUTPUTS = (
    "A pass keeps the outputs, all and in their order: the caller takes them apart."
)
_ROLES = "Keep the meta of the output node; it says which output is whose next value."


def check_definitions(graph: fx.Graph) -> list[Problem]:
    """Each node takes only nodes of this graph that stand before it."""
    problems = []
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if source not in seen:
                why = "comes later" if source.graph is graph else "is not in the graph"
                names = (
                    f"{readable_name(node)} uses {readable_name(source)}, which {why}"
                )
                problems.append(Problem("definition", names, _DEFINED))
        seen.add(node)
    if not problems:
        problems += _lint(graph)
    return problems


def _lint(graph: fx.Graph) -> Iterator[Problem]:
    try:
        graph.lint()
    except (RuntimeError, ValueError) as error:
        yield Problem("definition", str(error).rstrip("."), _DEFINED)


def check_interface(edit: Edit) -> list[Problem]:
    """The graphs have the same inputs, outputs, and roles of outputs."""
    return [*_check_inputs(edit), *_check_outputs(edit)]


def _check_inputs(edit: Edit) -> Iterator[Problem]:
    old, new = (
        graph.find_nodes(op="placeholder") for graph in (edit.before, edit.after)
    )
    for place, (was, now) in enumerate(zip(old, new, strict=False)):
        if was.target != now.target:
            names = readable_name(was), readable_name(now)
            text = f"input {place} was {names[0]} and is {names[1]}"
            if names[0] == names[1]:  # only what its node is called by is another
                text = f"input {place} ({names[0]}) had the target {was.target!r}"
                text += f" and has {now.target!r}"
            yield Problem("input", text, _INPUTS)
            return  # all that follow are moved
    if len(old) != len(new):
        more, what = (old, "is gone") if len(old) > len(new) else (new, "is new")
        one = more[min(len(old), len(new))]
        yield Problem("input", f"the input {readable_name(one)} {what}", _INPUTS)


def _check_outputs(edit: Edit) -> Iterator[Problem]:
    old, new = output_values(edit.before), output_values(edit.after)
    if len(old) != len(new):
        dropped = _dropped(edit, old, new)
        what = f"; {dropped} is missing" if dropped and len(new) < len(old) else ""
        text = f"the graph had {len(old)} outputs and has {len(new)}{what}"
        yield Problem("output", text, _OUTPUTS)
        return
    for place, (was, now) in enumerate(zip(old, new, strict=True)):
        if isinstance(was, fx.Node) != isinstance(now, fx.Node):
            name = output_name(edit.before, place)
            text = f"{name} was {_show(was)} and is {_show(now)}"
            yield Problem("output", text, _OUTPUTS)
    if roles_of(edit.before) != roles_of(edit.after):
        yield Problem("output", "the roles of the outputs changed", _ROLES)


def _dropped(edit: Edit, old: list[object], new: list[object]) -> str:
    """The first output whose node is not where it should be."""
    for place, was in enumerate(old):
        now = new[place] if place < len(new) else None
        twin = edit.new.get(was) if isinstance(was, fx.Node) else was
        if now is not twin or now is None:
            return output_name(edit.before, place)
    return ""


def output_name(graph: fx.Graph, place: int) -> str:
    """What an output is called in messages.

    >>> graph = fx.symbolic_trace(lambda x: x + 1).graph
    >>> output_name(graph, 0)
    'output 0 (add)'
    """
    role, value = roles_of(graph)[place], output_values(graph)[place]
    if role.kind is OutputKind.STATE:
        holder = readable_name(written_state(graph)[place])
        return f"output {place} (next value of {holder})"
    kind = f"{role.kind.value} " if role.kind is not OutputKind.RESULT else ""
    return f"output {place} ({kind}{_show(value)})"


def _show(value: object) -> str:
    return readable_name(value) if isinstance(value, fx.Node) else repr(value)
