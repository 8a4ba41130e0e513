"""Run a program for N ranks in one process: the public way in to virtual ranks."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import Kind
from torchspmd.errors import UsageError, VirtualRanksError
from torchspmd.step.capture.inventory import Role
from torchspmd.step.deferral.forms import Stage, creates_state, derive
from torchspmd.step.deferral.iter_graph import IterGraph
from torchspmd.step.deferral.module import Marks
from torchspmd.step.graph.aliases import is_view, operator_of
from torchspmd.step.graph.argument_checks import check_integers
from torchspmd.step.graph.memory import ROLE_KEY
from torchspmd.step.graph.metadata import written_state
from torchspmd.step.graph.snapshot import copy_graph
from torchspmd.step.virtual.collectives import InFlight
from torchspmd.step.virtual.ranks import (
    DEFAULT_SIZE,
    Graphs,
    RankLayout,
    VirtualRanks,
    collective,
    graphs_of,
    lay_out,
)

__all__ = ["VirtualRanks", "VirtualRun", "next_inputs", "run_virtual", "with_state"]

InputSource = Callable[[int, int], Sequence[Any]]  # (step, rank) -> flat inputs
StepWatcher = Callable[[int, int, fx.Node, Any], None]  # (step, rank, node, its value)


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
    _check_ranks(ranks)
    check_integers("run_virtual", steps=(steps, 1), seed=(seed, None))
    (graph, *_) = graphs_of(program)
    _check_inputs(graph, inputs)
    layout = lay_out(graph, ranks)
    virtual = VirtualRanks(layout, order=order, seed=seed)
    source = inputs if callable(inputs) else Inputs(graph, layout, inputs, seed).at
    outputs: list[list[list[Any]]] = []
    state: list[list[Any]] = []
    for given, results, state in run_steps(virtual, program, source, steps):
        outputs.append(list(map(_kept, results, given, state)))
    return VirtualRun(layout, order, tuple(outputs), state)


def _check_ranks(ranks: Any) -> None:
    """Refuse what is neither a number of ranks nor one for each axis."""
    if isinstance(ranks, Mapping):
        for axis, size in ranks.items():
            check_integers("run_virtual", **{f"ranks[{axis!r}]": (size, 1)})
        return
    check_integers("run_virtual", ranks=(ranks, 1))


def _check_inputs(graph: fx.Graph, inputs: Any) -> None:
    """Refuse flat inputs that are not as many as the graph takes."""
    wanted = len(graph.find_nodes(op="placeholder"))
    if inputs is None or callable(inputs):
        return
    found = len(inputs) if isinstance(inputs, (list, tuple)) else None
    if found != wanted:
        shown = type(inputs).__name__ + ("" if found is None else f" of {found}")
        raise UsageError(
            f"run_virtual(inputs={shown}): the graph takes {wanted} inputs. Pass a list or "
            "tuple with one value for each placeholder, in their order, a function of "
            "step and rank that returns it, or None to have values made up."
        )


class Step(NamedTuple):
    """One step of all ranks: what they took, gave, and would take next."""

    given: list[list[Any]]
    results: list[list[Any]]
    state: list[list[Any]]


def run_steps(
    ranks: VirtualRanks,
    program: Graphs,
    inputs: InputSource,
    steps: int,
    *,
    constants: object = None,
    watch: StepWatcher | None = None,
) -> Iterator[Step]:
    """Run a program step by step; new values of state go into the next step.

    Args:
        ranks: The virtual ranks.
        program: A program, a graph module or a graph.
        inputs: What a rank takes at a step; after step 0 state is that of the step before.
        steps: How many.
        constants: The module that holds the constants of a graph that has no module.
        watch: Called with the step, the rank, the node and its value, for each node.
    """
    (graph, *_) = graphs_of(program)
    state: list[list[Any]] | None = None
    for step in range(steps):
        given = [list(inputs(step, rank)) for rank in range(ranks.size)]
        given = given if state is None else with_state(graph, given, state)
        watcher = None if watch is None else partial(watch, step)
        results = ranks.run(program, given, constants=constants, watch=watcher)
        state = next_inputs(graph, given, results)
        yield Step(given, results, state)


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


# ----------------------------------------------------------------------------
# A run with work moved to the next iteration.


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
    inputs: InputSource,
    steps: int,
    constants: object,
    running: Mapping[str, fx.Graph] | None = None,
) -> Iterator[list[list[Any]]]:
    """What each step gives: a first one, steady ones and a last one.

    Args:
        ranks: The virtual ranks.
        graph: One iteration and its marks.
        inputs: What a rank takes at a step.
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
        given = [list(inputs(step, rank)) for rank in range(ranks.size)]
        given = given if state is None else with_state(graph, given, state)
        taken = [[*own, *left] for own, left in zip(given, carried, strict=True)]
        # Work that is left for the next step may be on its way.
        values = ranks.run(run, taken, constants=constants, keep_started=True)
        outputs = [_placed(form, row, pipeline.num_outputs) for row in values]
        carried = [row[len(form.outputs) :] for row in values]
        state = next_inputs(graph, given, outputs)
        yield outputs  # to be read now: a later step may write into them


def without_marks(graph: fx.Graph, marks: Marks) -> fx.Graph:
    """A copy without the marks of progress, which only real steps report."""
    copy, _ = copy_graph(graph)
    for node in list(copy.nodes):
        if node.target in (marks.begin, marks.end):
            copy.erase_node(node)
    return copy


