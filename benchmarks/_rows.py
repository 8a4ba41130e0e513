"""Training runs whose memory and time are predicted: measured on a GPU, then rehearsed.

Each row is ``training/train.py`` with other arguments: run on the GPU, where it prints what
``torch.cuda`` counted in each step and the seconds of some more; then, unchanged, by
``torchspmd predict``. Ranks of one row share a GPU. One file of measured rows serves every
table that is made of them.
"""

import argparse
import concurrent.futures
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from _harness import publish
from _steps import nine_of_ten

SCRIPT = Path(__file__).parent / "training" / "train.py"
RECORD = Path(__file__).parent / "record_allocator.py"
LIMIT = 300  # seconds, for one run
EXPANDABLE = "expandable_segments:True"
_GPT = "--model gpt --layers 12 --width 768 --batch 8 --sequence 1024"
_LLAMA = "--model llama --layers 16 --width 1024 --batch 4 --sequence 2048"
_VIT = "--model vit --layers 12 --width 768 --batch 64 --sequence 196"
_RESNET = "--model resnet --layers 6 --width 64 --batch 64 --sequence 196"
_MOE = "--model moe --layers 8 --width 512 --batch 4 --sequence 1024"


class Row(NamedTuple):
    """One run: its name, the script's arguments, ranks, and the allocator's settings."""

    name: str
    arguments: str
    ranks: int = 1
    settings: str = ""

    @property
    def file(self) -> str:
        """The name of a file of this row, without its ending."""
        return self.name.replace(",", "").replace(" ", "_")


ROWS = [
    Row("gpt bf16", f"{_GPT}"),
    Row("gpt bf16, expandable segments", f"{_GPT}", settings=EXPANDABLE),
    Row("gpt fp32, foreach", f"{_GPT} --precision fp32 --optimizer adamw-foreach"),
    Row("gpt autocast, clipped", f"{_GPT} --precision autocast --clip 1.0"),
    Row("gpt bf16, checkpointed", f"{_GPT} --recompute"),
    Row("gpt bf16, compiled", f"{_GPT} --layers 6 --compile"),
    Row(
        "llama autocast, checkpointed, foreach, clipped",
        f"{_LLAMA} --precision autocast --recompute --optimizer adamw-foreach --clip 1.0",
    ),
    Row(
        "llama autocast, checkpointed, foreach, clipped, expandable segments",
        f"{_LLAMA} --precision autocast --recompute --optimizer adamw-foreach --clip 1.0",
        settings=EXPANDABLE,
    ),
    Row("llama bf16", f"{_LLAMA}"),
    Row("llama fp32, sgd", f"{_LLAMA} --batch 2 --precision fp32 --optimizer sgd"),
    Row("vit autocast", f"{_VIT} --precision autocast"),
    Row("vit fp32, checkpointed", f"{_VIT} --precision fp32 --recompute"),
    Row("resnet fp32, sgd", f"{_RESNET} --precision fp32 --optimizer sgd"),
    Row(
        "resnet autocast, sgd, expandable segments",
        f"{_RESNET} --precision autocast --optimizer sgd",
        settings=EXPANDABLE,
    ),
    Row("resnet bf16", f"{_RESNET}"),
    Row("moe fp32, foreach", f"{_MOE} --precision fp32 --optimizer adamw-foreach"),
    Row(
        "moe autocast, foreach, rounded sizes",
        f"{_MOE} --precision autocast --optimizer adamw-foreach",
        settings="max_split_size_mb:64,roundup_power2_divisions:4",
    ),
    Row("moe bf16, checkpointed", f"{_MOE} --recompute"),
    Row(
        "gpt autocast, DDP",
        f"{_GPT} --batch 4 --precision autocast --parallel ddp",
        2,
    ),
    Row("resnet fp32, DDP", f"{_RESNET} --precision fp32 --parallel ddp", 4),
    Row(
        "llama bf16, FSDP2, clipped",
        f"{_LLAMA} --layers 8 --batch 2 --parallel fsdp2 --clip 1.0",
        2,
    ),
    Row(
        "llama bf16, FSDP2, checkpointed",
        f"{_LLAMA} --layers 8 --batch 2 --parallel fsdp2 --recompute",
        4,
    ),
    Row("gpt bf16, FSDP2", f"{_GPT} --batch 4 --parallel fsdp2", 4),
    Row("vit fp32, FSDP2", f"{_VIT} --batch 32 --precision fp32 --parallel fsdp2", 2),
    Row("llama bf16, HSDP", f"{_LLAMA} --layers 8 --batch 2 --parallel hsdp", 4),
    Row("moe bf16, HSDP", f"{_MOE} --parallel hsdp", 4),
    Row(
        "llama bf16, torchspmd replicate",
        f"{_LLAMA} --layers 4 --batch 2 --parallel replicate --overlap",
        2,
    ),
    Row(
        "llama bf16, torchspmd replicate, Inductor",
        f"{_LLAMA} --layers 4 --batch 2 --parallel replicate --overlap "
        "--backend inductor",
        2,
    ),
    Row(
        "llama bf16, torchspmd fully_shard",
        f"{_LLAMA} --layers 4 --batch 2 --parallel fully_shard",
        2,
    ),
    Row(
        "llama bf16, torchspmd fully_shard, Inductor",
        f"{_LLAMA} --layers 4 --batch 2 --parallel fully_shard --backend inductor",
        2,
    ),
]

