"""How long the operators of a graph really take, on the ranks that will run it.

Rates of a device say what it can do at best. A step does not: its products are small, its
kernels wait for memory, ranks may share a machine. So forward and backward are run a few
times as they were captured, without their communication, while all ranks do the same.
Nothing is written, and no random number is drawn that the step would draw.
"""

import contextlib
import copy
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from torchspmd import _torch
from torchspmd.comm import Kind, Phase
from torchspmd.errors import UsageError
from torchspmd.step.capture.progress import note, phase
from torchspmd.step.graph.clocked import Stopwatch
from torchspmd.step.graph.comm_blocks import is_wait
from torchspmd.step.graph.cost import (
    CostModel,
    computes,
    device_of,
    multiplies,
    operator_key,
)
from torchspmd.step.graph.ledger import events_of
from torchspmd.step.graph.owners import owner_of
from torchspmd.step.measured_cost import own_rates, slowest_of
from torchspmd.step.meeting import share

_ENOUGH = 0.3  # seconds of running
_MOST = 12  # runs, where they are short
_LONG = 1.0  # seconds of one run: no more than one is counted then
_FUSED = 0.6  # of the time of simple operators is left where a compiler fuses them
_RATES = ("flops", "memory_bytes", "network_bytes", "launch_seconds", "latency_seconds")

Inputs = Callable[[], Sequence[Any]]

_inputs: ContextVar[Inputs | None] = ContextVar("inputs", default=None)


@contextlib.contextmanager
def offering(inputs: Inputs) -> Iterator[None]:
    """What runs inside may measure a graph on these inputs."""
    token = _inputs.set(inputs)
    try:
        yield
    finally:
        _inputs.reset(token)


def measure_graph(
    graph: fx.GraphModule, before: CostModel | None = None, *, fuses: bool = False
) -> CostModel:
    """What the nodes and collectives of a graph take here; the same on all ranks.

    All ranks of the program that is being made call it at the same point. What is not
    run, such as an update, keeps an estimate from its shapes, corrected by how far such
    estimates are off for the rest.

    Args:
        graph: The captured step.
        before: What was measured for another graph; its rates are kept.
        fuses: Whether a compiler will fuse simple operators, which are run one by one
            here: they count less then.
    """
    inputs = _inputs.get()
    if inputs is None:
        raise UsageError(
            "GraphModuleTransformation(cost='measure') measures a step while compile "
            "captures it. Elsewhere, give the cost that measure_cost() found."
        )
    with phase("measuring"):
        share("", "measuring")  # ranks that share a device must do so meanwhile
        own = before or _rates(graph.graph)
        found = time_operators(graph, inputs())
        texts = share(json.dumps([_as_dict(own), found]), "measured")
        ranks = [json.loads(text) for text in texts]
        rates = before or slowest_of([CostModel(**each) for each, _ in ranks])
        times = _means([each for _, each in ranks])
        if fuses:
            times = _fused(times, graph.graph)
        measured = replace(rates, operators={**rates.operators, **times})
        cost = measured if before else _corrected(measured, graph.graph)
    _tell(cost, graph.graph)
    return cost


def time_operators(graph: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, float]:
    """Seconds of each distinct operator of forward and backward, by its key.

    Empty where they cannot be run, for example for want of memory.
    """
    edited = _without_communication(graph.graph)
    on_stream = any(isinstance(each, torch.Tensor) and each.is_cuda for each in inputs)
    watch = Stopwatch(on_stream)
    keys = _add_clock(edited, watch)
    module = fx.GraphModule(graph, edited)
    devices = [torch.cuda.current_device()] if on_stream else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        is_able = _attempt(module, inputs, watch, 1)  # loads kernels
        share("", "loaded")
        _line_up(graph.graph)
        if not (is_able and _attempt(module, inputs, watch, 1)):
            return {}
        seconds = _length(watch.read()[1])
        few = seconds > _LONG or not keys  # nothing to time is nothing to repeat
        more = 0 if few else math.ceil(min(_MOST, _ENOUGH / max(seconds, 1e-6)))
        if not _attempt(module, inputs, watch, more):
            return {}
    return _by_key(keys, watch.read()[1:])


def _line_up(graph: fx.Graph) -> None:
    """Let ranks that share a device, and have all come this far, run at the same time."""
    if (found := _reducing(graph)) is not None:
        _, group, place = found
        dist.all_reduce(torch.zeros(1, device=place), group=group)