def _placed(form: Stage, values: list[Any], num_outputs: int) -> list[Any]:
    outputs: list[Any] = [None] * num_outputs
    for place, value in zip(form.outputs, values, strict=False):
        if isinstance(value, InFlight) and not value.is_done:
            raise VirtualRanksError(
                f"virtual ranks: output {place} is a result that was not waited for."
            )
        outputs[place] = value.value if isinstance(value, InFlight) else value
    return outputs


# ----------------------------------------------------------------------------
# What virtual ranks work on: equal state, batches of their own.
#
# From a real call, rank 0 has the call's values; another rank's batch has the same numbers
# in another order, floats scaled, so that indices stay valid and sums differ between ranks.

_PLACES = 1_000_003  # spreads seeds: no two of steps, ranks and inputs share one


class Inputs:
    """The inputs of each virtual rank at each step.

    Args:
        graph: One rank's program.
        layout: The virtual ranks.
        call: Flat inputs of a real call; values are made up from shapes without.
        seed: Decides what is made up.
    """

    def __init__(
        self,
        graph: fx.Graph,
        layout: RankLayout,
        call: Sequence[Any] | None = None,
        seed: int = 0,
    ) -> None:
        self._layout, self._seed = layout, seed
        placeholders = graph.find_nodes(op="placeholder")
        state = set(written_state(graph).values())
        if call is None:
            call = [
                _make_up(node, node in state, seed + place)
                for place, node in enumerate(placeholders)
            ]
        self._base = list(call)
        self._spread = [_spread(layout, node, node in state) for node in placeholders]

    def at(self, step: int, rank: int) -> list[Any]:
        """The inputs of one rank; tensors of their own, which a graph may write into."""
        return [self._value(index, step, rank) for index in range(len(self._base))]

    def _value(self, index: int, step: int, rank: int) -> Any:
        base, axes = self._base[index], self._spread[index]
        if not isinstance(base, torch.Tensor):
            return base
        number = 0  # of the ranks and steps that hold other values
        for axis in axes:
            place = self._layout.coordinates(rank)[axis]
            number = number * self._layout.axes[axis].size + place
        if len(axes) == len(self._layout.axes):  # a batch, another one at each step
            number += step * self._layout.size
        if number == 0:
            return in_layout_of(base, base.detach())
        return _vary(base.detach(), self._seed + number * _PLACES + index)


def _spread(layout: RankLayout, node: fx.Node, is_state: bool) -> tuple[int, ...]:
    """The axes along which ranks hold other values of an input; none for equal ones.

    Batches differ everywhere; state only where it is a shard that the graph gathers.
    """
    role = node.meta.get(ROLE_KEY)
    if role == Role.INPUT.value or (role is None and not is_state):
        return tuple(range(len(layout.axes)))
    return _gathered_over(layout, node)


# Besides views: operators that hand on what they take.
_PASSED_ON = frozenset(
    f"aten::{name}" for name in ("_to_copy", "cat", "clone", "constant_pad_nd")
)


def _gathered_over(layout: RankLayout, node: fx.Node) -> tuple[int, ...]:
    """The axes over which a placeholder is gathered, through views and copies."""
    waiting = list(node.users)
    while waiting:
        user = waiting.pop()
        found = collective(user)
        if found is not None and found[0].kind is Kind.ALL_GATHER:
            return layout.groups[found[1]["group_name"]]
        target = operator_of(user)
        is_copy = target is not None and _torch.packet_name(target) in _PASSED_ON
        if is_copy or is_view(user):
            waiting += list(user.users)
    return ()


def _vary(base: torch.Tensor, seed: int) -> torch.Tensor:
    """The same numbers in another order, floats scaled by a half to three halves."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(base.numel(), generator=generator).to(base.device)
    varied = base.reshape(-1)[order].reshape(base.shape)
    if base.is_floating_point():
        scale = torch.rand(base.shape, generator=generator, dtype=torch.float64) + 0.5
        varied = (varied * scale.to(base.device)).to(base.dtype)
    return in_layout_of(base, varied)


def in_layout_of(held: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A copy of values with the strides and the dtype of the tensor that holds them.

    Kernels choose by strides: a value in another layout may give other bits.

    >>> in_layout_of(torch.zeros(2, 4)[:, ::2], torch.ones(2, 2)).stride()
    (4, 2)
    """
    if held.layout is not torch.strided:
        return values.clone()
    pairs = zip(held.shape, held.stride(), strict=True)
    if any(size > 1 and step == 0 for size, step in pairs):
        return values.to(held.dtype, copy=True)  # nothing can be written there
    made = torch.empty_strided(
        held.shape, held.stride(), dtype=held.dtype, device=held.device
    )
    return made.copy_(values)


def _make_up(node: fx.Node, is_state: bool, seed: int) -> Any:
    """A value for a placeholder, from the shape and dtype in its metadata."""
    meta = node.meta.get("val")
    if meta is None:
        raise UsageError(
            f"virtual ranks: {node.name} has no shape in its metadata to make a value "
            "from. Pass inputs=."
        )
    if not isinstance(meta, torch.Tensor):
        return _torch.number_hint(meta)
    generator = torch.Generator().manual_seed(seed)
    shape = tuple(map(_torch.size_hint, meta.shape))
    if meta.is_floating_point():
        if is_state or node.meta.get(ROLE_KEY) not in (None, Role.INPUT.value):
            # Not negative and not zero: it may be a variance or a counter.
            values = 0.1 + torch.rand(shape, generator=generator) / math.sqrt(10)
            values = torch.ones(()) if not shape else values
        else:
            values = torch.randn(shape, generator=generator)
    else:
        values = torch.randint(0, 2, shape, generator=generator)
    made = torch.empty_strided(
        shape,
        tuple(map(_torch.size_hint, meta.stride())),
        dtype=meta.dtype,
        device=meta.device,
    )
    return made.copy_(values)
