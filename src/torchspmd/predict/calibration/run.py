"""Every section on one device, in about a given time.

A section is a generator of cases. A case that fails is noted and leaves the others. Grids
of sizes stop when their share of the time is spent; their cases come in a fixed random
order, so that fewer of them still cover the whole range.
"""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from torchspmd.errors import SpmdError
from torchspmd.predict.calibration import host, memory_bound, products
from torchspmd.predict.calibration.collectives import group_sizes, measure_collectives
from torchspmd.predict.calibration.meter import Case, Limits, Meter, Section
from torchspmd.predict.hardware import Figure, Rows
from torchspmd.testing import Ranks

__all__ = ["Calibration", "calibrate", "host_in_proportion", "with_other_cases"]

# One job took 38 and 60 ms in two processes minutes apart, with nothing else running: the
# host's figures are the middle of several rounds, between the others.
_HOST: Sequence[tuple[str, Section]] = (
    ("host", host.host),
    ("optimizers", host.optimizers),
)
# Those that are measured whole, then those that share the time that is left.
_SECTIONS: Sequence[tuple[str, Section]] = (
    ("launches and copies", memory_bound.launches),
    *_HOST,
    ("distributed calls", host.distributed),
    ("compiled regions", host.compiled),
    ("sustained rate", products.sustained),
)
_GRIDS: Sequence[tuple[str, float, Section]] = (
    ("matrix products", 0.32, products.matmuls),
    ("attention", 0.25, products.attention),
    ("memory-bound operators", 0.25, memory_bound.memory_bound),
    ("convolutions", 0.18, products.convolutions),
)


# What the host takes; kernels and graphs in the same table are the device's.
_HOST_TABLES = ("launch.", "host_forward.", "host_backward.", "host_optimizer.")
_OF_DEVICE = frozenset({"launch.kernel", "launch.graph"})
_HOST_RATIOS = ("host_mixed.forward",)
_ENOUGH = 20  # figures, for a median


