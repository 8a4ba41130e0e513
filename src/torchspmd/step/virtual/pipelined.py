"""Whether a run with work moved to the next iteration gives what a plain run gives."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from torchspmd.errors import VirtualRanksError
from torchspmd.step.graph.roles import output_values
from torchspmd.step.graph.snapshot import copy_graph
from torchspmd.step.iterate.forms import creates_state
from torchspmd.step.iterate.iter_graph import IterGraph
from torchspmd.step.iterate.owed import Marks
from torchspmd.step.iterate.pipeline import Stage, derive
from torchspmd.step.virtual.collectives import Started
from torchspmd.step.virtual.differences import digest
from torchspmd.step.virtual.ranks import VirtualRanks
from torchspmd.step.virtual.run import next_inputs, with_state

Digests = list[list[str]]  # by rank and output
InputsOf = Callable[[int], list[list[Any]]]  # step -> by rank and placeholder


def is_pipelined(graph: fx.Graph) -> bool:
    """Whether a graph is run in several forms."""
    return (
        isinstance(graph, IterGraph)
        and bool(graph.regions)
        and not creates_state(graph)
    )


def run_pipelined(
    ranks: VirtualRanks,
    graph: IterGraph,
    inputs: InputsOf,
    steps: int,
    constants: object,
    running: Mapping[str, fx.Graph] | None = None,
) -> Iterator[Digests]:
    """What each step gives: a first one, steady ones and a last one.

    Args:
        ranks: The virtual ranks.
        graph: One iteration and its marks.
        inputs: What each step takes.
        steps: How many.
        constants: The module that holds the constants of the graphs.
        running: What is run in the place of derived graphs, by form.
    """
    pipeline = derive(graph, graph.regions)
    names = ["first", *["steady"] * (steps - 2), "last"]
    carried: list[list[Any]] = [[] for _ in range(ranks.size)]
    state: list[list[Any]] | None = None
    for step, name in enumerate(names):
        form: Stage = getattr(pipeline, name)
        run = (running or {}).get(name, form.graph)
        given = inputs(step)
        given = given if state is None else with_state(graph, given, state)
        taken = [[*own, *left] for own, left in zip(given, carried, strict=True)]
        # Work that is left for the next step may be on its way.
        values = ranks.run(run, taken, constants=constants, keep_started=True)
        outputs = [_placed(form, row, pipeline.num_outputs) for row in values]
        carried = [row[len(form.outputs) :] for row in values]
        state = next_inputs(graph, given, outputs)
        yield digests_of(outputs)  # now: a later step may write into them


def digests_of(outputs: list[list[Any]]) -> Digests:
    """What is compared of the outputs of a step."""
    return [list(map(digest, row)) for row in outputs]


def without_marks(graph: fx.Graph, marks: Marks) -> fx.Graph:
    """A copy that does not tell how far it has come: only real steps are asked that."""
    copy, _ = copy_graph(graph)
    for node in list(copy.nodes):
        if node.target in (marks.begin, marks.end):
            copy.erase_node(node)
    return copy


def differing_outputs(
    graph: IterGraph, plain: Sequence[Digests], pipelined: Sequence[Digests]
) -> list[int]:
    """Outputs with other bits; what was moved comes a step later, except at the end."""
    moved = {name for region in graph.regions for name in region.nodes}
    is_late = [
        isinstance(value, fx.Node) and value.name in moved
        for value in output_values(graph)
    ]
    last = len(plain) - 1
    found = set()
    for step, ranks in enumerate(pipelined):
        for rank, outputs in enumerate(ranks):
            for index, value in enumerate(outputs):
                from_step = step - 1 if is_late[index] and step < last else step
                if from_step < 0:
                    continue
                if value != plain[from_step][rank][index]:
                    found.add(index)
    return sorted(found)


def _placed(form: Stage, values: list[Any], num_outputs: int) -> list[Any]:
    outputs: list[Any] = [None] * num_outputs
    for place, value in zip(form.outputs, values, strict=False):
        if isinstance(value, Started) and not value.is_done:
            raise VirtualRanksError(
                f"virtual ranks: output {place} is a result that nobody has waited for."
            )
        outputs[place] = value.value if isinstance(value, Started) else value
    return outputs
