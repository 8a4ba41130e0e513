"""How long the operators of a graph really take, on the ranks that will run it.

Rates of a device say what it can do at best. A step does not: its products are small, its
kernels wait for memory, ranks may share a machine. So forward and backward are run a few
times as they were captured, without their communication, while all ranks do the same.
Nothing is written, and no random number is drawn that the step would draw.
"""

import copy
import json
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from torchspmd import _torch
from torchspmd.comm import Kind, Phase
from torchspmd.errors import UsageError
from torchspmd.step.graph.aliases import is_wait
from torchspmd.step.graph.collectives import axes_of, events_of
from torchspmd.step.graph.cost import (
    CostModel,
    Link,
    computes,
    device_of,
    multiplies,
    operator_key,
)
from torchspmd.step.graph.metadata import owner_of
from torchspmd.step.measure.clock import Stopwatch
from torchspmd.step.progress import phase
from torchspmd.step.rank_agreement import Agreement

# ----------------------------------------------------------------------------
# How fast these ranks really are, for schedules that are chosen by it.

_MIB = 2**20
_SMALL, _LARGE = 2 * _MIB, 32 * _MIB  # bytes of a bucket, and of a large one
_IN_FLIGHT = 4  # collectives at once, as in a backward
_PRODUCTS = 8  # at once: long enough for ranks to be busy at the same time
_TRIES = 5


def measure_cost(
    device: torch.device | str = "cpu",
    *,
    dtype: torch.dtype = torch.float32,
    group: dist.ProcessGroup | None = None,
) -> CostModel:
    """Measure what a ``CostModel`` holds; takes about a second on a fast network.

    All ranks of the world call it at the same point. All get the same numbers, those of
    the slowest: a schedule must not differ between ranks. Two measurements differ a
    little, and so may the buckets that are chosen by them; where runs must agree bit for
    bit on more than two ranks, keep the numbers of the first.

    Args:
        device: Where the model is.
        dtype: What it computes and sends in.
        group: The ranks that reduce gradients together, as this rank knows them; all by
            default. In a world of one, or without one, the figures of the network are
            guesses.

    Example:
        >>> cost = measure_cost("cpu")
        >>> cost.flops > 1e6 and cost.memory_bytes > 1e6
        True
    """
    place = _check(device, dtype, group)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own_rates(place, dtype, None)
    if dist.get_backend(group) == "fake":
        raise UsageError(
            "measure_cost: the ranks of a fake process group send nothing, so there is "
            "nothing to measure. Start real ranks (torchrun), or give a CostModel."
        )
    dist.barrier()  # ranks that share a device or its memory must do so meanwhile
    own = own_rates(place, dtype, group or dist.group.WORLD)
    slowest = torch.tensor(_as_seconds(own), dtype=torch.float64, device=place)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)  # also of the other groups
    return _slowest([slowest.tolist()])


