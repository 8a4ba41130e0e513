"""Whether an edited graph still computes what it computed before.

Checked after each pass, from the graphs alone: every value is computed before it is used;
inputs and outputs are the same; each collective has one wait, before its first use;
collectives keep their order on each group; no access of memory crossed a write; outputs
keep memory of their own; each output is the same value. What cannot be shown is said, not
passed over.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from torchspmd.errors import LegalityError
from torchspmd.step.graph.metadata import output_values
from torchspmd.step.legality.edit import Edit, FakeResults, Problem, shorten
from torchspmd.step.legality.equivalence import Equivalence
from torchspmd.step.legality.evaluate import Earlier, Evaluation
from torchspmd.step.legality.graph_rules import (
    check_definitions,
    check_interface,
    check_order,
    check_random_order,
    check_unknown_calls,
    check_waits,
)
from torchspmd.step.legality.memory_rules import check_hazards, check_output_memory

_MOST = 20  # problems in one error
_CONSTANTS = (
    "A pass keeps what get_attr reads: give another tensor another name, and read it with "
    "a node of its own."
)


@dataclass(frozen=True, slots=True)
class Proof:
    """What was shown about an edit that is legal.

    Attributes:
        num_outputs: How many outputs the graph has.
        unproved: The names of outputs that may have changed.
        explained: Changes of the order of collectives, as declared.
        values: The values of the edited graph's nodes, to prove the next edit by; None
            where nothing was edited.
    """

    num_outputs: int
    unproved: tuple[str, ...]
    explained: tuple[str, ...] = ()
    values: Evaluation | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        """A line for people.

        >>> print(Proof(3, ()))
        proved equal
        >>> print(Proof(3, ("output 0 (add)",)))
        checked: 1 of 3 outputs not proved: output 0 (add)
        """
        shown = "proved equal"
        if self.unproved:
            count = f"{len(self.unproved)} of {self.num_outputs}"
            shown = f"checked: {count} outputs not proved: {shorten(self.unproved)}"
        if self.explained:
            shown += f"; order changed as declared: {shorten(self.explained)}"
        return shown

    def doubt(self, name: str, compared: Collection[str] = ()) -> str:
        """The warning for an edit of which not all is proved.

        Args:
            name: The edit.
            compared: Outputs that were run and compared instead.
        """
        left = [each for each in self.unproved if each not in compared]
        advice = "compile(verify=True) runs both graphs and compares them."
        if len(left) < len(self.unproved):
            advice = "all others without a proof were run and compared."
        return (
            f"{name}: {len(left)} of {self.num_outputs} outputs could not be "
            f"proved equal to those before: {shorten(left)}. Nothing is known to "
            f"be wrong; {advice}"
        )


def check_edit(
    before: fx.Graph,
    after: fx.Graph,
    mapping: Mapping[fx.Node, fx.Node],
    *,
    name: str = "the edit",
    may_reorder: bool | Collection[str] = False,
    constants: Sequence[str] = (),
    earlier: Earlier | None = None,
) -> Proof:
    """Raise ``LegalityError`` unless an edit is legal; return what was shown.

    A legal edit is left with a true ``meta["val"]`` at each node of which it is known.

    Args:
        before: A copy of the graph before the edit.
        after: The edited graph.
        mapping: The node of ``before`` for each node of ``after`` that was there before.
        name: What the edit is called in an error.
        may_reorder: Whether collectives may change their order on a group, or on which
            groups. Then the proof names each change.
        constants: What the edit did to tensors that the graph reads by name.
        earlier: ``Proof.values`` of the edit before this one, where ``before`` is a copy
            of what that one left.

    Example:
        >>> from torchspmd.step.graph.snapshot import copy_graph
        >>> graph = fx.symbolic_trace(lambda x, y: (x + 1, y)).graph
        >>> before, mapping = copy_graph(graph)
        >>> print(check_edit(before, graph, mapping))
        proved equal
        >>> graph.output_node().args = (graph.output_node().args[0][:1],)
        >>> try:
        ...     check_edit(before, graph, mapping)
        ... except LegalityError as error:
        ...     print(error)
        the edit would change what the graph computes, and was not taken; 1 problem:
          output: the graph had 2 outputs and has 1; ...
    """
    problems = [Problem("constant", text, _CONSTANTS) for text in constants]
    undefined = check_definitions(after)
    if undefined:  # nothing else can be said of a graph that cannot run
        raise LegalityError(_text(name, [*problems, *undefined]))
    edit = Edit.of(before, after, mapping)
    num_outputs = len(output_values(before))
    interface = check_interface(edit)
    if edit.is_empty and edit.keeps_fakes and not (problems or interface):
        return Proof(num_outputs, ())
    fakes = FakeResults(edit)
    if edit.is_empty and not (problems or interface):
        fakes.write_down()
        return Proof(num_outputs, ())
    problems += [
        *interface,
        *check_waits(edit),
        *check_random_order(edit),
        *check_unknown_calls(edit),
        *check_hazards(edit, fakes.values),
    ]
    values = Equivalence(edit, fakes.values, earlier=earlier)
    moved, declared = check_order(
        edit, values.before.made, values.after.made, may_reorder
    )
    problems += moved
    if interface:  # outputs cannot be compared one by one
        raise LegalityError(_text(name, problems))
    problems += check_output_memory(edit, values.elements)
    unproved, changed = values.compare()
    problems += [*changed, *fakes.problems]
    if unproved and not changed:  # a bucket in another dtype may still lose a gradient
        _, changed = Equivalence(edit, fakes.values, ignores_casts=True).compare()
        problems += changed
    if problems:
        raise LegalityError(_text(name, problems))
    fakes.write_down()
    return Proof(num_outputs, tuple(unproved), tuple(declared), values.after)


def _text(name: str, problems: list[Problem]) -> str:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"  {problem}" for problem in problems[:_MOST]]
    if len(problems) > _MOST:
        lines.append(f"  and {len(problems) - _MOST} more")
    return (
        f"{name} would change what the graph computes, and was not taken; {count}:\n"
        + "\n".join(lines)
    )
