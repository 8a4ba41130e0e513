"""Record what CUDA's caching allocator does for a training script.

    python benchmarks/record_allocator.py OUT.json.gz training/train.py --model gpt

Writes every request of the script and every segment that the allocator took for it, with
the peaks that ``torch.cuda`` told at each ``reset_peak_memory_stats()``: the traces in
tests/data/allocator, which the simulated allocator is compared with. Ranks of torchrun
each write a file of their own, ``OUT.json.gz.1`` and so on.

``--operators`` adds which operator was running at each request: to find out what a kernel
takes for itself.
"""

import argparse
import contextlib
import gzip
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

CONF = "PYTORCH_CUDA_ALLOC_CONF"
TAKEN = ("segment_alloc", "segment_map")
GIVEN_BACK = ("segment_free", "segment_unmap")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--operators", action="store_true")
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
    watch = Operators()
    with (
        mock.patch.object(torch.cuda, "reset_peak_memory_stats", note_and_reset),
        watch if options.operators else contextlib.nullcontext(),
    ):
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
    if options.operators:
        trace["operators"] = watch.calls
    rank = os.environ.get("RANK", "0")
    path = options.out if rank == "0" else Path(f"{options.out}.{rank}")
    text = json.dumps(trace, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


class Operators(TorchDispatchMode):
    """Each operator with the number of requests before it, and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        before = _requests()
        result = func(*args, **(kwargs or {}))
        after = _requests()
        if after > before:
            self.calls.append((str(func), before, after))
        return result


def _requests() -> int:
    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))


def compact(history: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Requests and segments, without addresses.

    A request is a number of bytes, or bytes and a stream; -1 frees the request before, -2
    the one before that, so that equal steps are equal text; 0 is a mark. ``late`` are the
    frees that another stream delayed: the request, and how many entries came before.
    """
    streams: dict[int, int] = {}
    live: dict[int, int] = {}
    requests: list[Any] = []
    segments: list[list[int]] = []
    late: list[tuple[int, int]] = []
    pending: dict[int, tuple[int, int]] = {}  # request and place of a free, by address
    count = 0
    for entry in history:
        action, size = entry["action"], entry["size"]
        stream = streams.setdefault(entry["stream"], len(streams))
        if action == "alloc":
            live[entry["addr"]] = count
            count += 1
            requests.append([size, stream] if stream else size)
        elif action == "free_requested":
            number = live.pop(entry["addr"])
            requests.append(number - count)
            pending[entry["addr"]] = (number, len(requests))
        elif action == "free_completed":
            number, place = pending.pop(entry["addr"])
            if place != len(requests):
                late.append((number, len(requests)))
        elif action in TAKEN or action in GIVEN_BACK:
            segments.append([size if action in TAKEN else -size, stream])
        elif action == "snapshot":
            requests.append(0)
    return {"requests": requests, "segments": segments, "late": late}


if __name__ == "__main__":
    main()
