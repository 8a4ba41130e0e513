"""Where the time of a training run goes: the GPU's kernels, and the host's operators.

    python benchmarks/profile_row.py OUT.json NAME ...

Each NAME is a row of ``_rows.py`` or a job of ``training/jobs.py``, run under
``torch.profiler`` in a process of its own: what to look at where a predicted step is wrong.
Those that fail are named and left out. Writes, of each row, every kernel with its count and
microseconds over four steps; of each job, by step:

    step_ms, issue_ms       without a profiler: the whole, and until the host has issued it
    profiled_ms             with it; the following are of these steps
    busy_ms                 some kernel runs
    python_ms, waits_ms     the host is in no operator; in a call that waits for the device
    kernels, operators      [name, count, microseconds], of the device and of the host alone
    shapes                  [operator, shapes, count, microseconds of its kernels]
"""

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from _rows import ALL_ROWS, SCRIPT
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from validate_jobs import NAMES

STEPS = 3
LIMIT = 120  # seconds, for one run


def main() -> None:
    arguments = {row.name: ["--row", *row.arguments.split()] for row in ALL_ROWS}
    arguments |= {job: ["--job", job] for jobs in NAMES.values() for job in jobs}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="+", choices=arguments, metavar="NAME")
    options = parser.parse_args()
    out: Path = options.out
    found: dict[str, Any] = {}
    for name in options.names:
        part = out.with_suffix(".part")
        kind, *rest = arguments[name]
        command = [sys.executable, __file__, kind, str(part), *rest]
        try:
            subprocess.run(command, check=True, timeout=LIMIT)
        except subprocess.SubprocessError as error:
            print(f"{name}: left out: {error}", file=sys.stderr)
            continue
        found[name] = json.loads(part.read_text())
        part.unlink()
        out.write_text(json.dumps(found, indent=1) + "\n")


def profile_row(arguments: list[str]) -> list[Any]:
    sys.argv = [str(SCRIPT), *arguments]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        runpy.run_path(str(SCRIPT), run_name="__main__")
        torch.cuda.synchronize()
    return _kernels(profiler.key_averages(), 1)


def profile_job(name: str) -> dict[str, Any]:
    import jobs

    torch.manual_seed(0)
    step: Callable[[], None] = jobs.stepper(jobs.BUILDERS[name]())
    for _ in range(4):
        step()
    whole, issued = zip(*(_timed(step) for _ in range(5)), strict=True)
    profiled = _profiled(step, STEPS)
    shaped = _profiled(step, 1, shapes=True)
    averages = profiled.key_averages()
    operators = [
        [each.key, each.count / STEPS, round(each.self_cpu_time_total / STEPS, 1)]
        for each in averages
        if each.device_type == DeviceType.CPU
    ]
    shapes = [
        [each.key, each.input_shapes, each.count, round(each.self_device_time_total, 1)]
        for each in shaped.key_averages(group_by_input_shape=True)
        if each.device_type == DeviceType.CPU and each.self_device_time_total > 0
    ]
    return {
        "step_ms": statistics.median(whole),
        "issue_ms": statistics.median(issued),
        **_host(profiled.events()),
        "kernels": _kernels(averages, STEPS),
        "operators": sorted(operators, key=lambda row: -row[2])[:60],
        "shapes": sorted(shapes, key=lambda row: -row[3])[:120],
    }


def _timed(step: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds of two steps, halved: all of it, and until it was issued."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    step()
    issued = time.perf_counter()
    torch.cuda.synchronize()
    return 500 * (time.perf_counter() - start), 500 * (issued - start)


def _profiled(step: Callable[[], None], steps: int, shapes: bool = False) -> Any:
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with profile(activities=kinds, record_shapes=shapes) as profiler:
        with torch.profiler.record_function(_WINDOW):
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
    return profiler


_WINDOW = "profiled steps"
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def _host(events: Iterable[Any]) -> dict[str, float]:
    """Milliseconds of a step. Threads take turns, so that their operators add up."""
    on_host: list[tuple[float, float]] = []
    on_device: list[tuple[float, float]] = []
    whole, waits = 0.0, 0.0
    for event in events:
        span = (event.time_range.start, event.time_range.end)
        on_device_side = event.device_type != DeviceType.CPU
        if event.is_user_annotation:  # of an optimizer, or of the window
            if event.name == _WINDOW and not on_device_side:
                whole = span[1] - span[0]
            continue
        (on_device if on_device_side else on_host).append(span)
        waits += span[1] - span[0] if event.name in _WAITS else 0.0
    return {
        "profiled_ms": whole / STEPS / 1e3,
        "busy_ms": _covered(on_device) / STEPS / 1e3,
        "python_ms": (whole - _covered(on_host)) / STEPS / 1e3,
        "waits_ms": waits / STEPS / 1e3,
    }


def _covered(spans: list[tuple[float, float]]) -> float:
    total, until = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _kernels(averages: Iterable[Any], steps: int) -> list[Any]:
    rows = [
        [each.key, each.count / steps, round(each.self_device_time_total / steps, 1)]
        for each in averages
        if each.device_type != DeviceType.CPU and not each.is_user_annotation
    ]
    return sorted(rows, key=lambda row: -row[2])


if __name__ == "__main__":
    kinds: dict[str, Callable[[list[str]], Any]] = {
        "--row": profile_row,
        "--job": lambda names: profile_job(*names),
    }
    if sys.argv[1:2] and sys.argv[1] in kinds:
        sys.path.insert(0, str(SCRIPT.parent))
        kind, out, *rest = sys.argv[1:]
        Path(out).write_text(json.dumps(kinds[kind](rest)))
        os._exit(0)
    main()
