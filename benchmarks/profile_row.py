"""Where the GPU's time goes in a training run: its kernels, added up.

    python benchmarks/profile_row.py OUT.json NAME ...

Each NAME is a row of ``_rows.py``, run once under ``torch.profiler`` by itself.
Writes, for each, every kernel with its count and microseconds over four steps: what to look
at where a predicted step is wrong.
"""

import argparse
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from _rows import ALL_ROWS, SCRIPT
from torch.profiler import ProfilerActivity, profile


def main() -> None:
    arguments = {row.name: row.arguments for row in ALL_ROWS}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="+", choices=arguments, metavar="NAME")
    options = parser.parse_args()
    out: Path = options.out
    kernels: dict[str, Any] = {}
    for name in options.names:
        part = out.with_suffix(".part")
        command = [sys.executable, __file__, "--one", str(part)]
        subprocess.run([*command, *arguments[name].split()], check=True)
        kernels[name] = json.loads(part.read_text())
        part.unlink()
        out.write_text(json.dumps(kernels, indent=1) + "\n")


def profile_one(out: Path, arguments: list[str]) -> None:
    sys.argv = [str(SCRIPT), *arguments]
    sys.path.insert(0, str(SCRIPT.parent))
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        runpy.run_path(str(SCRIPT), run_name="__main__")
        torch.cuda.synchronize()
    rows = [
        [entry.key, entry.count, round(entry.self_device_time_total, 1)]
        for entry in profiler.key_averages()
        if entry.self_device_time_total > 0
    ]
    rows.sort(key=lambda row: -row[2])
    out.write_text(json.dumps(rows))
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        profile_one(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
