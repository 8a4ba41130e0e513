"""Does the memory verdict hold? Layouts that others ran on H100, or saw crash.

    python benchmarks/validate_nanotron.py                  # some of them, in minutes
    python benchmarks/validate_nanotron.py --rows 200 --json nanotron.json
    python benchmarks/validate_nanotron.py --whole          # all 2,256

Rows are configurations of the ultrascale playbook (``published/nanotron_h100.csv``):
tensor, pipeline and data parallel, ZeRO 0 and 1, bf16 with gradients in 32 bits, no
recomputation. Each is ``examples/predict/megatron.py``; its first and its last stage are
rehearsed, with as many layers as nanotron gives them. A run without a figure crashed,
mostly but not always out of memory. Some of the rows are chosen by a fixed seed, as many of
each model that crashed as that ran.

Published figures are taken to be GiB that the allocator has reserved: layouts that differ
only in micro-batches and replicas, whose tensors are the same, differ by up to a quarter.
"""

import argparse
import csv
import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from _harness import publish
from _published import EXAMPLES, FOLDER
from _recordings import Rehearsal, record
from _rows import markdown

from torchspmd.predict.allocator import AllocatorSettings
from torchspmd.predict.hardware import load_gpu
from torchspmd.predict.memory import count_memory

GPU = "h100"
# Layers, width, heads, width of the MLP, tied embeddings.
_MODELS = {
    "1.34B": (16, 2048, 32, 8192, True),
    "3.57B": (28, 3072, 32, 8192, True),
    "8.86B": (32, 4096, 32, 14336, False),
    "80B": (80, 8192, 64, 28672, False),
}
VOCABULARY = 131072


class Row(NamedTuple):
    """A configuration, and the GiB that it took; 0: it crashed."""

    model: str
    nodes: int
    micro_batch: int
    accumulate: int
    dp: int
    pp: int
    tp: int
    zero: int
    gib: float

    def __str__(self) -> str:
        return (
            f"{self.model}, {8 * self.nodes} GPUs, dp {self.dp} pp {self.pp} tp {self.tp} "
            f"zero {self.zero}, {self.accumulate} x {self.micro_batch}"
        )


def read() -> Iterator[Row]:
    with (FOLDER / "nanotron_h100.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            names = ("nodes", "mbs", "gradacc", "dp", "pp", "tp", "zero")
            numbers = (int(row[name]) for name in names)
            yield Row(row["model"], *numbers, float(row["gpu_mem_gb"] or 0))


def choose(rows: list[Row], count: int, seed: int = 0) -> list[Row]:
    """As many of each model that crashed as that ran, in a fixed random order."""
    kinds: dict[tuple[str, bool], list[Row]] = {}
    for row in rows:
        kinds.setdefault((row.model, row.gib > 0), []).append(row)
    chooser = random.Random(seed)
    strata = [chooser.sample(each, len(each)) for _, each in sorted(kinds.items())]
    ordered = [s[place] for place in range(len(rows)) for s in strata if place < len(s)]
    return ordered[:count]


def split(model: str, stages: int) -> list[int]:
    """Layers of each stage: nanotron splits by products, where the head counts as well."""
    layers, width, _, hidden, _ = _MODELS[model]
    layer, head = 4 * width * width + 3 * width * hidden, VOCABULARY * width
    counts, stage, sum_of_costs = [0] * stages, 0, 0
    for _ in range(layers):
        sum_of_costs += layer
        counts[stage] += 1
        if sum_of_costs * stages > (layers * layer + head) * (stage + 1):
            stage += 1
    return counts


def rehearsals(row: Row) -> list[Rehearsal]:
    """The first and the last stage."""
    _, width, heads, hidden, tied = _MODELS[row.model]
    words = f"--width {width} --heads {heads} --hidden {hidden} --mlp swiglu "
    words += f"--vocabulary {VOCABULARY} --sequence 4096 --batch {row.micro_batch} "
    # More micro-batches than stages are never in flight, but the first has them all.
    words += f"--accumulate {min(row.accumulate, max(row.pp, 2))} --attention flash "
    words += f"--tp {row.tp} --pp {row.pp} --steps 2"
    words += " --sequence-parallel" if row.tp > 1 else ""
    words += " --nanotron --zero" if row.zero else " --nanotron"
    words += " --tied" if tied else ""
    world, script = 8 * row.nodes, EXAMPLES / "megatron.py"
    counts = split(row.model, row.pp)
    layers = {0: counts[0], world - world // row.pp: counts[-1]}
    return [
        Rehearsal(
            script, (*words.split(), "--layers", str(count * row.pp)), GPU, world, rank
        )
        for rank, count in sorted(layers.items())
    ]


def predict(row: Row) -> dict[str, Any]:
    """The memory of the stage that takes most."""
    gpu = load_gpu(GPU)
    accounts = [
        count_memory(each.read(), gpu, AllocatorSettings()) for each in rehearsals(row)
    ]
    most = max(accounts, key=lambda each: each.device_peak)
    return {"memory": most.as_json(), "fits": most.fits.value}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=24, help="how many (24)")
    parser.add_argument("--whole", action="store_true", help="all of them")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the table here")
    options = parser.parse_args()
    rows = list(read())
    if not options.whole:
        rows = choose(rows, options.rows)
    wanted = {row: rehearsals(row) for row in rows}
    problems = record([r for some in wanted.values() for r in some], options.jobs)
    table = [
        compare(row, predict(row))
        for row, some in wanted.items()
        if not any(each in problems for each in some)
    ]
    if options.markdown:
        print(*markdown(table), sep="\n")
    publish("Predicted and published memory, GiB", table, options.json)
    print(f"{len(table)} of {len(rows)} rows were predicted")
    print(*summary(table), sep="\n")


def compare(row: Row, answer: dict[str, Any]) -> dict[str, Any]:
    """GiB, and whether it is said to fit."""
    memory = answer["memory"]
    reserved = memory["reserved_peak_bytes"] / 2**30
    return {
        "row": str(row),
        "published": row.gib or "crashed",
        "allocated": memory["allocated_peak_bytes"] / 2**30,
        "reserved": reserved,
        "fits": answer["fits"],
        "error %": 100 * (reserved / row.gib - 1) if row.gib else "",
    }


def summary(table: list[dict[str, Any]]) -> Iterator[str]:
    """Errors of those that ran; crashes that were told, and false alarms."""
    ran = [row for row in table if row["published"] != "crashed"]
    crashed = [row for row in table if row["published"] == "crashed"]
    if ran:
        errors = sorted(abs(row["error %"]) for row in ran)
        within = sum(error <= 6 for error in errors)
        yield (
            f"{len(ran)} that ran: mean error {statistics.fmean(errors):.1f} %, median "
            f"{statistics.median(errors):.1f} %, {within} within 6 %"
        )
        alarms = sum(row["fits"] == "no" for row in ran)
        yield f"{alarms} of {len(ran)} that ran are said not to fit"
    if crashed:
        told = sum(row["fits"] == "no" for row in crashed)
        risky = sum(row["fits"] == "at risk" for row in crashed)
        yield f"{told} of {len(crashed)} that crashed are said not to fit, {risky} at risk"


if __name__ == "__main__":
    main()
