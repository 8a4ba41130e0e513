"""How wrong is a predicted step on clusters that others have measured? Published rows.

    python benchmarks/validate_published.py --json published.json
    python benchmarks/validate_published.py --only "mpt 7b 8" --markdown

Each row is ``examples/predict/gpt.py`` with the shape and layout that its source tells. The
hardware files are as they are; one factor for each source and GPU is fitted on its rows of
up to 8 GPUs, for what frameworks do differently, and printed. Blocks repeat, so a row is
rehearsed with two and with four of them, and the difference is extended to all.
"""

import argparse
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from _harness import publish
from _rows import markdown

from torchspmd._cli.search import predict_script
from torchspmd.predict.ranking import Outcome
from torchspmd.predict.search import run_candidates
from torchspmd.predict.space import Candidate

SCRIPT = Path(__file__).parent.parent / "examples" / "predict" / "gpt.py"


class Row(NamedTuple):
    """A published figure: tokens a second and GPU, or milliseconds of a step.

    Attributes:
        name: Of the row.
        source: Framework and table; rows of one source share a factor.
        gpu: Of the hardware file.
        network: Between its nodes.
        gpus: How many.
        layers: Of the model.
        arguments: Of the script, without the layers.
        tokens: Of a rank and step; 0 where milliseconds are given.
        measured: The figure.
    """

    name: str
    source: str
    gpu: str
    network: str
    gpus: int
    layers: int
    arguments: str
    tokens: int
    measured: float

    @property
    def seconds(self) -> float:
        """Of a step, as measured."""
        return self.tokens / self.measured if self.tokens else self.measured / 1e3


