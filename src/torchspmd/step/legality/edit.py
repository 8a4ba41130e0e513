"""An edit of a graph: before, after, which node was which, and what its nodes give."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import fx

from torchspmd.step.graph.aliases import Written, find_written
from torchspmd.step.graph.metadata import (
    OutputKind,
    describe_type,
    output_values,
    readable_name,
    roles_of,
    written_state,
)
from torchspmd.step.graph.nodes import fake_result

_SHOWN = 3  # names in one line
_PLAIN = (int, float, complex, str, slice, torch.dtype, torch.device)


@dataclass(frozen=True)
class Edit:
    """A graph before and after an edit.

    Attributes:
        before: The graph before.
        after: The edited graph.
        old: For nodes of ``after`` that were there before: their node of ``before``.
        new: The other way round, for nodes of ``before`` that still are in ``after``.
        place_before: Each node's place in ``before``.
        place_after: Each node's place in ``after``.
        same: Nodes of ``after`` that do what they did with what they were given before.
    """

    before: fx.Graph
    after: fx.Graph
    old: Mapping[fx.Node, fx.Node]
    new: Mapping[fx.Node, fx.Node]
    place_before: Mapping[fx.Node, int]
    place_after: Mapping[fx.Node, int]
    same: frozenset[fx.Node]

    @classmethod
    def of(
        cls, before: fx.Graph, after: fx.Graph, mapping: Mapping[fx.Node, fx.Node]
    ) -> Self:
        """Read an edit; the node mapping may still hold nodes that were erased."""
        place_before = {node: place for place, node in enumerate(before.nodes)}
        place_after = {node: place for place, node in enumerate(after.nodes)}
        old = {node: mapping[node] for node in place_after if node in mapping}
        new = {was: node for node, was in old.items()}
        same = frozenset(now for now, was in old.items() if _is_same(now, was, old))
        return cls(before, after, old, new, place_before, place_after, same)

    @property
    def is_empty(self) -> bool:
        """Whether every node is where it was and takes what it took."""
        pairs = zip(self.after.nodes, self.before.nodes, strict=False)
        return len(self.same) == len(self.place_before) == len(self.place_after) and (
            all(self.old[now] is was for now, was in pairs)
        )

    @cached_property
    def written_before(self) -> Written:
        """The memory that the graph before writes into."""
        return find_written(self.before)

    @cached_property
    def written_after(self) -> Written:
        """The memory that the edited graph writes into."""
        return find_written(self.after)

    @property
    def keeps_fakes(self) -> bool:
        """Whether the graph says of all nodes that were there what it said before."""
        return all(
            now.meta.get("val") is was.meta.get("val") for now, was in self.old.items()
        )


def _is_same(now: fx.Node, was: fx.Node, old: Mapping[fx.Node, fx.Node]) -> bool:
    if now.target != was.target or now.op != was.op:
        return False
    given: Any = fx.node.map_arg((now.args, now.kwargs), old.get)
    return is_equal(given, (was.args, was.kwargs))


def is_equal(one: Any, other: Any) -> bool:
    """Whether arguments are certainly the same; 0.0 and -0.0 are not.

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
    return f"output {place} ({kind}{show(value)})"


def show(value: object) -> str:
    """What an output is: a node by its name."""
    return readable_name(value) if isinstance(value, fx.Node) else repr(value)


def shorten(names: Sequence[str]) -> str:
    """The first names of many.

    >>> shorten(["a", "b"]), shorten(["a", "b", "c", "d", "e"])
    ('a, b', 'a, b, c and 2 more')
    """
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# ----------------------------------------------------------------------------
# What the nodes of an edited graph give, without values.
#
# A pass may change a call and leave its ``meta["val"]`` as it was. A check that believes it
# takes one dtype for another. So what capture wrote down is believed for calls that take
# what they took before, and computed again for all others.

_RUNS = "Cast or reshape in front of a call whose operands get another dtype or shape."
_REFUSALS = (RuntimeError, TypeError, ValueError, IndexError)


