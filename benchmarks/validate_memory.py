"""How wrong is a predicted peak of memory? Real runs beside rehearsed ones.

    python benchmarks/validate_memory.py                       # both, where a GPU is
    python benchmarks/validate_memory.py --measure rows.json   # only the real runs
    python benchmarks/validate_memory.py --measured rows.json  # only rehearsals, anywhere

Each row is ``training/train.py`` with other arguments: run on the GPU, where it prints what
``torch.cuda`` counted in each step; then, unchanged, by ``torchspmd predict``. Ranks of one
row share a GPU. ``--only NAME ...`` takes some of the rows, ``--markdown`` prints the table
as the docs have it.
"""

import argparse
import concurrent.futures
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from _harness import publish

SCRIPT = Path(__file__).parent / "training" / "train.py"
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
]


def main() -> None:
    options = parse()
    rows = [row for row in ROWS if not options.only or row.name in options.only]
    if options.measured:
        measured = json.loads(options.measured.read_text())
        rows = [row for row in rows if row.name in measured]
    else:
        measured = {}
        for row in rows:
            print(f"{row.name}: running", file=sys.stderr, flush=True)
            measured[row.name] = run(row)
    if options.measure:
        options.measure.write_text(json.dumps(measured, indent=1) + "\n")
        return
    table = []
    for row in rows:
        print(f"{row.name}: rehearsing", file=sys.stderr, flush=True)
        table.append(compare(row, measured[row.name], rehearse(row, options.gpu)))
    if options.markdown:
        print(*markdown(table), sep="\n")
    publish("Predicted and measured memory, MiB", table, options.json)
    print(*summary(table), sep="\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [row.name for row in ROWS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME")
    parser.add_argument("--gpu", default="h200", help="what the rehearsals are for")
    parser.add_argument(
        "--measure", type=Path, help="write what was measured, and stop"
    )
    parser.add_argument("--measured", type=Path, help="read it instead of running")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the table here")
    return parser.parse_args()


# ----------------------------------------------------------------------------
# Real runs


def run(row: Row) -> dict[str, Any]:
    """The figures that rank 0 printed, by phase."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with concurrent.futures.ThreadPoolExecutor(row.ranks) as pool:
        ranks = range(row.ranks)
        outputs = list(pool.map(lambda rank: _run_rank(row, rank, port), ranks))
    lines = [line for line in outputs[0].splitlines() if line.startswith("{")]
    return by_period([json.loads(line) for line in lines])


def _run_rank(row: Row, rank: int, port: int) -> str:
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
    return _output([sys.executable, str(SCRIPT), *row.arguments.split()], environment)


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
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}")
    return done.stdout


def by_period(phases: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Initialisation, first step, and the highest of the others."""
    first, second, *others = phases
    return {
        "initialisation": _peaks([first]),
        "first step": _peaks([second]),
        "steady step": _peaks(others),
        "steady": others[-1]["allocated"],
    }


def _peaks(phases: list[dict[str, Any]]) -> dict[str, int]:
    return {
        key: max(phase[f"{key}_peak"] for phase in phases)
        for key in ("allocated", "reserved")
    }


# ----------------------------------------------------------------------------
# Rehearsals


def rehearse(row: Row, gpu: str) -> dict[str, Any]:
    """The same figures from ``torchspmd predict``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "predicted.json"
        command = [sys.executable, "-m", "torchspmd", "predict", str(SCRIPT)]
        command += ["--world-size", str(row.ranks), "--gpu", gpu, "--json", str(path)]
        _output([*command, "--", *row.arguments.split()], _environment(row))
        memory = json.loads(path.read_text())["memory"]
    periods: dict[str, Any] = {
        name: {
            "allocated": figures["allocated_peak_bytes"],
            "reserved": figures["reserved_peak_bytes"],
        }
        for name, figures in memory["periods"].items()
    }
    return {**periods, "steady": memory["steady_bytes"]}


# ----------------------------------------------------------------------------
# Tables


def compare(
    row: Row, measured: dict[str, Any], predicted: dict[str, Any]
) -> dict[str, Any]:
    """Peaks over the whole run, and what stays between steps; errors in percent."""
    figures = {"row": row.name, "ranks": row.ranks}
    for key in ("allocated", "reserved"):
        real, told = (_highest(each, key) for each in (measured, predicted))
        figures |= _pair(key, real, told)
    return figures | _pair("steady", measured["steady"], predicted["steady"])


def _highest(figures: dict[str, Any], key: str) -> int:
    return max(each[key] for each in figures.values() if isinstance(each, dict))


def _pair(key: str, real: int, told: int) -> dict[str, Any]:
    mib = 2**20
    return {
        key: real / mib,
        f"{key}, predicted": told / mib,
        f"{key}, error %": 100 * (told / real - 1),
    }


def summary(table: list[dict[str, Any]]) -> list[str]:
    """How many rows are within the bounds that the docs promise."""
    lines = []
    for key, bounds in (
        ("allocated", (2, 5)),
        ("reserved", (8,)),
        ("steady", (0.001,)),
    ):
        errors = [abs(row[f"{key}, error %"]) for row in table]
        for bound in bounds:
            within = sum(error <= bound for error in errors)
            lines.append(f"{key}: {within} of {len(errors)} rows within {bound:g} %")
        lines.append(f"{key}: worst {max(errors):.2f} %")
    return lines


def markdown(table: list[dict[str, Any]]) -> list[str]:
    """The table of docs/memory.md."""
    columns = list(table[0])
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    for row in table:
        cells = (f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values())
        lines.append(" | ".join(cells))
    return [f"| {line} |" for line in lines]


if __name__ == "__main__":
    main()
