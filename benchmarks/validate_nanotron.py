"""Does the memory verdict hold? Layouts that others ran on H100, or saw crash.

    python benchmarks/validate_nanotron.py                  # some of them, in minutes
    python benchmarks/validate_nanotron.py --rows 200 --json nanotron.json
    python benchmarks/validate_nanotron.py --whole          # all 2,256
    python benchmarks/validate_nanotron.py --twins          # how equal layouts differ

Rows are configurations of the ultrascale playbook (``published/nanotron_h100.csv``):
tensor, pipeline and data parallel, ZeRO 0 and 1, bf16 with gradients in 32 bits, no
recomputation. Each is ``examples/predict/nanotron.py``, written after nanotron's source. A
run without a figure crashed, mostly but not always out of memory. Some of the rows are
chosen by a seed, as many of each model that crashed as that ran.

Published figures are GiB of rank 0, which nanotron logs; that is the first stage. Of the
two that it logs they are taken to be what is reserved: layouts that differ only in
micro-batches and replicas, whose tensors are the same, differ by up to a quarter. Whether
a layout fits is asked of the first stage and of all behind the layers.
"""

import argparse
import csv
import math
import random
import runpy
import statistics
from argparse import Namespace
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from _harness import publish
from _host_lead import with_late_frees, without_streams
from _published import EXAMPLES, FOLDER
from _recordings import Rehearsal, record
from _rows import markdown

from torchspmd.predict.figures import Figures
from torchspmd.predict.hardware import load_gpu, load_network
from torchspmd.predict.memory import Fits, MemoryAccount, count_memory
from torchspmd.predict.operators import Pricer
from torchspmd.rehearse.recording import Mark, MarkKind

GPU, NETWORK = "h100", "efa-400"
# Layers, width, heads, width of the MLP, tied embeddings.
_MODELS = {
    "1.34B": (16, 2048, 32, 8192, True),
    "3.57B": (28, 3072, 32, 8192, True),
    "8.86B": (32, 4096, 32, 14336, False),
    "80B": (80, 8192, 64, 28672, False),
}
VOCABULARY = 131072
_MOST_STALL = 64  # nodes, of pipelines
# Percent: runs below it waited, most of them for hosts or networks that were out of order.
_STALLED = 2
_ERRORS = {
    "reserved": "error %",
    "at once": "at once, error %",
    "late": "late, error %",
}
_VERDICTS = (Fits.NO, Fits.AT_RISK, Fits.YES)  # the worst first
SCRIPT = EXAMPLES / "nanotron.py"


class Row(NamedTuple):
    """A configuration, the GiB that it took (0: it crashed), and the part of the peak."""

    model: str
    nodes: int
    micro_batch: int
    accumulate: int
    dp: int
    pp: int
    tp: int
    zero: int
    gib: float
    mfu: float = 0.0

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
            gib = float(row["gpu_mem_gb"] or 0)
            yield Row(row["model"], *numbers, gib, float(row["mfu_pct"]) if gib else 0)


def choose(rows: list[Row], count: int, seed: int = 0) -> list[Row]:
    """As many of each model that crashed as that ran, in a fixed random order."""
    kinds: dict[tuple[str, bool], list[Row]] = {}
    for row in rows:
        kinds.setdefault((row.model, row.gib > 0), []).append(row)
    chooser = random.Random(seed)
    strata = [chooser.sample(each, len(each)) for _, each in sorted(kinds.items())]
    ordered = [s[place] for place in range(len(rows)) for s in strata if place < len(s)]
    return ordered[:count]


def stages(row: Row) -> list[range]:
    """The blocks of each stage, as nanotron splits them."""
    layers, width, _, hidden, _ = _MODELS[row.model]
    options = Namespace(
        layers=layers, width=width, hidden=hidden, vocabulary=VOCABULARY, pp=row.pp
    )
    blocks: list[range] = _script()["split"](options)
    return blocks


