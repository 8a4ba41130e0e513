"""Run a program for N ranks in one process: the public way in to virtual ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.errors import UsageError
from torchspmd.step.graph.metadata import written_state
from torchspmd.step.graph.options import check_integers
from torchspmd.step.virtual.inputs import Inputs, in_layout_of
from torchspmd.step.virtual.ranks import (
    DEFAULT_SIZE,
    Graphs,
    RankLayout,
    VirtualRanks,
    graphs_of,
    lay_out,
)

# ----------------------------------------------------------------------------
# Ranks and inputs of virtual runs, checked before anything runs.


def check_ranks(what: str, ranks: Any) -> None:
    """Refuse what is neither a number of ranks nor one for each axis."""
    if isinstance(ranks, Mapping):
        for axis, size in ranks.items():
            check_integers(what, **{f"ranks[{axis!r}]": (size, 1)})
        return
    check_integers(what, ranks=(ranks, 1))


def check_inputs(what: str, graph: fx.Graph, inputs: Any) -> None:
    """Refuse flat inputs that are not as many as the graph takes."""
    wanted = len(graph.find_nodes(op="placeholder"))
    if inputs is None or callable(inputs):
        return
    found = len(inputs) if isinstance(inputs, (list, tuple)) else None
    if found != wanted:
        shown = type(inputs).__name__ + ("" if found is None else f" of {found}")
        raise UsageError(
            f"{what}(inputs={shown}): the graph takes {wanted} inputs. Pass a list or "
            "tuple with one value for each placeholder, in their order, a function of "
            "step and rank that returns it, or None to have values made up."
        )


__all__ = ["VirtualRanks", "VirtualRun", "next_inputs", "run_virtual", "with_state"]

InputSource = Callable[[int, int], Sequence[Any]]  # (step, rank) -> flat inputs


@dataclass(frozen=True, slots=True)
class VirtualRun:
    """What a program gave on virtual ranks.

    Attributes:
        layout: The virtual ranks and their axes.
        order: In which order reductions added.
        outputs: What the graph returned, by step, then rank, then output.
        inputs: What a further step would take in, by rank: the state after the last one.
    """

    layout: RankLayout
    order: str
    outputs: tuple[list[list[Any]], ...]
    inputs: list[list[Any]]


def run_virtual(
    program: Graphs,
    ranks: int | Mapping[str, int] = DEFAULT_SIZE,
    *,
    order: str = "rank",
    steps: int = 1,
    inputs: Sequence[Any] | InputSource | None = None,
    seed: int = 0,
) -> VirtualRun:
    """Run a program for N ranks in this process, in lockstep, for several steps.

    All ranks run the same graph unless a list of graphs is given, one for each rank.
    Constants in a graph are those of the rank that captured it (where its shard begins,
    the size of its group): for the numbers of a real run take as many ranks, and the
    graphs of all ranks where they differ.

    Args:
        program: A program of a compiled step, a graph module or a graph.
        ranks: How many along each axis whose size the graph leaves open, one number or by
            axis; an all-gather, reduce-scatter or all-to-all fixes its axis.
        order: In which order reductions add: ``rank``, ``ring`` (gloo's) or ``tree``.
        steps: How often to run; new values of state go into the next step.
        inputs: Flat inputs of a real call, which other ranks vary; or a function of step
            and rank that gives them exactly; or None to make them up. After step 0 state
            comes from the step before.
        seed: For inputs that are made up and for random operators.

    Example:
        >>> import torch
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> gather = torch.ops._c10d_functional.all_gather_into_tensor.default
        >>> wait = torch.ops._c10d_functional.wait_tensor.default
        >>> whole = graph.call_function(
        ...     wait, (graph.call_function(gather, (x, 2, "0")),)
        ... )
        >>> output = graph.output([whole])
        >>> run = run_virtual(graph, inputs=lambda step, rank: [torch.tensor([rank])])
        >>> [value.tolist() for (value,) in run.outputs[0]]
        [[0, 1], [0, 1]]
    """
    check_ranks("run_virtual", ranks)
    check_integers("run_virtual", steps=(steps, 1), seed=(seed, None))
    (graph, *_) = graphs_of(program)
    check_inputs("run_virtual", graph, inputs)
    layout = lay_out(graph, ranks)
    virtual = VirtualRanks(layout, order=order, seed=seed)
    source = inputs if callable(inputs) else Inputs(graph, layout, inputs, seed).at
    state: list[list[Any]] | None = None
    outputs = []
    for step in range(steps):
        given = [list(source(step, rank)) for rank in range(layout.size)]
        given = given if state is None else with_state(graph, given, state)
        results = virtual.run(program, given)
        state = next_inputs(graph, given, results)
        outputs.append(list(map(_kept, results, given, state)))
    return VirtualRun(layout, order, tuple(outputs), state or [])


def _kept(results: list[Any], given: list[Any], state: list[Any]) -> list[Any]:
    """Outputs of a rank that no later step writes into: none lies where an input does."""
    inputs = filter(_has_storage, (*given, *state))
    taken = {_torch.storage_key(each) for each in inputs}
    return [
        in_layout_of(value, value)
        if _has_storage(value) and _torch.storage_key(value) in taken
        else value
        for value in results
    ]


def _has_storage(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def next_inputs(
    graph: fx.Graph, given: list[list[Any]], results: list[list[Any]]
) -> list[list[Any]]:
    """The inputs of the next step: new values of state in the layout of old ones."""
    places = {node: n for n, node in enumerate(graph.find_nodes(op="placeholder"))}
    following = [list(values) for values in given]
    for index, node in written_state(graph).items():
        for values, result in zip(following, results, strict=True):
            if result[index] is not None:
                place = places[node]
                values[place] = _stored(values[place], result[index])
    return following


def _stored(held: Any, new: Any) -> Any:
    """What a state is after its new value was written where the old one lies."""
    if not isinstance(held, torch.Tensor) or not isinstance(new, torch.Tensor):
        return new
    if held.layout is not torch.strided or new.layout is not torch.strided:
        return new
    is_alike = held.stride() == new.stride() and held.dtype == new.dtype
    return new if is_alike or held.shape != new.shape else in_layout_of(held, new)


def with_state(
    graph: fx.Graph, given: list[list[Any]], state: list[list[Any]]
) -> list[list[Any]]:
    """Inputs of a step with the state that the step before left."""
    written = set(written_state(graph).values())
    is_state = [node in written for node in graph.find_nodes(op="placeholder")]
    return [
        [s if keep else g for g, s, keep in zip(fresh, kept, is_state, strict=True)]
        for fresh, kept in zip(given, state, strict=True)
    ]
