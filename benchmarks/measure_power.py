"""What a power limit leaves: rates, watts and clocks of kernels, at once and after seconds.

    python benchmarks/measure_power.py --json power.json

Each case rests, runs for a moment, and runs for seconds; ``nvidia-smi`` is asked meanwhile.
``mix N`` is a matrix product and N copies in turn: how much of the clock is left where
memory bounds a part of the time. These figures stand behind ``power.*`` of the hardware
files.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

REST, LONG = 3.0, 6.0
MOMENT = 0.03


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, float]] = {"idle": watch(REST)}
    for name, call in cases().items():
        found[name] = measure(call)
        print(name, json.dumps(found[name]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")


def cases() -> dict[str, Callable[[], object]]:
    left, right = (
        torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in "12"
    )
    x = torch.randn(2**29, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    q = torch.randn(2, 32, 8192, 128, device="cuda", dtype=torch.bfloat16)

    def attention(kernel: SDPBackend) -> Callable[[], object]:
        def call() -> object:
            with sdpa_kernel(kernel):
                return F.scaled_dot_product_attention(q, q, q, is_causal=True)

        return call

    def mix(copies: int) -> Callable[[], object]:
        def call() -> None:
            torch.mm(left, right)
            for _ in range(copies):
                y.copy_(x)

        return call

    return {
        "product": lambda: torch.mm(left, right),
        "copy": lambda: y.copy_(x),
        "gelu": lambda: F.gelu(x),
        "flash attention": attention(SDPBackend.FLASH_ATTENTION),
        "cuDNN attention": attention(SDPBackend.CUDNN_ATTENTION),
        "mix 1": mix(1),
        "mix 3": mix(3),
    }


def measure(call: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of a call, at once and after seconds; watts and clock at the end."""
    call()
    torch.cuda.synchronize()
    time.sleep(REST)
    short = milliseconds(call, MOMENT)
    time.sleep(REST / 3)
    end = time.perf_counter() + LONG
    watched: dict[str, float] = {}
    thread = threading.Thread(
        target=lambda: (time.sleep(LONG / 2), watched.update(watch(LONG / 3)))
    )
    thread.start()
    long = 0.0
    while time.perf_counter() < end:
        long = milliseconds(call, 0.5)
    thread.join()
    return {"short ms": short, "long ms": long, "ratio": long / short, **watched}


def milliseconds(call: Callable[[], object], seconds: float) -> float:
    """Of one call, in a row of them."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in "12")
    end = time.perf_counter() + seconds
    count = 0
    start.record()
    while time.perf_counter() < end:
        call()
        count += 1
        if count % 8 == 0:
            torch.cuda.current_stream().synchronize()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / count


def watch(seconds: float) -> dict[str, float]:
    """Mean watts and megahertz while this lasts."""
    query = "--query-gpu=power.draw,clocks.sm,power.limit"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    rows = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        line = done.stdout.strip().splitlines()[:1]
        if not line:
            print(f"nvidia-smi: {done.stderr.strip()}", file=sys.stderr)
            break
        rows.append([float(word) for word in line[0].split(",")])
        time.sleep(0.1)
    names = ("watts", "megahertz", "limit")
    return {
        name: sum(row[at] for row in rows) / len(rows)
        for at, name in enumerate(names)
        if rows
    }


if __name__ == "__main__":
    main()
