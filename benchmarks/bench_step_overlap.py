"""How much of a data-parallel step's communication is hidden, against every peer?

One training step (forward, backward, fused AdamW) on real ranks: eager DDP, DDP under
torch.compile, FSDP2 eager and compiled, and torchspmd's whole-step graph without passes,
with the default passes, also as a CUDA graph, and with updates overlapped with the next
iteration. Fully sharded ones are compared with FSDP2, hybrid ones (from four ranks on) with
its hybrid sharding; "mixed" ones keep float32 shards and compute in bfloat16. Beside them
the limit of each family: the larger of computing alone and of sending what it sends, with
nothing else to do; and both at once, where nothing waits for anything: what one gives up
for the other. Each is measured in processes of its own: what one leaves behind (memory
that it keeps, what it compiled) does not slow down the next.

``--network 1gbit`` runs inside a network namespace of its own whose loopback is shaped to
that rate (needs root, ip and tc). The batch is chosen so that computing takes ``--ratio``
times as long as communicating.
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from _harness import publish
from _shared_gpu import shared_gpu
from _step_variants import (
    BASES,
    PEERS,
    VARIANTS,
    Family,
    Measured,
    Workload,
    can_run,
    measure,
    measure_wires,
)

from torchspmd.errors import SpmdError
from torchspmd.testing import Ranks

SPACE = f"torchspmd-bench-{os.getpid()}"  # one that was killed may be left
LIMIT = 900.0  # seconds for one variant, its compilation included

Runner = Callable[..., list[Any]]  # calls a function with arguments on every rank


def main() -> None:
    options = parse()
    if options.network and not os.environ.get("TORCHSPMD_BENCH_INSIDE"):
        sys.exit(run_shaped(options.network))
    rows: list[dict[str, Any]] = []
    backend = "nccl" if options.device == "cuda" else "gloo"

    def run(function: Callable[..., Any], *args: Any) -> list[Any]:
        with Ranks(options.ranks, backend=backend) as ranks:
            return ranks.run(function, *args, timeout=LIMIT)

    with shared_gpu(options.device) as sharing:
        for model in options.models:
            for ratio in options.ratios:
                rows += compare(run, model, ratio, options)
        shared = sharing()
    where = f"loopback shaped to {options.network}" if options.network else "loopback"
    title = f"A data-parallel step on {options.ranks} ranks, {backend} over {where}"
    publish(title + shared, rows, options.json)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", nargs="+", default=["linear 5x1024"])
    parser.add_argument("--ratios", nargs="+", type=float, default=[1.0, 0.25])
    parser.add_argument("--batch", type=int, help="instead of looking for ratios")
    parser.add_argument("--variants", nargs="+", help="all that the device can run")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--network", help="shape loopback to this rate, such as 1gbit")
    parser.add_argument(
        "--cache", type=Path, help="Inductor's, for all variants; instead of empty ones"
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    able = [n for n in VARIANTS if can_run(n, options.device, options.ranks)]
    options.variants = options.variants or able
    if options.batch is not None:
        options.ratios = [math.nan]  # the batch is what it is: once
    wrong = [name for name in options.variants if name not in able]
    if wrong:
        parser.error(
            f"--variants {wrong}: not there on {options.ranks} ranks of {options.device}; "
            f"choose among {able}"
        )
    return options


def compare(
    run: Runner, model: str, ratio: float, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Every variant on one model, at one ratio of computing to communicating."""
    workload, bases, wire = balance(run, model, ratio, options)
    families = list(dict.fromkeys(map(Family.of, options.variants)))
    wires = time_wires(run, workload, families)
    if Family.REPLICATED in wires:
        wires[Family.REPLICATED] = min(wires[Family.REPLICATED], wire)
    found: dict[str, Measured | str] = {}
    for _ in range(options.rounds):
        for name in options.variants:
            now, best = attempt(run, name, workload, options), found.get(name)
            if isinstance(best, Measured) and isinstance(now, Measured):
                now = Measured(
                    min(now.seconds, best.seconds),
                    max(now.peak, best.peak),
                    min(now.start, best.start),
                )
            found[name] = now
        again = time_wires(run, workload, families)
        wires = {each: min(again[each], wires[each]) for each in again}  # it varies
    computing = min(each.seconds for each in bases.values())
    table: dict[str, Measured | str] = {**bases}
    table |= {each.value: Measured(wire) for each, wire in wires.items()}
    rows = [row(model, workload, *each) for each in table.items()]
    for name, measured in found.items():
        family = Family.of(name)
        peers = {
            peer: each.seconds
            for peer, each in found.items()
            if isinstance(each, Measured)
            and peer in PEERS
            and Family.of(peer).compares_with(family)
        }
        limit = max(computing, wires[family])
        rows.append(row(model, workload, name, measured, peers, limit))
    return rows


