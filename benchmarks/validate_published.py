"""How wrong is a predicted step on clusters that others have measured? Published rows.

    python benchmarks/validate_published.py --json published.json --svg published.svg
    python benchmarks/validate_published.py --source mpt torchtitan --markdown --all
    python benchmarks/validate_published.py --only "mpt 7b 8" --parts

Each row is a script of ``examples/predict`` with the shape and layout that its source tells
(``_published.py``). The hardware files are as they are. Beside the prediction stands one
with a factor for each source and GPU, fitted on rows of up to 8 GPUs, for what
frameworks and their versions do differently. Blocks and micro-batches repeat, so a row is
rehearsed with few of them, and the difference is extended. Recordings are kept: a second
run, with other prices, takes seconds.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from _harness import publish
from _published import EXAMPLES, SOURCES, Row, sampled
from _recordings import Rehearsal, record
from _rows import markdown
from _scatter import scatter
from _steps import nine_of_ten

from torchspmd.predict.allocator import AllocatorSettings
from torchspmd.predict.hardware import load_gpu, load_network
from torchspmd.predict.memory import count_memory
from torchspmd.predict.prediction import predict_time
from torchspmd.predict.repeated import extend
from torchspmd.predict.stages import to_rehearse

_PARTS = ("compute", "exposed", "host", "bubble")
Point = tuple[int, int]  # layers, micro-batches


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="beginnings of names")
    parser.add_argument("--all", action="store_true", help="not only a sample of them")
    parser.add_argument(
        "--whole",
        action="store_true",
        help="rehearse every layer: what is reserved is not affine in them",
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--parts", action="store_true", help="what a step is made of")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--svg", type=Path, help="draw the scatter here")
    parser.add_argument("--json", type=Path, help="also write the table here")
    options = parser.parse_args()
    rows = [
        row
        for source in options.source
        for row in SOURCES[source]()
        if options.all
        or (row.name.startswith(tuple(options.only)) if options.only else sampled(row))
    ]
    if options.whole:
        rows = [row._replace(is_whole=True) for row in rows]
    table = compare(rows, predict(rows, options.jobs), parts=options.parts)
    if options.markdown:
        print(*markdown(table), sep="\n")
    publish("Predicted and published steps, ms", table, options.json)
    print(*summary(table, rows), sep="\n")
    if options.svg:
        options.svg.write_text(scatter(table), encoding="utf-8")


# ----------------------------------------------------------------------------
# Predictions


def points(row: Row) -> tuple[list[int], list[int]]:
    """Numbers of layers and micro-batches that are rehearsed: few, where that is enough."""
    if row.is_whole:
        return [row.layers], [row.accumulate]
    unit = row.pp * row.chunks
    layers = [2 * unit, 4 * unit] if row.pp == 1 else [unit, 2 * unit]
    if row.layers <= layers[-1]:
        layers = [row.layers]
    # With one for each stage, a pipeline is full: each one more adds as much.
    batches = [row.pp, row.pp + 1]
    if row.chunks > 1:  # it takes longer until forward and backward alternate
        batches = [4 * row.pp, 8 * row.pp]
    if row.accumulate <= batches[-1]:
        batches = [row.accumulate]
    return layers, batches


def rehearsals(row: Row, point: Point) -> list[Rehearsal]:
    """One rank of each stage of the pipeline; those in between follow from few of them."""
    layers, batches = point
    words = [*row.words.split(), "--layers", str(layers), "--steps", "2"]
    if row.script != "llama_fsdp2.py":
        words += ["--accumulate", str(batches)]
    if row.pp > 1:
        words += ["--pp", str(row.pp), "--interleave", str(row.chunks)]
    path, ranks = EXAMPLES / row.script, stage_ranks(row)
    gpu = row.rehearsed_on or row.gpu
    stages = range(row.pp) if row.chunks > 1 else to_rehearse(row.pp)
    return [
        Rehearsal(path, tuple(words), gpu, row.gpus, rank=ranks[stage])
        for stage in stages
    ]


def stage_ranks(row: Row) -> list[int]:
    """The first rank of each stage."""
    return list(range(0, row.gpus, row.gpus // row.pp))


def every_point(row: Row) -> list[Point]:
    layers, batches = points(row)
    return [(count, batch) for batch in batches for count in layers]


def predict(rows: list[Row], jobs: int) -> list[dict[str, Any] | str]:
    """A prediction of each row; a text where it could not be rehearsed."""
    wanted = [
        each
        for row in rows
        for point in every_point(row)
        for each in rehearsals(row, point)
    ]
    problems = record(wanted, jobs)
    result: list[dict[str, Any] | str] = []
    for row in rows:
        needed = [e for point in every_point(row) for e in rehearsals(row, point)]
        bad = next((problems[each] for each in needed if each in problems), "")
        result.append(bad or _predict(row))
    return result


def _predict(row: Row) -> dict[str, Any]:
    layers, batches = points(row)
    found = [
        _extended({count: _at(row, (count, batch)) for count in layers}, row.layers)
        for batch in batches
    ]
    return _extended(dict(zip(batches, found, strict=True)), row.accumulate)


def _extended(found: Mapping[int, dict[str, Any]], to: int) -> dict[str, Any]:
    if len(found) == 1:
        return next(iter(found.values()))
    (few, first), (more, second) = found.items()
    return extend(first, second, (few, more), to)


def _at(row: Row, point: Point) -> dict[str, Any]:
    gpu = load_gpu(row.gpu)
    recordings = [each.read() for each in rehearsals(row, point)]
    network, ranks = load_network(row.network), stage_ranks(row)
    timed = predict_time(recordings, gpu, network, ranks=ranks)
    answer = timed.as_json(timeline=False)
    memory = count_memory(recordings[0], gpu, AllocatorSettings())
    kept = ("step_seconds", "optimizer_seconds", "model_flops", "mfu", "power")
    kept += tuple(f"{part}_seconds" for part in _PARTS)
    return {key: answer[key] for key in kept} | {
        "memory": {
            "reserved_peak_bytes": memory.reserved_peak,
            "device_peak_bytes": memory.device_peak,
        }
    }


# ----------------------------------------------------------------------------
# The table


def compare(
    rows: list[Row], predicted: list[dict[str, Any] | str], *, parts: bool = False
) -> list[dict[str, Any]]:
    """Milliseconds, errors with and without the factor of the source."""
    pairs = [
        (row, answer)
        for row, answer in zip(rows, predicted, strict=True)
        if not isinstance(answer, str)
    ]
    factors = fit((row, seconds_of(row, answer)) for row, answer in pairs)
    table: list[dict[str, Any]] = []
    for row, answer in pairs:
        factor, seconds = factors.get(row.source, 1.0), seconds_of(row, answer)
        gib = answer["memory"]["reserved_peak_bytes"] / 2**30
        entry = {
            "row": row.name,
            "source": row.source,
            "step": 1e3 * row.seconds,
            "predicted": 1e3 * seconds,
            "error %": 100 * (seconds / row.seconds - 1),
            "factor": factor,
            "with factor, error %": 100 * (factor * seconds / row.seconds - 1),
            "MFU %": 100 * (answer["mfu"] or 0.0),
            "fitted": "yes" if row.gpus <= 8 else "",
            "memory, error %": 100 * (gib / row.reserved_gib - 1)
            if row.reserved_gib
            else "",
        }
        if parts:
            entry |= {part: 1e3 * (answer[f"{part}_seconds"] or 0.0) for part in _PARTS}
            entry["clock"] = 100 * answer["power"]["clock"]
        table.append(entry)
    return table


def seconds_of(row: Row, answer: Mapping[str, Any]) -> float:
    """Of a step, of as much of it as the source has measured."""
    without = 0.0 if row.has_optimizer else answer["optimizer_seconds"] or 0.0
    return float(answer["step_seconds"] - without)


def fit(pairs: Iterable[tuple[Row, float]]) -> dict[str, float]:
    """For each source, the median ratio of its rows of up to 8 GPUs."""
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for row, seconds in pairs:
        if row.gpus <= 8:
            ratios[row.source].append(row.seconds / seconds)
    return {source: statistics.median(found) for source, found in ratios.items()}


def summary(table: list[dict[str, Any]], rows: list[Row]) -> Iterator[str]:
    """By source: mean errors, the order, and how good the predicted best layout is."""
    yield f"{len(table)} of {len(rows)} rows were predicted"
    for source in dict.fromkeys(row["source"] for row in table):
        these = [row for row in table if row["source"] == source]
        rest = [row for row in these if not row["fitted"]]
        factor = f"factor {these[0]['factor']:.2f}"
        yield f"{source}, {factor if len(rest) < len(these) else 'nothing fitted'}"
        for title, some in (("all", these), ("more than 8 GPUs", rest)):
            if some:
                yield f"  {title}, {len(some)} rows: {_errors(some)}"
    everything = [row for row in table if not row["fitted"]]
    if everything:
        yield f"all rows of more than 8 GPUs, {len(everything)}: {_errors(everything)}"
    yield from _best_layouts(table, rows)


def _errors(table: list[dict[str, Any]]) -> str:
    told = []
    for title, key in (("", "error %"), (" with the factor", "with factor, error %")):
        errors = sorted(abs(row[key]) for row in table)
        told.append(
            f"mean error{title} {statistics.fmean(errors):.1f} %, nine of ten within "
            f"{nine_of_ten(errors):.1f} %, worst {errors[-1]:.1f} %"
        )
    if len(table) > 2:
        order = statistics.correlation(
            places([row["step"] for row in table]),
            places([row["predicted"] for row in table]),
        )
        told.append(f"rank correlation {order:.3f}")
    return "; ".join(told)


def _best_layouts(table: list[dict[str, Any]], rows: list[Row]) -> Iterator[str]:
    """Of layouts that compete: how much slower the one is that is predicted to be best."""
    groups = {row.name: row.model for row in rows if row.model}
    competing: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in table:
        if row["row"] in groups:
            competing[groups[row["row"]]].append(row)
    for model, some in competing.items():
        if len(some) > 2:
            chosen = min(some, key=lambda row: row["predicted"])
            best = min(row["step"] for row in some)
            yield (
                f"best of {len(some)} layouts of {model}: the predicted one is "
                f"{100 * (chosen['step'] / best - 1):.1f} % slower than the true one"
            )


def places(values: list[float]) -> list[int]:
    """The rank of each."""
    ordered = sorted(values)
    return [ordered.index(value) for value in values]


if __name__ == "__main__":
    main()