# Memory of these is like that of rows above: they are there for their time.
TIME_ROWS = [
    Row("gpt bf16, small", f"{_GPT} --width 256 --batch 1 --sequence 256"),
    Row("llama bf16, wide", f"{_LLAMA} --layers 8 --width 2048"),
    Row("gpt bf16, large", f"{_GPT} --layers 24 --width 1024 --batch 16"),
    Row("llama bf16, wide, compiled", f"{_LLAMA} --layers 4 --width 2048 --compile"),
    Row(
        "gpt bf16, small, compiled",
        f"{_GPT} --layers 4 --width 256 --batch 1 --compile",
    ),
    Row("resnet bf16, small", f"{_RESNET} --batch 4"),
    Row(
        "llama bf16, small", f"{_LLAMA} --layers 8 --width 256 --batch 1 --sequence 256"
    ),
    Row("vit bf16", f"{_VIT}"),
    Row(
        "gpt fp32, small, foreach",
        f"{_GPT} --width 256 --batch 2 --sequence 128 "
        "--precision fp32 --optimizer adamw-foreach",
    ),
    Row("vit autocast, compiled", f"{_VIT} --layers 4 --precision autocast --compile"),
    Row("gpt bf16, wide", f"{_GPT} --layers 4 --width 4096"),
    Row("llama bf16, long", f"{_LLAMA} --layers 8 --batch 1 --sequence 8192"),
    Row("moe bf16, wide", f"{_MOE} --batch 16 --width 1024"),
    Row(
        "gpt bf16, large, checkpointed", f"{_GPT} --layers 24 --width 1024 --recompute"
    ),
    Row(
        "llama autocast, checkpointed, compiled",
        f"{_LLAMA} --layers 4 --precision autocast --recompute --compile",
    ),
]
ALL_ROWS = ROWS + TIME_ROWS
TIMED_STEPS = 8


def measure(
    rows: list[Row],
    path: Path | None = None,
    limit: float = math.inf,
    together: int = 1,
    traces: Path | None = None,
) -> dict[str, Any]:
    """Run them on this machine's GPU; what was measured so far is in the file.

    A row that fails is told and left out, as are those that come after the limit.
    """
    measured: dict[str, Any] = {}
    end = time.monotonic() + limit

    def one(row: Row) -> None:
        if time.monotonic() > end:
            print(f"{row.name}: left out, the time is up", file=sys.stderr, flush=True)
            return
        print(f"{row.name}: running", file=sys.stderr, flush=True)
        try:
            measured[row.name] = run(row, traces)
        except (RunError, subprocess.TimeoutExpired, ValueError) as error:
            print(f"{row.name}: failed, left out: {error}", file=sys.stderr, flush=True)
        if path is not None:
            path.write_text(json.dumps(measured, indent=1) + "\n")

    with concurrent.futures.ThreadPoolExecutor(together) as pool:
        list(pool.map(one, rows))
    return measured


def rows_and_measured(
    rows: list[Row], options: argparse.Namespace
) -> tuple[list[Row], dict[str, Any]]:
    """Those that were measured, now or before."""
    if options.measured:
        measured = json.loads(options.measured.read_text())
    else:
        measured = measure(
            rows, options.measure, options.limit, options.together, options.traces
        )
    return [row for row in rows if row.name in measured], measured


