"""Whether a run with work moved to the next iteration gives what a plain run gives."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from torchspmd.errors import VirtualRanksError
from torchspmd.step.graph.roles import output_values
from torchspmd.step.iterate.forms import creates_state
from torchspmd.step.iterate.iter_graph import IterGraph
from torchspmd.step.iterate.pipeline import Stage, derive
from torchspmd.step.virtual.collectives import Started
from torchspmd.step.virtual.differences import digest
from torchspmd.step.virtual.ranks import VirtualRanks
from torchspmd.step.virtual.run import next_inputs, with_state

Outputs = list[list[Any]]  # by rank and output; None where a form gives none
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
) -> list[Outputs]:
    """The outputs of each step: a first one, steady ones and a last one."""
    pipeline = derive(graph, graph.regions)
    forms = [pipeline.first, *[pipeline.steady] * (steps - 2), pipeline.last]
    carried: list[list[Any]] = [[] for _ in range(ranks.size)]
    state: list[list[Any]] | None = None
    found = []
    for step, form in enumerate(forms):
        given = inputs(step)
        given = given if state is None else with_state(graph, given, state)
        taken = [[*own, *left] for own, left in zip(given, carried, strict=True)]
        # Work that is left for the next step may be on its way.
        values = ranks.run(form.graph, taken, constants=constants, keep_started=True)
        outputs = [_placed(form, row, pipeline.num_outputs) for row in values]
        carried = [row[len(form.outputs) :] for row in values]
        state = next_inputs(graph, given, outputs)
        found.append(outputs)
    return found


def differing_outputs(
    graph: IterGraph, plain: Sequence[Outputs], pipelined: Sequence[Outputs]
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
                if digest(value) != digest(plain[from_step][rank][index]):
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
