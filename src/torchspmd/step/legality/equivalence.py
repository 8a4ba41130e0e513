"""Whether two graphs compute the same outputs, shown on values (translation validation).

Both graphs run over values in one table; what a pass does to pack, reduce and unpack
tensors has one form, and all other operators stand for themselves. An output is proved
equal where both graphs give it the same value.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from torchspmd import _torch
from torchspmd.step.graph.aliases import operator_of
from torchspmd.step.graph.roles import output_values, readable_name, written_state
from torchspmd.step.legality.edit import Edit, Problem
from torchspmd.step.legality.interfaces import output_name
from torchspmd.step.legality.symbolic.call import Fakes
from torchspmd.step.legality.symbolic.divergence import Comparer, Divergence
from torchspmd.step.legality.symbolic.evaluate import Evaluation
from torchspmd.step.legality.symbolic.table import Flat, ValueTable

_SHOWN = 3  # names in one line
_SAME = "A pass may move and regroup work; each output must stay the same value."
_SHAPES = "A bucket is taken apart as it was put together."
_WRITES = "Only the next value of an input may be written into it."


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was shown about the outputs of two graphs.

    Attributes:
        num_outputs: How many outputs there are.
        unproved: The names of outputs of which nothing is certain.
        problems: Outputs that certainly changed.
    """

    num_outputs: int
    unproved: tuple[str, ...]
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two nodes that must hold the same, and the place of the output that they are."""

    was: fx.Node
    now: fx.Node
    place: int | None = None


class Equivalence:
    """The values of a graph before and after an edit.

    Args:
        edit: The edit.
        fakes: What the nodes of the edited graph give, without values; by default as it
            is written down.
        ignores_casts: Take a collective in another dtype for the same.
    """

    def __init__(
        self, edit: Edit, fakes: Fakes | None = None, ignores_casts: bool = False
    ) -> None:
        self._edit = edit
        self.table = ValueTable(ignores_casts)
        draws = {node: ("draw", i) for i, node in enumerate(random_nodes(edit.before))}
        again = {
            node: draws.get(edit.old.get(node), ("new draw", i))  # type: ignore[arg-type]
            for i, node in enumerate(random_nodes(edit.after))
        }
        self.before = Evaluation(self.table, edit.before, draws)
        self.after = Evaluation(self.table, edit.after, again, fakes)

    def elements(self, node: fx.Node) -> Hashable:
        """Which elements of which values a node of the edited graph holds."""
        value = self.after.value(node)
        found = self.table[value]
        return found.segments if isinstance(found, Flat) else value

    def compare(self) -> Comparison:
        """Compare all outputs, and what is written into inputs."""
        comparer: Comparer | None = None
        unproved: list[str] = []
        changed: dict[Divergence, list[_Pair]] = {}
        for pair in [*self._outputs(), *self._writes()]:
            was, now = self.before.value(pair.was), self.after.value(pair.now)
            if was == now:
                continue
            comparer = comparer or Comparer(self.table, self._values_before())
            found = comparer.compare(was, now)
            if found is None:
                continue
            if found.is_certain:
                changed.setdefault(found, []).append(pair)
            else:
                unproved.append(self._name(pair))
        problems = [self._problem(found, pairs) for found, pairs in changed.items()]
        problems += [*self._unasked_writes(), *self._impossible()]
        num_outputs = len(output_values(self._edit.before))
        return Comparison(num_outputs, tuple(unproved), tuple(problems))

    def _outputs(self) -> Iterator[_Pair]:
        old, new = (output_values(g) for g in (self._edit.before, self._edit.after))
        for place, (was, now) in enumerate(zip(old, new, strict=True)):
            if isinstance(was, fx.Node) and isinstance(now, fx.Node):
                yield _Pair(was, now, place)

    def _writes(self) -> Iterator[_Pair]:
        """Inputs that both graphs write into; those that only one does are states."""
        for was, now in self._placeholders():
            written = self.before.value(was) != self.before.made(was)
            if written and self.after.value(now) != self.after.made(now):
                yield _Pair(was, now)

    def _name(self, pair: _Pair) -> str:
        if pair.place is None:
            return f"what is left in {readable_name(pair.was)}"
        return output_name(self._edit.before, pair.place)

    def _unasked_writes(self) -> Iterator[Problem]:
        """Writes into an input that are new, or gone, and no state's next value."""
        outputs = output_values(self._edit.after)
        state = {
            holder: outputs[place]
            for place, holder in written_state(self._edit.after).items()
        }
        for was, now in self._placeholders():
            old, new = self.before.value(was), self.after.value(now)
            writes = old != self.before.made(was), new != self.after.made(now)
            if writes == (False, True):
                value = state.get(now)
                if isinstance(value, fx.Node) and self.after.value(value) == new:
                    continue
                text = f"the graph now writes into its input {readable_name(now)}"
                writer = self.after.writers.get(new)
                by = f", with {readable_name(writer)}" if writer else ""
                yield Problem("state", text + by, _WRITES)
            elif writes == (True, False):
                text = f"the write into the input {readable_name(now)} is gone"
                yield Problem("state", text, _WRITES)

    def _impossible(self) -> Iterator[Problem]:
        """Nodes that could run before and cannot run now."""
        for node, what in self.after.impossible.items():
            if self._edit.old.get(node) in self.before.impossible:
                continue
            sources = ", ".join(map(readable_name, node.all_input_nodes[:_SHOWN]))
            text = f"{readable_name(node)} takes {what} from {sources}"
            yield Problem("shape", text, _SHAPES)

    def _placeholders(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        graphs = self._edit.before, self._edit.after
        yield from zip(*(g.find_nodes(op="placeholder") for g in graphs), strict=True)

    def _values_before(self) -> list[int]:
        nodes = [node for node in self._edit.before.nodes if node.op != "output"]
        made = [self.before.made(node) for node in nodes]
        return made + [self.before.value(node) for node in nodes]

    @cached_property
    def _makers(self) -> tuple[dict[int, fx.Node], dict[int, fx.Node]]:
        before = _makers(self._edit.before, self.before)
        return before, _makers(self._edit.after, self.after)

    def _problem(self, found: Divergence, pairs: list[_Pair]) -> Problem:
        makers_before, makers_after = self._makers
        before = makers_before.get(found.was, pairs[0].was)
        # A value may have no node of its own any more.
        elsewhere = makers_before.get(found.now, pairs[0].now)
        after = makers_after.get(found.now, elsewhere)
        names = [self._name(pair) for pair in pairs[:_SHOWN]]
        more = f" and {len(pairs) - _SHOWN} more" if len(pairs) > _SHOWN else ""
        text = (
            f"{', '.join(names)}{more}: {found.what}: {readable_name(before)} stood "
            f"where {readable_name(after)} stands now"
        )
        return Problem("value", text, _SAME)


def _makers(graph: fx.Graph, values: Evaluation) -> dict[int, fx.Node]:
    """The first node that computes each value, or a tensor that holds it."""
    makers = dict(values.writers)
    made = [(values.made(node), node) for node in graph.nodes if node.op != "output"]
    for value, node in made:
        makers.setdefault(value, node)
    for value, node in [*made, *values.writers.items()]:
        found = values.table[value]
        for segment in found.segments if isinstance(found, Flat) else ():
            makers.setdefault(segment.atom, node)
    return makers


def random_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that take random numbers, in order."""
    return [
        node
        for node in graph.nodes
        if (target := operator_of(node)) is not None
        and _torch.signature_of(target).draws
    ]