def parse(description: str | None) -> argparse.Namespace:
    """The options of every table of rows."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument(
        "--draw", type=int, metavar="SEED", help="rows of _drawn_rows.py instead"
    )
    parser.add_argument("--gpu", default="h200", help="what the rehearsals are for")
    parser.add_argument(
        "--measure", type=Path, help="write what was measured, and stop"
    )
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="seconds; start no row after them"
    )
    parser.add_argument(
        "--together",
        type=int,
        default=1,
        help="rows that run on the GPU at the same time: their memory adds up, and their "
        "seconds mean nothing",
    )
    parser.add_argument(
        "--traces",
        type=Path,
        help="a folder: also write what record_allocator.py records of each row, and "
        "measure no seconds",
    )
    parser.add_argument("--measured", type=Path, help="read it instead of running")
    parser.add_argument("--predict", type=Path, help="write predictions, and stop")
    parser.add_argument("--predicted", type=Path, help="read those, made before")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the table here")
    return parser.parse_args()


def told_errors(errors: Iterable[float]) -> str:
    """Of errors in percent, whatever their sign: the figures that the docs tell."""
    ordered = sorted(map(abs, errors))
    mean, middle = statistics.fmean(ordered), statistics.median(ordered)
    return (
        f"{len(ordered)} rows: mean error {mean:.1f} %, median {middle:.1f} %, "
        f"nine of ten within {nine_of_ten(ordered):.1f} %, worst {ordered[-1]:.1f} %, "
        f"{sum(error <= 10 for error in ordered)} within 10 %"
    )


def markdown(table: list[dict[str, Any]]) -> list[str]:
    """A table of the docs."""
    columns = list(table[0])
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    for row in table:
        cells = (f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values())
        lines.append(" | ".join(cells))
    return [f"| {line} |" for line in lines]


# ----------------------------------------------------------------------------
# Real runs


def run(row: Row, traces: Path | None = None) -> list[dict[str, Any]]:
    """The lines of figures that rank 0 printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with concurrent.futures.ThreadPoolExecutor(row.ranks) as pool:
        ranks = range(row.ranks)
        outputs = list(pool.map(lambda rank: _run_rank(row, rank, port, traces), ranks))
    lines = [line for line in outputs[0].splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines]


def _run_rank(row: Row, rank: int, port: int, traces: Path | None) -> str:
    environment = _environment(row)
    if row.ranks > 1:
        environment |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(row.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            # NCCL refuses two ranks of one host on one device: let each be a host.
            "NCCL_HOSTID": f"rank{rank}",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
            "NCCL_SOCKET_IFNAME": "lo",
        }
    arguments = [str(SCRIPT), *row.arguments.split()]
    if traces is None:
        command = [*arguments, "--timed-steps", str(TIMED_STEPS)]
    else:
        traces.mkdir(parents=True, exist_ok=True)
        command = [str(RECORD), str(traces / f"{row.file}.json.gz"), *arguments]
    return _output([sys.executable, *command], environment)


class RunError(Exception):
    """A run ended with an exit code."""


def _environment(row: Row) -> dict[str, str]:
    settings = {"PYTORCH_CUDA_ALLOC_CONF": row.settings} if row.settings else {}
    return {**os.environ, **settings}


def _output(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise RunError(f"{' '.join(command)}: exit code {done.returncode}")
    return done.stdout


# ----------------------------------------------------------------------------
# Rehearsals


def rehearse(row: Row, gpu: str) -> dict[str, Any]:
    """The JSON of ``torchspmd predict``."""
    print(f"{row.name}: rehearsing", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "predicted.json"
        command = [sys.executable, "-m", "torchspmd", "predict", str(SCRIPT)]
        command += ["--world-size", str(row.ranks), "--gpu", gpu, "--json", str(path)]
        command += ["--skip", "3"]  # the fourth step, as measured
        _output([*command, "--", *row.arguments.split()], _environment(row))
        prediction: dict[str, Any] = json.loads(path.read_text())
    return prediction


def _brief(prediction: dict[str, Any]) -> dict[str, Any]:
    """What tables compare."""
    memory = {name: prediction["memory"][name] for name in ("periods", "steady_bytes")}
    seconds = ("step_seconds", "host_issue_seconds", "compute_seconds")
    return {name: prediction[name] for name in seconds} | {"memory": memory}


def compare_all(
    title: str,
    rows: list[Row],
    options: argparse.Namespace,
    compare: Callable[[Row, Any, Any], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Measure, rehearse and print a table; [] when only one of them was asked for."""
    rows = [row for row in rows if not options.only or row.name in options.only]
    if options.predict:
        told = {row.name: _brief(rehearse(row, options.gpu)) for row in rows}
        options.predict.write_text(json.dumps(told, indent=1) + "\n")
        return []
    rows, measured = rows_and_measured(rows, options)
    if options.measure:
        return []
    told = json.loads(options.predicted.read_text()) if options.predicted else {}
    table = []
    for row in rows:
        prediction = told.get(row.name) or rehearse(row, options.gpu)
        table.append(compare(row, measured[row.name], prediction))
    if options.markdown:
        print(*markdown(table), sep="\n")
    publish(title, table, options.json)
    return table