# Layers, width and heads of MPT; 50368 words, GELU, tied, learned positions.
_MPT = {
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
_SOURCE = "llm-foundry, H100"


def _mpt(
    model: str, gpus: int, batch: int, rate: float, sequence: int = 2048, **more: bool
) -> Row:
    layers, width, heads = _MPT[model]
    arguments = f"--width {width} --heads {heads} --vocabulary 50368 --tied "
    arguments += f"--sequence {sequence} --batch {batch}"
    if more.get("recompute"):
        arguments += " --recompute"
    name = f"mpt {model} {gpus} GPUs, {batch} x {sequence}"
    tokens = batch * sequence
    network = "ib-ndr400"
    return Row(name, _SOURCE, "h100", network, gpus, layers, arguments, tokens, rate)


def _vtrain(  # noqa: PLR0913, PLR0917
    gpus: int,
    batch: int,
    micro_batch: int,
    width: int,
    heads: int,
    layers: int,
    sequence: int,
    milliseconds: float,
) -> Row:
    """Data parallel rows of vTrain's validation, full recomputation."""
    accumulate = batch // gpus // micro_batch
    arguments = f"--width {width} --heads {heads} --sequence {sequence} --bias "
    arguments += f"--batch {micro_batch} --accumulate {accumulate} "
    arguments += "--parallel megatron --recompute"
    name = f"vTrain {width} x {layers} {gpus} GPUs, {accumulate} x {micro_batch}"
    source, network = "Megatron-DeepSpeed, A100", "ib-hdr200"
    return Row(name, source, "a100", network, gpus, layers, arguments, 0, milliseconds)


# Tokens a second and GPU; rows with one or few micro-batches, so that the optimizer counts.
ROWS = [
    _mpt("760m", 8, 24, 63147),
    _mpt("1b", 8, 14, 45455),
    _mpt("1b", 8, 3, 29157, 8192),
    _mpt("7b", 8, 6, 10643),
    _mpt("7b", 8, 16, 8611, 4096, recompute=True),
    _mpt("13b", 8, 2, 4792),
    _mpt("13b", 8, 10, 4717, 4096, recompute=True),
    _mpt("760m", 16, 24, 68551),
    _mpt("760m", 32, 24, 67971),
    _mpt("1b", 16, 20, 46037),
    _mpt("1b", 32, 20, 45130),
    _mpt("1b", 64, 20, 44402),
    _mpt("3b", 16, 10, 24142),
    _mpt("3b", 32, 6, 23021),
    _mpt("3b", 64, 6, 22525),
    _mpt("7b", 128, 6, 10475),
    _mpt("13b", 16, 2, 4767),
    _mpt("13b", 32, 2, 4811),
    _mpt("13b", 64, 2, 4800),
    _mpt("13b", 128, 16, 5080, recompute=True),
    _mpt("30b", 16, 10, 2263, recompute=True),
    _mpt("30b", 32, 14, 2308, recompute=True),
    _mpt("30b", 128, 8, 2199, recompute=True),
    _mpt("70b", 64, 8, 1039, recompute=True),
    _mpt("70b", 128, 8, 1058, recompute=True),
    _vtrain(2, 16, 4, 2048, 16, 12, 1024, 304.09996),
    _vtrain(4, 32, 2, 2048, 16, 16, 1024, 406.355066),
    _vtrain(8, 64, 2, 2048, 16, 16, 1024, 406.061957),
    _vtrain(8, 32, 1, 2048, 16, 20, 1024, 334.638746),
    _vtrain(64, 512, 8, 3072, 32, 30, 2048, 3566.5),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="beginnings of names")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the table here")
    options = parser.parse_args()
    rows = [
        row
        for row in ROWS
        if not options.only or any(map(row.name.startswith, options.only))
    ]
    table = compare(rows, predict(rows, options.jobs))
    if options.markdown:
        print(*markdown(table), sep="\n")
    publish("Predicted and published steps, ms", table, options.json)
    print(*summary(table), sep="\n")


def predict(rows: list[Row], jobs: int) -> list[float | str]:
    """Seconds of a step of each; a text where it could not be rehearsed."""
    points = [
        Candidate({"row": row.name, "layers": layers}, ())
        for row in rows
        for layers in (2, 4)
    ]
    found = list(run_candidates(points, rehearse, jobs=jobs, progress=show))
    result: list[float | str] = []
    for row, two, four in zip(rows, found[::2], found[1::2], strict=True):
        each = (four.seconds - two.seconds) / 2
        whole = two.seconds + each * (row.layers - 2)
        result.append(two.problem or four.problem or whole)
    return result


def show(outcome: Outcome, done: int, total: int) -> None:
    told = outcome.problem or f"{1e3 * outcome.seconds:.2f} ms"
    print(
        f"{done} of {total}: {outcome.candidate}: {told}", file=sys.stderr, flush=True
    )


def rehearse(candidate: Candidate) -> dict[str, Any]:
    """A step of a row with some of its blocks, in a process of its own."""
    row = next(row for row in ROWS if row.name == candidate.values["row"])
    command = ["--gpu", row.gpu, "--network", row.network]
    command += ["--world-size", str(row.gpus)]
    words = (*row.arguments.split(), "--layers", str(candidate.values["layers"]))
    return predict_script(Candidate({}, words), command=command, script=SCRIPT)


def compare(rows: list[Row], predicted: list[float | str]) -> list[dict[str, Any]]:
    """Milliseconds, errors with and without the factor of the source."""
    pairs = [
        (r, p) for r, p in zip(rows, predicted, strict=True) if isinstance(p, float)
    ]
    factors = fit(pairs)
    table: list[dict[str, Any]] = []
    for row, seconds in pairs:
        factor = factors.get(row.source, 1.0)
        table.append(
            {
                "row": row.name,
                "source": row.source,
                "step": 1e3 * row.seconds,
                "predicted": 1e3 * seconds,
                "error %": 100 * (seconds / row.seconds - 1),
                "factor": factor,
                "with factor, error %": 100 * (factor * seconds / row.seconds - 1),
                "fitted": "yes" if row.gpus <= 8 else "",
            }
        )
    return table


def fit(pairs: list[tuple[Row, float]]) -> dict[str, float]:
    """For each source, the mean ratio of its rows of up to 8 GPUs."""
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for row, seconds in pairs:
        if row.gpus <= 8:
            ratios[row.source].append(math.log(row.seconds / seconds))
    return {source: math.exp(statistics.fmean(logs)) for source, logs in ratios.items()}


def summary(table: list[dict[str, Any]]) -> list[str]:
    """Mean errors of the rows that nothing was fitted on, and their order."""
    rest = [row for row in table if not row["fitted"]]
    lines = []
    for key in ("error %", "with factor, error %"):
        errors = [abs(row[key]) for row in rest]
        if errors:
            mean, worst = statistics.fmean(errors), max(errors)
            lines.append(
                f"{key} of {len(rest)} rows: mean {mean:.1f}, worst {worst:.1f}"
            )
    if len(rest) > 2:
        order = statistics.correlation(
            _places([row["step"] for row in rest]),
            _places([row["predicted"] for row in rest]),
        )
        lines.append(f"rank correlation {order:.3f}")
    return lines


def _places(values: list[float]) -> list[int]:
    ordered = sorted(values)
    return [ordered.index(value) for value in values]


if __name__ == "__main__":
    main()