def _check(
    device: torch.device | str, dtype: torch.dtype, group: dist.ProcessGroup | None
) -> torch.device:
    problems = []
    place = torch.device("cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        problems.append(f"device={device!r}: pass a device, such as 'cpu' or 'cuda'")
    if place.type == "cuda" and not torch.cuda.is_available():
        problems.append(
            f"device={device!r}: this process has no CUDA device (torch.cuda."
            "is_available() is False); measure where the model trains, or give a CostModel"
        )
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        problems.append(f"dtype={dtype!r}: pass a floating-point dtype of torch")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        problems.append(f"group={group!r}: pass a ProcessGroup, or None for all ranks")
    if problems:
        raise UsageError("measure_cost: " + "; ".join(problems) + ".")
    return place


def own_rates(
    device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup | None
) -> CostModel:
    """What this rank measures; without a group, guesses for the network."""
    guess = CostModel.for_device(device.type)
    network, latency = guess.network_bytes, guess.latency_seconds
    flops, memory = _compute_rate(device, dtype), _memory_rate(device, dtype)
    launch = _launch_seconds(device)
    if group is not None and dist.get_world_size(group) > 1:
        network, latency = _network(device, dtype, group)
    return CostModel(flops, memory, network, launch, latency)


def _as_seconds(cost: CostModel) -> list[float]:
    rates = (cost.flops, cost.memory_bytes, cost.network_bytes)
    return [*(1 / rate for rate in rates), cost.launch_seconds, cost.latency_seconds]


def _slowest(seconds: Sequence[Sequence[float]]) -> CostModel:
    """The slowest rate of each kind, of ranks that measured ``_as_seconds``.

    >>> _slowest([_as_seconds(CostModel(flops=each)) for each in (2.0, 4.0)]).flops
    2.0
    """
    by_flop, by_byte, by_sent, launch, latency = map(max, zip(*seconds, strict=True))
    return CostModel(1 / by_flop, 1 / by_byte, 1 / by_sent, launch, latency)


def _slowest_links(found: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Link]:
    """The slowest network of each axis, of ranks that measured them.

    >>> _slowest_links([{"dp": (2.0, 0.1)}, {"dp": (4.0, 0.3)}])
    {'dp': Link(network_bytes=2.0, latency_seconds=0.3)}
    """
    return {
        axis: Link(
            min(each[axis][0] for each in found), max(each[axis][1] for each in found)
        )
        for axis in found[0]
    }


def _compute_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second in a matrix product."""
    width = 512 if device.type == "cpu" else 4096
    matrix = torch.ones(width, width, device=device, dtype=dtype)

    def run() -> None:
        for _ in range(_PRODUCTS):
            matrix @ matrix

    return _PRODUCTS * 2 * width**3 / _time(run, device)


def _memory_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Bytes a second that are read and written one by one."""
    size = (16 if device.type == "cpu" else 256) * _MIB
    values = torch.ones(size // dtype.itemsize, device=device, dtype=dtype)
    return 2 * size / _time(lambda: values + 1, device)


def _launch_seconds(device: torch.device) -> float:
    """What the smallest operator takes."""
    one, count = torch.ones(1, device=device), 100

    def run() -> None:
        for _ in range(count):
            one.add_(1)

    return _time(run, device) / count


def _network(
    device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup
) -> tuple[float, float]:
    """Bytes that a rank sends in a second, and what a collective takes besides."""

    def reduce(size: int) -> float:
        tensors = [
            torch.zeros(size // dtype.itemsize, device=device, dtype=dtype)
            for _ in range(_IN_FLIGHT)
        ]

        def run() -> None:
            works = [dist.all_reduce(t, group=group, async_op=True) for t in tensors]
            for work in works:
                if work is not None:
                    work.wait()

        return _time(run, device) / _IN_FLIGHT

    ranks = dist.get_world_size(group)
    sent = 2 * (ranks - 1) / ranks
    small, large = reduce(_SMALL), reduce(_LARGE)
    each = max((large - small) / (_LARGE - _SMALL), 1e-15)
    latency = max(small - _SMALL * each, reduce(dtype.itemsize), 1e-9)
    return sent / each, latency


def _time(run: Callable[[], object], device: torch.device) -> float:
    """The median of some runs, after one that does not count."""
    times = []
    for _ in range(1 + _TRIES):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_ENOUGH = 0.3  # seconds of running
_MOST = 12  # runs, where they are short
_LONG = 1.0  # seconds of one run: no more than one is counted then
_FUSED = 0.6  # of the time of simple operators is left where a compiler fuses them


def measure_graph(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    ranks: Agreement,
    before: CostModel | None = None,
    *,
    fuses: bool = False,
) -> tuple[CostModel, tuple[str, ...]]:
    """What the nodes and collectives of a graph take here; the same on all ranks.

    All ranks of the program that is being built call it at the same point. What is not
    run, such as an update, keeps an estimate from its shapes, corrected by how far such
    estimates are off for the rest.

    Args:
        graph: The captured step.
        inputs: What the step is called with; nothing is written into it.
        ranks: The ranks that build the program.
        before: What was measured for another graph; its rates are kept.
        fuses: Whether a compiler will fuse simple operators, which are run one by one
            here: they count less then.

    Returns:
        The cost, and lines about it.
    """
    with phase("measuring"):
        ranks.share("", "measuring")  # ranks that share a device must do so meanwhile
        own = before or _rates(graph.graph)
        found, notes = time_operators(graph, inputs, ranks)
        texts = ranks.share(json.dumps([_as_seconds(own), own.axes, found]), "measured")
        seconds, links, operators = zip(*map(json.loads, texts), strict=True)
        rates = before or replace(_slowest(seconds), axes=_slowest_links(links))
        times = _means(operators)
        if fuses:
            times = _fused(times, graph.graph)
        cost = replace(rates, operators={**rates.operators, **times})
        cost = cost if before else _corrected(cost, graph.graph)
    return cost, (*notes, _describe(cost, graph.graph))


def time_operators(
    graph: fx.GraphModule, inputs: Sequence[Any], ranks: Agreement
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Seconds of each distinct operator of forward and backward, by its key.

    Empty where they cannot be run, for example for want of memory, with a line that says
    why.
    """
    edited = _without_communication(graph.graph)
    on_stream = any(isinstance(each, torch.Tensor) and each.is_cuda for each in inputs)
    watch = Stopwatch(on_stream)
    keys = _add_clock(edited, watch)
    module = fx.GraphModule(graph, edited)
    devices = [torch.cuda.current_device()] if on_stream else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        problem = _attempt(module, inputs, watch, 1)  # loads kernels
        ranks.share("", "loaded")
        _line_up(graph.graph)
        if problem := problem or _attempt(module, inputs, watch, 1):
            return {}, (problem,)
        seconds = _length(watch.read()[1])
        few = seconds > _LONG or not keys  # nothing to time is nothing to repeat
        more = 0 if few else math.ceil(min(_MOST, _ENOUGH / max(seconds, 1e-6)))
        if problem := _attempt(module, inputs, watch, more):
            return {}, (problem,)
    return _by_key(keys, watch.read()[1:]), ()


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
) -> str:
    """Run it some times; why that could not be done, or nothing."""
    try:
        for _ in range(count):
            watch.begin_run()
            watch.mark(0)
            module(*inputs)
        watch.read()
    except RuntimeError as error:
        return f"not measured: {str(error).splitlines()[0]}"
    return ""


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
    nodes = [node for node in graph.nodes if computes(node)]
    for place, node in enumerate(nodes, 1):
        watch.mark_after(node, place)
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
    axes = {
        axis: _torch.resolve_group(group.name) for axis, group in axes_of(graph).items()
    }
    links = {
        axis: Link(*_network(place, dtype, each))
        for axis, each in axes.items()
        if len(axes) > 1 and each is not None and dist.get_world_size(each) > 1
    }
    return replace(own_rates(place, dtype, group), axes=links)


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


def _describe(cost: CostModel, graph: fx.Graph) -> str:
    counts = Counter(operator_key(node) for node in graph.nodes if computes(node))
    seconds = sum(count * cost.operators.get(key, 0.0) for key, count in counts.items())
    computing = f"forward and backward take {seconds * 1e3:.1f} ms"
    if not seconds:
        computing = (
            "forward and backward could not be run on every rank, estimates count"
        )
    guess = CostModel.for_device(device_of(graph)).network_bytes
    source = " (a guess)" if math.isclose(cost.network_bytes, guess) else ""
    all_links = {"the network": Link(cost.network_bytes, cost.latency_seconds)}
    links = {f"that of {axis}": link for axis, link in cost.axes.items()} or all_links
    told = "; ".join(
        f"{name} sends {link.network_bytes / 1e9:.2f} GB/s, "
        f"{link.latency_seconds * 1e3:.2f} ms for a collective besides"
        for name, link in links.items()
    )
    return f"measured: {computing}; {told}{source}"
