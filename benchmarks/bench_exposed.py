"""How long does a step stand still for its collectives, before and after each pass?

One data-parallel training step on real ranks, run with a clock around each wait: as it was
captured, after each pass of the default pipeline in order, and with overlapped iterations.
Beside it what the simulation says for the rates that were measured here, and for the last
row the five collectives that are exposed longest, with the reason of each.

``--network`` and ``--ratio`` as in ``bench_step_overlap.py``.
"""

import argparse
import functools
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from _harness import publish
from _shared_gpu import shared_gpu
from _step_variants import Workload, train_step
from bench_step_overlap import LIMIT, balance, run_shaped
from rich.console import Console

from torchspmd.errors import PassWarning
from torchspmd.report import print_exposure
from torchspmd.step import (
    CostModel,
    DataParallel,
    ExposureReport,
    GraphModuleTransformation,
    compile,
)
from torchspmd.step.passes import default_passes
from torchspmd.testing import Ranks

Stage = tuple[str, str, ExposureReport]  # the latest pass, what it changed, the figures


def main() -> None:
    options = parse()
    if options.network and not os.environ.get("TORCHSPMD_BENCH_INSIDE"):
        sys.exit(run_shaped(options.network))
    backend = "nccl" if options.device == "cuda" else "gloo"
    rows: list[dict[str, Any]] = []
    with (
        shared_gpu(options.device) as sharing,
        Ranks(options.ranks, backend=backend) as ranks,
    ):
        run = functools.partial(ranks.run, timeout=LIMIT)
        workload, _, _ = balance(run, options.model, options.ratio, options)
        cost = ranks.run(measure_step, workload, timeout=LIMIT)[0]
        for count in range(len(default_passes(overlap_iterations=True)) + 1):
            stages = ranks.run(
                measure_stage, workload, cost, count, options.runs, timeout=LIMIT
            )
            rows.append(row(stages))
            print(f"{rows[-1]['after']}: measured", file=sys.stderr)
        shared = sharing()
    where = f"loopback shaped to {options.network}" if options.network else "loopback"
    title = (
        f"Exposed communication of {options.model}, batch {workload.batch}, on "
        f"{options.ranks} ranks, {backend} over {where}{shared}"
    )
    publish(title, rows, options.json)
    _, _, last = max(stages, key=lambda stage: stage[2].exposed_ms)
    print()
    print_exposure(last, Console(width=80), worst=5)
    if options.collectives is not None:
        options.collectives.write_text(last.to_json() + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default="linear 5x1024")
    parser.add_argument("--ratio", type=float, default=1.0)
    parser.add_argument("--batch", type=int, help="instead of looking for the ratio")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--network", help="shape loopback to this rate, such as 1gbit")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument(
        "--collectives", type=Path, help="also write all collectives of the last row"
    )
    return parser.parse_args()


def measure_step(workload: Workload) -> CostModel | None:
    """What the operators of the step and its collectives take on these ranks."""
    model, optim, batch = workload.build()
    transformation = GraphModuleTransformation(
        enable_graph_optimization=True, cost="measure"
    )
    mode = DataParallel("replicate")
    step = compile(gm_transformation=transformation, parallel_mode=mode)(train_step)
    for _ in range(2):  # with a cold optimizer, then with a warm one
        step(model, optim, batch)
    return transformation.cost


def measure_stage(
    workload: Workload, cost: CostModel | None, count: int, runs: int
) -> Stage:
    """The exposure on this rank after the first passes of the default pipeline."""
    model, optim, batch = workload.build()
    passes = default_passes(overlap_iterations=True, cost=cost)[:count]
    transformation = GraphModuleTransformation(passes=passes)
    mode = DataParallel("replicate")
    step = compile(gm_transformation=transformation, parallel_mode=mode)(train_step)
    with step, warnings.catch_warnings():
        warnings.simplefilter("ignore", PassWarning)  # the table says what changed
        for _ in range(3):  # a cold optimizer, a warm one, and one more
            step(model, optim, batch)
        report = step.exposure(model, optim, batch, runs=runs, cost=cost)
    if not transformation.reports:
        return "capture", "", report
    latest = transformation.reports[-1]
    outcome = latest.outcome
    return latest.name, f"{outcome.changed} of {outcome.matched}", report


def row(stages: list[Stage]) -> dict[str, Any]:
    """One row of the table; ranks that come early wait for those that come late."""
    name, changed, report = stages[0]
    return {
        "after": name,
        "changed": changed,
        "collectives": len(report.collectives),
        "exposed ms": max(each.exposed_ms for _, _, each in stages),
        "on every rank": report.everywhere_ms,
        "simulated ms": report.simulated_ms,
        "step ms": max(each.step_ms for _, _, each in stages),
    }


if __name__ == "__main__":
    main()
