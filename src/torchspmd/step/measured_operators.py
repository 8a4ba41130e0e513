"""How long the operators of a graph really take, on the ranks that will run it.

Rates of a device say what it can do at best. A step does not: its products are small, its
kernels wait for memory, ranks may share a machine. Each distinct operator of the graph is
run by itself, on numbers of its own, while all ranks do the same.
"""

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from torchspmd import _torch
from torchspmd.comm import Kind, Phase
from torchspmd.step.capture.progress import note, phase
from torchspmd.step.graph.cost import CostModel, computes, device_of, operator_key
from torchspmd.step.graph.ledger import events_of
from torchspmd.step.graph.owners import owner_of
from torchspmd.step.measured_cost import own_rates, slowest_of, synchronize
from torchspmd.step.meeting import share

_SECONDS = 10.0  # for all operators together
_ENOUGH, _LONG = 5e-3, 2e-2  # seconds of one operator over and over; no repetition
_MOST_RUNS, _TRIES = 20, 3
_HOST_BYTES = 2 * 2**30
_RATES = ("flops", "memory_bytes", "network_bytes", "launch_seconds", "latency_seconds")


def measure_graph(graph: fx.GraphModule, before: CostModel | None = None) -> CostModel:
    """What the nodes and collectives of a graph take here; the same on all ranks.

    All ranks of the program that is being made call it at the same point. An operator that
    cannot be run by itself keeps an estimate from its shapes, corrected by how far such
    estimates are off for the others.

    Args:
        graph: The captured step.
        before: What was measured for another graph; its rates are kept.
    """
    with phase("measuring"):
        share("", "measuring")  # ranks that share a device must do so meanwhile
        own = before or _rates(graph.graph)
        found = time_operators(graph.graph, own.operators)
        texts = share(json.dumps([_as_dict(own), found]), "measured")
        ranks = [json.loads(text) for text in texts]
        rates = before or slowest_of([CostModel(**each) for each, _ in ranks])
        times = _slowest([each for _, each in ranks])
        measured = replace(rates, operators={**rates.operators, **times})
        cost = measured if before else _corrected(measured, graph.graph)
    note(
        f"measured: {len(cost.operators)} operators; the network sends "
        f"{cost.network_bytes / 1e9:.2f} GB/s, {cost.latency_seconds * 1e3:.2f} ms for a "
        "collective besides"
    )
    return cost


def time_operators(graph: fx.Graph, known: Collection[str] = ()) -> dict[str, float]:
    """Seconds of each distinct operator that can be run by itself, by its key."""
    distinct = {operator_key(node): node for node in graph.nodes if _can_run(node)}
    end = time.monotonic() + _SECONDS
    found = {}
    for key, node in distinct.items():
        if key in known or time.monotonic() > end:
            continue
        seconds = _time_node(node)
        if seconds is not None:
            found[key] = seconds
    if device_of(graph) == "cuda":
        torch.cuda.empty_cache()  # the step has other sizes
    return found


def _rates(graph: fx.Graph) -> CostModel:
    place = torch.device(device_of(graph))
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return CostModel.for_device(place.type)
    for _, event in events_of(graph):
        if event.kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER):
            dtype = getattr(torch, event.dtype)
            return own_rates(place, dtype, _torch.resolve_group(event.group.name))
    return CostModel.for_device(place.type)


def _as_dict(cost: CostModel) -> dict[str, float]:
    return {name: getattr(cost, name) for name in _RATES}


def _slowest(found: list[Mapping[str, float]]) -> dict[str, float]:
    """The longest time of each operator that all ranks have measured."""
    everywhere = set(found[0]).intersection(*found[1:])
    return {key: max(each[key] for each in found) for key in sorted(everywhere)}


def _corrected(cost: CostModel, graph: fx.Graph) -> CostModel:
    """Rates under which estimates take as long, together, as what was measured."""
    plain = replace(cost, operators={})
    counts = Counter(operator_key(n) for n in graph.nodes if computes(n))
    nodes = {operator_key(n): n for n in graph.nodes if computes(n)}
    known = [key for key in cost.operators if key in nodes]
    measured = sum(counts[key] * cost.operators[key] for key in known)
    estimated = sum(counts[key] * plain.compute_seconds(nodes[key]) for key in known)
    if not measured or not estimated:
        return cost
    slower = measured / estimated
    return replace(
        cost, flops=cost.flops / slower, memory_bytes=cost.memory_bytes / slower
    )


def _can_run(node: fx.Node) -> bool:
    """Whether any numbers will do: an index could point anywhere, an update is no use."""
    if not computes(node) or owner_of(node).phase is Phase.OPTIMIZER:
        return False
    operator: Any = node.target
    if operator.namespace != "aten" or _torch.written_arguments(operator):
        return False
    if _torch.draws_random_numbers(operator, node.args, node.kwargs):
        return False
    leaves = _leaves((node.args, node.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not tensors or any(isinstance(leaf, torch.SymInt) for leaf in leaves):
        return False
    return all(map(_is_plain, tensors)) and _fits([*tensors, *_leaves(node)])


def _is_plain(tensor: torch.Tensor) -> bool:
    is_number = tensor.dtype.is_floating_point or tensor.dtype is torch.bool
    sizes = (
        (*tensor.shape, *tensor.stride()) if tensor.layout is torch.strided else ("",)
    )
    return is_number and all(isinstance(size, int) for size in sizes)


def _fits(leaves: list[Any]) -> bool:
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    taken = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if tensors[0].device.type != "cuda":
        return taken <= _HOST_BYTES
    free, _ = torch.cuda.mem_get_info(tensors[0].device)
    return taken <= free // 2


def _leaves(tree: Any) -> list[Any]:
    leaves, _ = _torch.flatten_tree(fx.node.map_arg(tree, lambda n: n.meta.get("val")))
    return list(leaves)


def _time_node(node: fx.Node) -> float | None:
    """Seconds of one run among several; None where it cannot be run like this."""
    operator: Any = node.target
    try:
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda each: _random(each.meta.get("val"))
        )
        return _time(lambda: operator(*args, **kwargs), _device(node))
    except (RuntimeError, NotImplementedError):  # out of memory, or a layout of its own
        return None


def _random(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    sizes = zip(value.shape, value.stride(), strict=True)
    held = [size if stride else 1 for size, stride in sizes]  # what is not repeated
    made = torch.empty_strided(
        held, value.stride(), dtype=value.dtype, device=value.device
    )
    if made.dtype is torch.bool:
        return made.zero_().expand(value.shape)
    generator = torch.Generator(device=made.device).manual_seed(0)
    return made.normal_(generator=generator).expand(value.shape)


def _device(node: fx.Node) -> torch.device:
    tensors = [each for each in _leaves(node.args) if isinstance(each, torch.Tensor)]
    return tensors[0].device


def _time(run: Callable[[], object], device: torch.device) -> float:
    """The median of some tries: a kernel that is loaded meanwhile stops all others."""
    once = min(_elapsed(run, 1, device) for _ in range(3))
    if once > _LONG:
        return once
    runs = max(1, min(_MOST_RUNS, int(_ENOUGH / max(once, 1e-9))))
    tries = [_elapsed(run, runs, device) / runs for _ in range(_TRIES)]
    return statistics.median(tries)


def _elapsed(run: Callable[[], object], runs: int, device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(runs):
        run()
    synchronize(device)
    return time.perf_counter() - start
