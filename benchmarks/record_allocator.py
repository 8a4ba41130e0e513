"""Record what CUDA's caching allocator does for a training script.

    python benchmarks/record_allocator.py OUT.json.gz training/train.py --model gpt

Writes every request of the script and every segment that the allocator took for it, with
the peaks that ``torch.cuda`` told at each ``reset_peak_memory_stats()``: the traces in
tests/data/allocator, which the simulated allocator is compared with. Ranks of torchrun
each write a file of their own, ``OUT.json.gz.1`` and so on.
"""

import argparse
import gzip
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

CONF = "PYTORCH_CUDA_ALLOC_CONF"
TAKEN = ("segment_alloc", "segment_map")
GIVEN_BACK = ("segment_free", "segment_unmap")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("script", type=Path)
    options, arguments = parser.parse_known_args()
    peaks: list[list[int]] = []
    reset = torch.cuda.reset_peak_memory_stats

    def note_and_reset(*device: Any) -> None:
        peaks.append(
            [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
        )
        torch.cuda.memory._snapshot()  # a mark in the history
        reset(*device)

    torch.cuda.memory._record_memory_history(context=None, max_entries=10_000_000)
    sys.argv = [str(options.script), *arguments]
    sys.path.insert(0, str(options.script.parent))
    with mock.patch.object(torch.cuda, "reset_peak_memory_stats", note_and_reset):
        runpy.run_path(str(options.script), run_name="__main__")
    history = torch.cuda.memory._snapshot()["device_traces"]
    trace = {
        "settings": os.environ.get(CONF, ""),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "command": " ".join([options.script.name, *arguments]),
        **compact(history[torch.cuda.current_device()]),
        "peaks": peaks,
    }
    rank = os.environ.get("RANK", "0")
    path = options.out if rank == "0" else Path(f"{options.out}.{rank}")
    text = json.dumps(trace, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def compact(history: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Requests and segments, without addresses.

    A request is a number of bytes, or bytes and a stream; -1 frees the request before, -2
    the one before that, so that equal steps are equal text; 0 is a mark.
    """
    streams: dict[int, int] = {}
    live: dict[int, int] = {}
    requests: list[Any] = []
    segments: list[list[int]] = []
    count = 0
    for entry in history:
        action, size = entry["action"], entry["size"]
        stream = streams.setdefault(entry["stream"], len(streams))
        if action == "alloc":
            live[entry["addr"]] = count
            count += 1
            requests.append([size, stream] if stream else size)
        elif action == "free_requested":
            requests.append(live.pop(entry["addr"]) - count)
        elif action in TAKEN or action in GIVEN_BACK:
            segments.append([size if action in TAKEN else -size, stream])
        elif action == "snapshot":
            requests.append(0)
    return {"requests": requests, "segments": segments}


if __name__ == "__main__":
    main()