def row(
    model: str,
    workload: Workload,
    name: str,
    measured: Measured | str,
    peers: dict[str, float] | None = None,
    limit: float = 0.0,
) -> dict[str, Any]:
    found = {"model": f"{model}, batch {workload.batch}", "variant": name}
    columns = ("times the best peer", "best peer", "of the limit", "start s", "GiB")
    if isinstance(measured, str):
        return {**found, "ms": measured, **dict.fromkeys(columns, "")}
    best = min(peers, key=peers.__getitem__) if peers else ""
    values = (
        peers[best] / measured.seconds if peers else "",
        best,
        limit / measured.seconds if limit else "",
        measured.start or "",
        measured.peak / 2**30 if measured.peak else "",
    )
    return {
        **found,
        "ms": measured.seconds * 1e3,
        **dict(zip(columns, values, strict=True)),
    }


def balance(
    run: Runner, model: str, ratio: float, options: argparse.Namespace
) -> tuple[Workload, dict[str, Measured], float]:
    """The batch at which computing takes ``ratio`` times as long as communicating."""
    batch = getattr(options, "batch", None)
    workload = Workload(model, batch or 16, options.device)
    wire = time_wires(run, workload, [Family.REPLICATED])[Family.REPLICATED]
    wanted = getattr(options, "variants", ())
    is_compiled = any("compile" in name or "inductor" in name for name in wanted)
    names = list(BASES) if is_compiled and options.device == "cuda" else list(BASES)[:1]

    def alone(name: str) -> Measured:
        cache = getattr(options, "cache", None)
        found = measure_slowest(run, name, workload, 3, cache)
        tell(workload, name, found)
        return found

    for _ in range(0 if batch else 2):
        found = workload.batch * ratio * wire / alone(names[-1]).seconds
        workload = replace(workload, batch=max(1, round(found)))
    bases = {name: alone(name) for name in names}
    return workload, bases, wire


def time_wires(
    run: Runner, workload: Workload, families: list[Family]
) -> dict[Family, float]:
    found = run(measure_wires, families, workload, 3)
    slowest = {each: max(rank[each] for rank in found) for each in families}
    for each, seconds in slowest.items():
        print(f"{workload}, {each.value}: {seconds * 1e3:.1f} ms", file=sys.stderr)
    return slowest


def measure_slowest(
    run: Runner, name: str, workload: Workload, steps: int, cache: Path | None
) -> Measured:
    """The slowest rank's figures.

    Nothing that another variant compiled is found, unless a cache is given: then starts
    are not those of a user's first run.
    """
    if cache is not None:
        return max(run(measure, name, workload, steps, str(cache)))
    with tempfile.TemporaryDirectory(prefix="inductor") as own:
        return max(run(measure, name, workload, steps, own))


def attempt(
    run: Runner, name: str, workload: Workload, options: argparse.Namespace
) -> Measured | str:
    try:
        found = measure_slowest(run, name, workload, options.steps, options.cache)
    except SpmdError as error:
        last = str(error).strip().splitlines()[-1]
        print(f"{name}: {error}", file=sys.stderr)
        return f"failed: {last[:40]}"
    tell(workload, name, found)
    return found


def tell(workload: Workload, name: str, found: Measured) -> None:
    """At once: a run that is cut off has no table."""
    told = f"{found.seconds * 1e3:.1f} ms, start {found.start:.1f} s"
    told += f", {found.peak / 2**30:.2f} GiB" if found.peak else ""
    print(f"{workload}, {name}: {told}", file=sys.stderr)


def run_shaped(rate: str) -> int:
    """Run this benchmark in a network namespace whose loopback is that slow."""
    inside = ["ip", "netns", "exec", SPACE]
    commands = [
        ["ip", "netns", "add", SPACE],
        [*inside, "ip", "link", "set", "lo", "up"],
        [
            *inside,
            *"tc qdisc add dev lo root tbf burst 256kb latency 50ms rate".split(),
            rate,
        ],
    ]
    try:
        for command in commands:
            subprocess.run(command, check=True)
        environment = {**os.environ, "TORCHSPMD_BENCH_INSIDE": "1"}
        again = [*inside, sys.executable, *sys.argv]
        return subprocess.run(again, env=environment, check=False).returncode
    finally:
        subprocess.run(["ip", "netns", "delete", SPACE], check=False)


if __name__ == "__main__":
    main()