@dataclass(slots=True)
class Calibration:
    """What was measured.

    Attributes:
        figures: By ``table.key``, as in a hardware file.
        rounds: The host's figures of each round; ``figures`` has their medians.
        notes: What was left out, and why.
        cases: How many were measured.
    """

    figures: dict[str, Figure] = field(default_factory=dict)
    rounds: list[dict[str, Figure]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    cases: int = 0


def calibrate(
    device: torch.device,
    *,
    seconds: float = 90.0,
    limits: Limits | None = None,
    devices: int = 1,
    progress: Callable[[str], None] = lambda line: None,
) -> Calibration:
    """Measure every section on this device, in about this time.

    Args:
        device: ``cuda``; on another one the figures mean nothing, and only show that the
            sections run.
        seconds: To spend, without the start of CUDA and without collectives.
        limits: The largest cases; None: those of a data-centre GPU.
        devices: Of this machine: collectives between 2, 4, ... of them are measured.
        progress: Is told what is measured.
    """
    limits = limits or Limits()
    result = Calibration()
    rows: defaultdict[str, list[tuple[float, ...]]] = defaultdict(list)
    numbers: defaultdict[str, list[float]] = defaultdict(list)
    if device.type == "cuda":
        numbers |= {key: [value] for key, value in _memory_constants(device).items()}
    end = time.perf_counter() + seconds
    meter = Meter(device)
    for name, section in _SECTIONS:
        progress(name)
        _measure(name, section(meter, limits), rows, numbers, result)
    left = max(end - time.perf_counter(), seconds / 3)
    total = sum(share for _, share, _ in _GRIDS)
    for name, share, section in _GRIDS:
        progress(name)
        until = time.perf_counter() + left * share / total
        _measure(name, section(meter, limits), rows, numbers, result, until)
        if meter.is_cuda:
            torch.cuda.empty_cache()
        for of_host, again in _HOST:
            _measure(of_host, again(meter, limits), rows, numbers, result)
    source = _source(device)
    for ranks in group_sizes(devices):
        progress(f"collectives of {ranks} GPUs")
        result.figures |= _collectives(device, ranks, limits, result, source)
    for key, table in rows.items():
        value: Rows = tuple(sorted(table))
        result.figures[key] = Figure(value, source)
    for key, several in numbers.items():
        result.figures[key] = Figure(statistics.median(several), source)
    # Each round has the host's sections once; what is measured once is in none.
    count = 1 + len(_GRIDS)
    repeated = {
        key: several
        for key, several in numbers.items()
        if _is_of_host(key) and len(several) == count
    }
    result.rounds = [
        {key: Figure(several[place], source) for key, several in repeated.items()}
        for place in range(count)
    ]
    return result


def with_other_cases(measured: Figure, known: Figure | None) -> Figure:
    """Rows that were measured, and those of the same kind of GPU that were left out."""
    if known is None or not isinstance(measured.value, tuple):
        return measured
    if not isinstance(known.value, tuple):
        return measured
    cases = {row[:-1] for row in measured.value}
    others = [row for row in known.value if row[:-1] not in cases]
    if not others:
        return measured
    source = f"{measured.source}; {len(others)} cases: {known.source}"
    return Figure(tuple(sorted((*measured.value, *others))), source)


def host_in_proportion(
    measured: Mapping[str, Figure], known: Mapping[str, Figure]
) -> tuple[dict[str, Figure], float | None]:
    """The known figures of a host, all times the factor by which this host is slower.

    A figure differs by a fifth from one calibration to the next, so that it tells noise;
    the median of all ratios tells the host. What is not known stays as it was measured.

    Returns:
        All that was measured, and the known figures of the host, changed; and the factor,
        None where too few figures are known.
    """
    hosts = {
        key: (figure.value, figure.source)
        for key, figure in known.items()
        if _is_of_host(key)
        if isinstance(figure.value, int | float) and figure.value > 0
    }
    ratios = [
        figure.value / hosts[key][0]
        for key, figure in measured.items()
        if key in hosts and isinstance(figure.value, int | float) and figure.value > 0
    ]
    if len(ratios) < _ENOUGH:
        return dict(measured), None
    factor = statistics.median(ratios)
    slower = {
        key: Figure(value * factor, f"{factor:.3f} times {value:.4g}, {source}")
        for key, (value, source) in hosts.items()
    }
    # How much slower kinds in turn are is no question of how fast a host is.
    slower |= {key: known[key] for key in _HOST_RATIOS if key in known}
    return {**measured, **slower}, factor


def _is_of_host(key: str) -> bool:
    return key.startswith(_HOST_TABLES) and key not in _OF_DEVICE


def _measure(
    name: str,
    cases: Iterator[Case],
    rows: dict[str, list[tuple[float, ...]]],
    numbers: dict[str, list[float]],
    result: Calibration,
    until: float = math.inf,
) -> None:
    failed: dict[str, int] = {}
    left_out = 0
    for case in cases:
        if time.perf_counter() > until:
            left_out += 1
            continue
        try:
            for key, row in case():
                result.cases += 1
                if isinstance(row, tuple):
                    rows[key].append(row)
                else:
                    numbers[key].append(row)
        except Exception as error:
            text = (str(error).strip().splitlines() or [""])[0][:200]
            label = str(getattr(case, "args", [""])[0])
            problem = f"{label}: {type(error).__name__}: {text}"
            failed[problem] = failed.get(problem, 0) + 1
    for problem, count in failed.items():
        result.notes.append(f"{name}, {count} not measured: {problem}")
    if left_out:
        result.notes.append(f"{name}: {left_out} cases left out, their time was up")


def _collectives(
    device: torch.device, count: int, limits: Limits, result: Calibration, source: str
) -> dict[str, Figure]:
    """Tables of each kind between some devices of this machine."""
    figures = {}
    with Ranks(count, backend="nccl" if device.type == "cuda" else "gloo") as ranks:
        for key, measure in measure_collectives(ranks, limits.nbytes):
            try:
                rows = measure()
            except SpmdError as error:
                text = str(error).strip().splitlines()
                reason = text[-1] if text else ""
                result.notes.append(f"{key}, not measured: {reason[:200]}")
            else:
                figures[key] = Figure(rows, source)
                result.cases += len(rows)
    return figures


def _source(device: torch.device) -> str:
    if device.type != "cuda":
        return f"measured on {device.type}: torch {torch.__version__}"
    name = torch.cuda.get_device_name(device)
    return f"measured on {name}: torch {torch.__version__}, CUDA {torch.version.cuda}"


def _memory_constants(device: torch.device) -> dict[str, float]:
    """What CUDA and cuBLAS take, before anything else runs on the device."""
    torch.cuda.init()
    free, total = torch.cuda.mem_get_info(device)
    figures: dict[str, float] = {"memory.total": total}
    if total - free < 2**30:  # else somebody else is on this device
        figures["memory.context"] = total - free

    def outside() -> int:
        free, _ = torch.cuda.mem_get_info(device)
        return total - free - torch.cuda.memory_reserved(device)

    x = torch.ones(64, 64, device=device)
    F.layer_norm(x + x, (64,)).sum()
    before, allocated = outside(), torch.cuda.memory_allocated(device)
    y = torch.mm(x, x)
    figures["memory.cublas_handle"] = max(0, outside() - before)
    figures["memory.cublas_workspace"] = (
        torch.cuda.memory_allocated(device) - allocated - y.numel() * 4
    )
    half = x.bfloat16()
    allocated = torch.cuda.memory_allocated(device)
    z = torch.addmm(half[0], half, half)
    taken = torch.cuda.memory_allocated(device) - allocated - z.numel() * 2
    figures["memory.cublaslt_workspace"] = max(0, taken)
    properties = torch.cuda.get_device_properties(device)
    figures["chip.sms"] = properties.multi_processor_count
    figures["chip.l2_bytes"] = properties.L2_cache_size
    return {key: value for key, value in figures.items() if value > 0}
