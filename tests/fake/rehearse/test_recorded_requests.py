"""What a rehearsal asks of the allocator, beside what an H200's was asked for."""

import gzip
import json
import runpy
import sys
from pathlib import Path

import pytest

from torchspmd.rehearse.recording import Alloc, Free, Mark, MarkKind

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "training" / "train.py"
DATA = ROOT / "tests" / "data" / "allocator"
LARGE = 1 << 20  # smaller requests share segments, whatever they are


def recorded_step(trace, step):
    """Large requests and frees of one step, in order; 0 is the mark after each step."""
    marks, sizes, result = 0, [], []
    for request in trace["requests"]:
        if request == 0:
            marks += 1
            continue
        if isinstance(request, int) and request < 0:
            nbytes = -sizes[request]
        else:
            nbytes = request[0] if isinstance(request, list) else request
            sizes.append(nbytes)
        if marks == step + 1 and abs(nbytes) > LARGE:
            result.append(nbytes)
    return result


def rehearsed_step(recording, step):
    """The same of a rehearsal."""
    marks, sizes, result = 0, {}, []
    for event in recording.events:
        nbytes = 0
        if isinstance(event, Mark) and event.kind is MarkKind.RESET_PEAK:
            marks += 1
        elif isinstance(event, Alloc):
            nbytes = sizes[event.storage] = event.nbytes
        elif isinstance(event, Free):
            nbytes = -sizes.pop(event.storage, 0)
        if marks == step + 1 and abs(nbytes) > LARGE:
            result.append(nbytes)
    return result


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("gpt_bf16_fused", 1), ("llama_fsdp2_recompute", 4), ("llama_hsdp", 4)],
)
def test_a_step_asks_for_the_same_memory_as_on_the_gpu(
    rehearse, monkeypatch, capsys, name, ranks
):
    trace = json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))
    _, *words = trace["command"].split()
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words, "--steps", "2"])
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    with rehearse(ranks) as recording:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert rehearsed_step(recording, 1) == recorded_step(trace, 1)
