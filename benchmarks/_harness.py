"""What every benchmark shares: fair timing, the environment, a table and JSON."""

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

Variant = tuple[Callable[[], AbstractContextManager[object]], Callable[[], object]]


def time_interleaved(
    variants: Mapping[str, Variant], *, rounds: int, calls: int = 3
) -> dict[str, list[float]]:
    """Milliseconds of each call, the variants taking turns so that noise hits all alike.

    A variant is a context and a call. In each round its context is entered, the call is
    made once to warm up and then ``calls`` times on the clock.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, (context, call) in variants.items():
                with context():
                    call()
                    for _ in range(calls):
                        start = time.perf_counter()
                        call()
                        times[name].append((time.perf_counter() - start) * 1e3)
            gc.collect()
    finally:
        gc.enable()
    return times


def summary(times: Sequence[float]) -> dict[str, float]:
    """Median and quartiles, in milliseconds."""
    low, middle, high = statistics.quantiles(times, n=4)
    return {"median_ms": middle, "low_ms": low, "high_ms": high, "runs": len(times)}


def environment() -> dict[str, Any]:
    """What a reader needs to know about the machine and the versions."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    ).stdout.strip()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": commit,
        "command": " ".join(["python", *sys.argv]),
    }


def arguments(description: str | None, *, rounds: int) -> argparse.Namespace:
    """The options that every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


def publish(title: str, rows: list[dict[str, Any]], json_path: Path | None) -> None:
    """Print the rows as a plain table and, when asked, write them with the environment."""
    columns = list(rows[0])
    cells = [[_cell(row[column]) for column in columns] for row in rows]
    widths = [
        max(len(column), *(len(line[place]) for line in cells))
        for place, column in enumerate(columns)
    ]
    print(f"{title}\n")
    for line in [columns, ["-" * width for width in widths], *cells]:
        pairs = zip(line, widths, strict=True)
        print("  ".join(cell.ljust(width) for cell, width in pairs).rstrip())
    print(
        "\n" + ", ".join(f"{k} {v}" for k, v in environment().items() if v is not None)
    )
    if json_path is not None:
        result = {"title": title, "environment": environment(), "rows": rows}
        json_path.write_text(json.dumps(result, indent=1) + "\n")


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