def _reducing(
    graph: fx.Graph,
) -> tuple[torch.dtype, dist.ProcessGroup | None, torch.device] | None:
    """What gradients are reduced in, by which group and where; None without a network."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    for _, event in events_of(graph):
        if event.kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER):
            dtype: torch.dtype = getattr(torch, event.dtype)
            group = _torch.resolve_group(event.group.name)
            return dtype, group, torch.device(device_of(graph))
    return None


def _attempt(
    module: fx.GraphModule, inputs: Sequence[Any], watch: Stopwatch, count: int
) -> bool:
    """Run it some times; whether that could be done."""
    try:
        for _ in range(count):
            watch.begin_run()
            watch.mark(0)
            module(*inputs)
        watch.read()
    except RuntimeError as error:
        note(f"not measured: {str(error).splitlines()[0]}")
        return False
    return True


def _length(moments: Mapping[int, float]) -> float:
    return max(moments.values()) - min(moments.values())


def _without_communication(graph: fx.Graph) -> fx.Graph:
    """Forward and backward alone; results of collectives are made up."""
    edited = copy.deepcopy(graph)
    for node, _ in list(events_of(edited)):
        node.replace_all_uses_with(_stand_in(edited, node))
        edited.erase_node(node)
    for node in list(edited.nodes):
        if is_wait(node):
            node.replace_all_uses_with(node.all_input_nodes[0])
            edited.erase_node(node)
    kept = [n for n in edited.nodes if n.op == "call_function" and not _updates(n)]
    ends = [n for n in kept if all(map(_updates, n.users))]
    edited.output_node().args = (ends,)
    edited.eliminate_dead_code()
    return edited


def _updates(node: fx.Node) -> bool:
    return node.op == "output" or owner_of(node).phase is Phase.OPTIMIZER


def _stand_in(graph: fx.Graph, start: fx.Node) -> Any:
    """What has the shape of a collective's result: what it sends, or nothing but zeros."""
    sent, value = start.args[0], start.meta.get("val")
    shape = sent.meta["val"].shape if isinstance(sent, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.shape == shape:
        return sent
    options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
    with graph.inserting_before(start):
        made = graph.call_function(torch.zeros, (list(value.shape),), options)
    made.meta = dict(start.meta)
    return made


def _add_clock(graph: fx.Graph, watch: Stopwatch) -> list[str]:
    """Look at the clock behind each operator; their keys, in order."""

    def mark(place: int) -> None:  # a plain function: generated code calls it by name
        watch.mark(place)

    nodes = [node for node in graph.nodes if computes(node)]
    for place, node in enumerate(nodes, 1):
        with graph.inserting_after(node):
            graph.call_function(mark, (place,))
    return [operator_key(node) for node in nodes]


def _by_key(
    keys: Sequence[str], runs: Sequence[Mapping[int, float]]
) -> dict[str, float]:
    """The mean over the nodes of each operator, of the medians over the runs.

    Kernels of two ranks that share a device take turns, so that one run finds an operator
    quick and another one slow. Medians alone would be too short: together they are made
    as long as the median run.
    """
    medians = [
        max(0.0, statistics.median(run[place] - run[place - 1] for run in runs))
        for place in range(1, len(keys) + 1)
    ]
    length = statistics.median(map(_length, runs))
    scale = length / sum(medians) if sum(medians) else 1.0
    times: dict[str, list[float]] = defaultdict(list)
    for key, seconds in zip(keys, medians, strict=True):
        times[key].append(seconds * scale)
    return {key: statistics.fmean(each) for key, each in times.items()}


def _rates(graph: fx.Graph) -> CostModel:
    if (found := _reducing(graph)) is None:
        return CostModel.for_device(device_of(graph))
    dtype, group, place = found
    return own_rates(place, dtype, group)


def _as_dict(cost: CostModel) -> dict[str, float]:
    return {name: getattr(cost, name) for name in _RATES}


def _means(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean time of each operator that all ranks have measured."""
    everywhere = set(found[0]).intersection(*found[1:])
    return {
        key: statistics.fmean(each[key] for each in found) for key in sorted(everywhere)
    }


def _fused(times: Mapping[str, float], graph: fx.Graph) -> dict[str, float]:
    """The times when a compiler has fused what neither multiplies nor convolves."""
    whole = {operator_key(n) for n in graph.nodes if computes(n) and multiplies(n)}
    return {
        key: seconds if key in whole else seconds * _FUSED
        for key, seconds in times.items()
    }


def _corrected(cost: CostModel, graph: fx.Graph) -> CostModel:
    """Rates under which estimates take as long, together, as what was measured."""
    plain = replace(cost, operators={})
    nodes = [
        n for n in graph.nodes if computes(n) and operator_key(n) in cost.operators
    ]
    measured = sum(map(cost.compute_seconds, nodes))
    estimated = sum(map(plain.compute_seconds, nodes))
    if not measured or not estimated:
        return cost
    slower = measured / estimated
    return replace(
        cost, flops=cost.flops / slower, memory_bytes=cost.memory_bytes / slower
    )


def _tell(cost: CostModel, graph: fx.Graph) -> None:
    counts = Counter(operator_key(node) for node in graph.nodes if computes(node))
    seconds = sum(count * cost.operators.get(key, 0.0) for key, count in counts.items())
    computing = f"forward and backward take {seconds * 1e3:.1f} ms"
    if not seconds:
        computing = (
            "forward and backward could not be run on every rank, estimates count"
        )
    guess = CostModel.for_device(device_of(graph)).network_bytes
    source = " (a guess)" if math.isclose(cost.network_bytes, guess) else ""
    note(
        f"measured: {computing}; the network sends {cost.network_bytes / 1e9:.2f} GB/s, "
        f"{cost.latency_seconds * 1e3:.2f} ms for a collective besides{source}"
    )