@cache
def _script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def rehearsals(row: Row) -> list[Rehearsal]:
    """The first stage, and those that have the norm, the head, the cast or the loss."""
    layers, width, heads, hidden, tied = _MODELS[row.model]
    words = f"--layers {layers} --width {width} --heads {heads} --hidden {hidden} "
    words += f"--vocabulary {VOCABULARY} --sequence 4096 --batch {row.micro_batch} "
    words += f"--accumulate {rehearsed(row)} "
    words += f"--tp {row.tp} --pp {row.pp} --steps 2"
    words += " --zero" if row.zero else ""
    words += " --tied" if tied else ""
    world = 8 * row.nodes
    return [
        Rehearsal(SCRIPT, tuple(words.split()), GPU, world, place * world // row.pp)
        for place, blocks in enumerate(stages(row))
        if place == 0 or blocks.stop > layers + 1
    ]


def rehearsed(row: Row) -> int:
    """Micro-batches: as many as are ever in flight, and as many again in their gaps."""
    return min(row.accumulate, 2 * row.pp)


def is_contradicted(row: Row, rows: list[Row]) -> bool:
    """Whether a crash was not for memory: one ran that takes at least as much of it.

    Of the same model, stages and tensor parallel ranks, that is one with micro-batches as
    large and as many in flight, and optimizer states over as few ranks.
    """
    return not row.gib and any(
        each.gib
        and (each.model, each.pp, each.tp) == (row.model, row.pp, row.tp)
        and each.micro_batch >= row.micro_batch
        and each.accumulate >= min(row.accumulate, row.pp)
        and _state_ranks(each) <= _state_ranks(row)
        and (each.dp > 1 or row.dp == 1)  # gradients have buckets
        for each in rows
    )


def _state_ranks(row: Row) -> int:
    return row.dp if row.zero else 1


def is_refused(row: Row) -> bool:
    """Whether nanotron fails whatever the memory is.

    A stage has no blocks, or micro-batches are fewer than the stages behind the first.
    """
    return not all(stages(row)) or row.accumulate < row.pp - 1


def predict(row: Row) -> dict[str, Any]:
    """The memory of the first stage, and whether all stages fit.

    Memory that NCCL uses comes back late where the host is ahead of the device. When the
    device is full, the allocator waits for it, and gives back what is not in use. Hosts of
    a pipeline wait for each other, and most are not ahead: whether they fit is asked as if
    they were, and what they log is told as if not.
    """
    gpu = load_gpu(GPU)
    pricer = Pricer(Figures(gpu, load_network(NETWORK)))
    recordings = [each.read() for each in rehearsals(row)]
    repeats = row.accumulate / rehearsed(row)
    accounts = [
        count_memory(with_late_frees(each, pricer, repeats=repeats), gpu)
        for each in recordings
    ]
    at_once = count_memory(without_streams(recordings[0]), gpu)
    memory = {
        "allocated": at_once.peak.allocated,
        "reserved": logged(at_once if row.pp > 1 else accounts[0]),
        "at once": logged(at_once),
        "late": logged(accounts[0]),
    }
    worst = min(accounts, key=lambda each: _VERDICTS.index(each.fits))
    return {"memory": memory, "fits": worst.fits.value}


def logged(account: MemoryAccount) -> int:
    """The reserved bytes that nanotron tells: the most since its last reset of peaks.

    It resets them behind the last backward pass of a step.
    """
    resets = [
        place
        for place, event in enumerate(account.recording.events)
        if isinstance(event, Mark) and event.kind is MarkKind.RESET_PEAK
    ]
    curve = account.curve
    first = bisect_left(curve.events, resets[-1]) - 1
    return max(curve.reserved[first:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=24, help="how many (24)")
    parser.add_argument("--seed", type=int, default=0, help="which of them (0)")
    parser.add_argument("--whole", action="store_true", help="all of them")
    parser.add_argument("--twins", action="store_true", help="only compare equal ones")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the table here")
    options = parser.parse_args()
    every = rows = list(read())
    if options.twins:
        print(*twins(rows), sep="\n")
        return
    if not options.whole:
        rows = choose(rows, options.rows, options.seed)
    others = [row for row in rows if is_contradicted(row, every)]
    wanted = {
        row: rehearsals(row)
        for row in rows
        if not is_refused(row) and row not in others
    }
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
    if refused := [row for row in rows if is_refused(row)]:
        crashed = sum(not row.gib for row in refused)
        print(
            f"{len(refused)} others have a stage without blocks or too few micro-batches; "
            f"{crashed} of them crashed"
        )
    for row in others:
        print(f"left out, crashed although one that takes as much memory ran: {row}")
    print(*summary(table), sep="\n")


def compare(row: Row, answer: dict[str, Any]) -> dict[str, Any]:
    """GiB, and whether it is said to fit."""
    gib = {name: value / 2**30 for name, value in answer["memory"].items()}
    return {
        "row": str(row),
        "published": row.gib or "crashed",
        **gib,
        "fits": answer["fits"],
        **{
            title: 100 * (gib[name] / row.gib - 1) if row.gib else ""
            for name, title in _ERRORS.items()
        },
        "MFU %": row.mfu or "",
    }


def twins(rows: list[Row]) -> Iterator[str]:
    """How well a run tells the memory of another one whose tensors are the same.

    Equal are the program of the first stage, and the ranks that share its states or its
    buckets; not the replicas besides, nor micro-batches beyond two rounds of the pipeline.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.gib and not is_refused(row):
            words = rehearsals(row)[0].words
            shared = row.dp if row.zero else min(row.dp, 2)
            groups.setdefault((words, shared), []).append(row)
    found = [group for group in groups.values() if len(group) > 1]
    for title, some in (
        ("all", found),
        ("no pipeline", [group for group in found if group[0].pp == 1]),
        ("pipeline", [group for group in found if group[0].pp > 1]),
    ):
        if errors := [error for group in some for error in _told_by_others(group)]:
            runs = f"{len(errors)} runs in {len(some)} groups with equal tensors"
            yield f"{runs}, {title}: {_errors(errors)}"


def _told_by_others(group: list[Row]) -> Iterator[float]:
    """The error of each, in percent, when the median of the others is its prediction."""
    for place, row in enumerate(group):
        others = [each.gib for each in group[:place] + group[place + 1 :]]
        yield abs(100 * (statistics.median(others) / row.gib - 1))


def summary(table: list[dict[str, Any]]) -> Iterator[str]:
    """Errors of those that ran; crashes that were told, and false alarms."""
    ran = [row for row in table if row["published"] != "crashed"]
    crashed = [row for row in table if row["published"] == "crashed"]
    for title, some in (
        ("that ran", ran),
        (f"of them at {_STALLED} % MFU and more", _at(ran, _STALLED, math.inf)),
        (f"of them below {_STALLED} %", _at(ran, 0, _STALLED)),
    ):
        if some:
            told, *both = ([abs(row[key]) for row in some] for key in _ERRORS.values())
            yield f"{len(some)} {title}: {_errors(told)}"
            yield f"    as if freed at once: {_errors(both[0])}"
            yield f"    as if freed late: {_errors(both[1])}"
            yield f"    whichever is nearer: {_errors(map(min, *both))}"
    if ran:
        alarms = sum(row["fits"] == "no" for row in ran)
        risky = sum(row["fits"] == "at risk" for row in ran)
        yield f"{alarms} of {len(ran)} that ran are said not to fit, {risky} at risk"
    if crashed:
        told = sum(row["fits"] == "no" for row in crashed)
        risky = sum(row["fits"] == "at risk" for row in crashed)
        yield f"{told} of {len(crashed)} that crashed are said not to fit, {risky} at risk"
        for row in crashed:
            if row["fits"] != "no":
                yield f"    {row['row']}: {row['reserved']:.0f} GiB, {row['fits']}"


def _at(table: list[dict[str, Any]], least: float, below: float) -> list[Any]:
    return [row for row in table if least <= row["MFU %"] < below]


def _errors(percent: Iterable[float]) -> str:
    errors = list(percent)
    within = sum(error <= 6 for error in errors)
    return (
        f"mean error {statistics.fmean(errors):.1f} %, median "
        f"{statistics.median(errors):.1f} %, {within} within 6 %"
    )


if __name__ == "__main__":
    main()
