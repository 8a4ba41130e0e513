"""How far is one measurement of a step from the middle of many?

    python benchmarks/measure_steps.py --draw 12 --out rounds.json
    python benchmarks/measure_steps.py --draw 12 --only "drawn 12.7, vit" --ways

Rows of ``_drawn_rows.py`` on this machine's GPU, in one process: each makes steps for some
seconds, in rounds of eight as ``training/train.py`` times them. The table has the middle of
all rounds, the shortest and the longest, and how far one round is from the middle in the
mean. ``--out`` keeps all rounds; ``validate_time.py --measured`` takes the middle of them.
``--ways`` makes rounds by turns as they are, without Python's garbage collector, and with
all threads on two cores or on one, to see whether one of these is what makes them differ.
``--predicted FILE``, of ``validate_time.py --predict``, leaves out those rows whose device
needs longer than their host.
"""

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _drawn_rows import drawn_rows
from _harness import publish
from _rows import TIMED_STEPS, Row
from torch import nn

sys.path.insert(0, str(Path(__file__).parent / "training"))
import train  # beside models.py, as a script
from models import MODELS

WARM = 8  # steps


@contextlib.contextmanager
def on_cores(count: int) -> Iterator[None]:
    """All threads of this process on the first cores; backward has one of its own."""
    before = os.sched_getaffinity(0)
    tasks = [int(name) for name in os.listdir("/proc/self/task")]  # noqa: PTH208

    def put(cores: set[int]) -> None:
        for task in tasks:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(task, cores)

    put(set(sorted(before)[:count]))
    try:
        yield
    finally:
        put(before)


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


WAYS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "as it is": contextlib.nullcontext,
    "no garbage collector": without_collector,
    "on two cores": lambda: on_cores(2),
    "on one core": lambda: on_cores(1),
}


def step_of(row: Row, device: torch.device) -> Callable[[], None]:
    """The step of ``training/train.py`` with these arguments."""
    with mock.patch.object(sys, "argv", ["train.py", *row.arguments.split()]):
        options = train.arguments()
    torch.manual_seed(0)
    model = train.build(options, device)
    optim = train.build_optimizer(options.optimizer, model)
    run = torch.compile(model) if options.compile else model
    image_dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    make_batch = MODELS[options.model][1]

    def step() -> None:
        batch = make_batch(options.batch, options.sequence, device, image_dtype)
        with train.autocast(options):
            loss = run(*batch)
        loss.backward()
        if options.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optim.step()
        optim.zero_grad()

    return step


def rounds_of(
    row: Row, device: torch.device, seconds: float, ways: list[str]
) -> dict[str, list[float]]:
    """Seconds of a step in each round, by way; the ways take turns."""
    step = step_of(row, device)
    for _ in range(WARM):
        step()
    found: dict[str, list[float]] = defaultdict(list)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for way in ways:
            with WAYS[way]():
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(TIMED_STEPS):
                    step()
                torch.cuda.synchronize()
                found[way].append((time.perf_counter() - begin) / TIMED_STEPS)
    return found


def described(name: str, way: str, rounds: list[float]) -> dict[str, Any]:
    """A row of the table, in milliseconds."""
    middle = statistics.median(rounds)
    off = statistics.fmean(abs(each / middle - 1) for each in rounds)
    return {
        "row": name,
        "way": way,
        "rounds": len(rounds),
        "ms": 1e3 * middle,
        "shortest": 1e3 * min(rounds),
        "longest": 1e3 * max(rounds),
        "one round is off by %": 100 * off,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", type=int, required=True, metavar="SEED")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--predicted", type=Path, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each row")
    parser.add_argument("--limit", type=float, default=600.0, help="start no row after")
    parser.add_argument("--ways", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = drawn_rows(options.draw)
    if options.only:
        rows = [row for row in rows if row.name in options.only]
    if options.predicted:
        told = json.loads(options.predicted.read_text())
        waits = {
            n: p["host_issue_seconds"] < p["compute_seconds"] for n, p in told.items()
        }
        rows = [row for row in rows if not waits[row.name]]
    device, end = torch.device("cuda", 0), time.monotonic() + options.limit
    table, kept = [], {}
    for row in rows:
        if time.monotonic() > end:
            print(f"{row.name}: left out, the time is up", file=sys.stderr)
            continue
        print(f"{row.name}: running", file=sys.stderr, flush=True)
        ways = list(WAYS)[: None if options.ways else 1]
        found = rounds_of(row, device, options.seconds, ways)
        table += [described(row.name, way, rounds) for way, rounds in found.items()]
        rounds = found[ways[0]]
        seconds = {"phase": "seconds", "in_a_row": statistics.median(rounds)}
        seconds |= {"wall": rounds, "host": rounds, "rounds": rounds}
        kept[row.name] = [seconds]
        if options.out:
            options.out.write_text(json.dumps(kept, indent=1) + "\n")
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    publish("Rounds of equal steps on one GPU, ms", table, None)


if __name__ == "__main__":
    main()