class FakeResults:
    """What each node of an edited graph gives; computed for changed calls.

    Args:
        edit: The edit.

    Attributes:
        values: A fake value for each node; None where it is not known.
        problems: Calls that could run before, and cannot on what they are given now.

    >>> from torchspmd.step.graph.snapshot import copy_graph
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> x.meta["val"] = torch.empty(3, device="meta")
    >>> made = graph.call_function(torch.ops.aten.ones_like.default, (x,))
    >>> made.meta["val"] = torch.empty(3, device="meta")
    >>> _ = graph.output([made])
    >>> before, mapping = copy_graph(graph)
    >>> made.kwargs = {"dtype": torch.bfloat16}
    >>> FakeResults(Edit.of(before, graph, mapping)).values[made].dtype
    torch.bfloat16
    """

    def __init__(self, edit: Edit) -> None:
        self._edit = edit
        self._kept: set[fx.Node] = set()  # give what they gave before
        self._forms: dict[fx.Node, str] = {}  # of nodes of both graphs
        self.values: dict[fx.Node, Any] = {}
        self.problems: list[Problem] = []
        for node in edit.after.nodes:
            if node.op == "output":
                continue
            was = edit.old.get(node)
            if was is not None and self._takes_the_same(node, was):
                self._kept.add(node)
                value = was.meta.get("val")
            else:
                value = self._compute(node, was)
            if node.op == "placeholder" and value is None:
                value = node.meta.get("val")  # nothing else says what it is
            self.values[node] = value

    def write_down(self) -> None:
        """Correct the fake values of the graph's nodes, for those who read it next."""
        for node, value in self.values.items():
            written = node.meta.get("val")
            if value is None or value is written:
                continue
            if metadata_of(value) != metadata_of(written):
                node.meta["val"] = value

    def _takes_the_same(self, node: fx.Node, was: fx.Node) -> bool:
        if node in self._edit.same and self._kept.issuperset(node.all_input_nodes):
            return True
        if node.op != was.op or node.target != was.target:
            return False
        now: Any = fx.node.map_arg((node.args, node.kwargs), self._form)
        old: Any = fx.node.map_arg((was.args, was.kwargs), self._form)
        return is_equal(now, old)

    def _form(self, node: fx.Node) -> str:
        """What is known of an operand; what is not known is like nothing else."""
        node = self._edit.old[node] if node in self._kept else node
        if node not in self._forms:
            value = self.values.get(node, node.meta.get("val"))
            self._forms[node] = (
                f"of {id(node)}" if value is None else metadata_of(value)
            )
        return self._forms[node]

    def _compute(self, node: fx.Node, was: fx.Node | None) -> Any:
        try:
            return fake_result(node, self.values)
        except _REFUSALS as error:
            # Operators that do not work on fake tensors raise subclasses.
            if was is None or type(error) not in _REFUSALS:
                return None
            if node.target == was.target and _could_run(was):
                self.problems.append(self._problem(node, was))
        except Exception:  # of no common class in torch; then nothing is known
            pass
        return None

    def _problem(self, node: fx.Node, was: fx.Node) -> Problem:
        pairs = [
            (
                readable_name(now),
                describe_type(self.values[now]),
                describe_type(old.meta.get("val")),
            )
            for now, old in zip(node.all_input_nodes, was.all_input_nodes, strict=False)
        ]
        changed = [
            f"{name} as {now} (was {old})" for name, now, old in pairs if now != old
        ]
        what = shorten(changed) or "other arguments than before"
        text = f"{readable_name(node)} cannot run: it takes {what}"
        return Problem("call", text, _RUNS)


def _could_run(was: fx.Node) -> bool:
    values = {each: each.meta.get("val") for each in was.all_input_nodes}
    try:
        return fake_result(was, values) is not None
    except Exception:  # then that it fails now says nothing
        return False


def metadata_of(value: Any) -> str:
    """All that must be the same for two fake values to be.

    >>> metadata_of([torch.empty(3, 1, device="meta"), 2])
    '[float32 meta strided (3, 1) (1, 1), int 2]'
    """
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(metadata_of, value))}]"
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value!r}"
    kind = f"{_short(value.dtype)} {value.device} {_short(value.layout)}"
    if value.layout is not torch.strided:
        return f"{kind} {tuple(value.shape)}"
    return f"{kind} {tuple(value.shape)} {value.stride()}"


def _short(name: object) -> str:
    return str(name).removeprefix("torch.")
