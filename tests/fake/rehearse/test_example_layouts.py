"""The example scripts in their layouts: which groups they make, and what they wait for."""

import itertools
import runpy
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from torchspmd.errors import UsageError
from torchspmd.predict.account import Part
from torchspmd.predict.hardware import load_gpu, load_network
from torchspmd.predict.memory import count_memory
from torchspmd.predict.prediction import predict_time
from torchspmd.predict.search import rehearse_call
from torchspmd.predict.traffic import op_flops
from torchspmd.rehearse.recording import Alloc, Comm, Free, Op, Phase
from torchspmd.rehearse.world import World

pytestmark = [
    # torch 2.13 has other names for two collectives; 2.11 has not
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    # Logits of tensor parallel ranks are a view of what was gathered.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module.*returned a view"),
]

EXAMPLES = Path(__file__).parents[3] / "examples" / "predict"


def rehearsed(script, words, size, rank=0):
    path = str(EXAMPLES / script)

    def run():
        with mock.patch.object(sys, "argv", [path, *words.split()]):
            runpy.run_path(path, run_name="__main__")

    return rehearse_call(run, load_gpu("h100"), World(size, rank))


def test_a_pipeline_of_tensor_parallel_stages():
    words = (
        "--width 512 --heads 8 --sequence 256 --batch 2 --vocabulary 1024 --layers 4 "
    )
    words += (
        "--accumulate 4 --tp 2 --pp 2 --sequence-parallel --zero --overlap --steps 2"
    )
    first, last = (rehearsed("megatron.py", words, 8, rank) for rank in (0, 4))
    kinds = Counter((e.kind, e.axis) for e in first.events if isinstance(e, Comm))
    # Two steps of four micro-batches. A layer gathers two inputs in forward, and in
    # backward again, beside the gradients of two outputs.
    assert kinds["all_gather", "tp"] == 2 * 4 * (2 * 2 + 2 * 4) + 2 * 4
    assert kinds["reduce_scatter", "dp"] == 2 * 3  # two blocks and the embedding
    assert {e.peer for e in first.events if isinstance(e, Comm)} == {-1, 4}
    timed = predict_time([first, last], load_gpu("h100"), load_network("ib-ndr400"))
    parts = timed.account.parts
    assert parts[Part.BUBBLE] > 0
    assert parts[Part.EXPOSED] > 0  # of the tensor parallel ranks


def test_tensor_parallel_ranks_send_a_part_each_to_the_next_stage():
    words = (
        "--width 512 --heads 8 --sequence 256 --batch 2 --vocabulary 1024 --layers 3 "
    )
    words += "--accumulate 3 --tp 2 --pp 3 --tied --half-gradients --steps 1"
    first, middle, last = (
        rehearsed("megatron.py", words, 12, rank) for rank in (0, 4, 8)
    )
    sent = {
        (e.kind, e.payload_bytes)
        for e in middle.events
        if isinstance(e, Comm) and e.axis == "pp" and e.payload_bytes > 4  # greetings
    }
    half = 2 * 256 * 2 * 512 // 2  # bytes of a sequence's half
    assert sent == {("send", half), ("recv", half)}
    kinds = Counter((e.kind, e.axis) for e in middle.events if isinstance(e, Comm))
    assert kinds["all_gather", "tp"] == 3 * 2  # what comes in, and its gradient
    # Both ends have the same embedding, and sum its gradients up.
    pairs = [
        [
            (e.ranks, e.payload_bytes)
            for e in recording.events
            if isinstance(e, Comm) and e.ranks == (0, 8)
        ]
        for recording in (first, middle, last)
    ]
    embedding = 2 * 1024 * 512 // 2
    assert pairs == [[((0, 8), embedding)], [], [((0, 8), embedding)]]


def test_products_of_layers_in_8_bits():
    words = "--size debug --layers 1 --sequence 256 --recompute none --steps 1 --float8"
    whole, split = (
        rehearsed("llama_fsdp2.py", f"{words} --tp {tp}", 8) for tp in (1, 2)
    )
    products = [
        [
            event
            for event in recording.events
            if isinstance(event, Op) and event.name == "aten._scaled_mm.default"
        ]
        for recording in (whole, split)
    ]
    assert list(map(len, products)) == [7 * 3] * 2  # and two gradients of each
    flops, less = (sum(map(op_flops, each)) for each in products)
    assert less == flops / 2


def test_products_in_8_bits_are_near_those_in_16():
    linear = runpy.run_path(str(EXAMPLES / "llama_fsdp2.py"))["Float8Linear"](64, 32)
    linear = linear.bfloat16()
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    results = [linear(x), F.linear(x, linear.weight)]
    grad = torch.randn_like(results[0])
    found, right = (
        (y, *torch.autograd.grad(y, [x, linear.weight], grad)) for y in results
    )
    for one, other in zip(found, right, strict=True):
        assert (one - other).abs().max() < 0.15 * other.abs().max()


def test_hsdp_shards_within_and_copies_between():
    words = "--size debug --replicate 2 --recompute selective --steps 2"
    recording = rehearsed("llama_fsdp2.py", words + " --sequence 512", 16)
    groups = {(e.kind, len(e.ranks)) for e in recording.events if isinstance(e, Comm)}
    assert {("all_gather", 8), ("reduce_scatter", 8), ("all_reduce", 2)} <= groups


def test_context_parallel_ranks_pass_keys_and_values_round():
    words = "--size debug --layers 2 --cp 4 --recompute none --steps 1 --sequence 2048"
    recording = rehearsed("llama_fsdp2.py", words, 8)
    comms = [e for e in recording.events if isinstance(e, Comm)]
    kinds = Counter((e.kind, e.axis) for e in comms)
    # Of two layers, keys and values are gathered once in each direction, and their
    # gradients go round by four exchanges.
    assert kinds["all_gather", "cp"] == 2 * 2
    assert kinds["all_to_all", "cp"] == 2 * 4
    assert {len(e.ranks) for e in comms if e.axis == "dp_cp"} == {8}  # all have shards
    rows = {e.inputs[0].shape[2] for e in recording.events if is_attention(e)}
    assert rows == {512, 256}  # of a rank's two pieces, all or one


def is_product(event):
    return isinstance(event, Op) and event.name == "aten.addmm.dtype_out"


def is_attention(event):
    return isinstance(event, Op) and event.name.endswith("_flash_attention.default")


def test_megatron_with_context_parallel_ranks_and_fused_accumulation():
    words = "--width 512 --heads 8 --kv-heads 4 --hidden 1024 --mlp swiglu --layers 4 "
    words += "--sequence 1024 --vocabulary 1024 --accumulate 2 --zero --overlap --tp 2 "
    words += "--cp 2 --pp 2 --interleave 2 --sequence-parallel --steps 1"
    plain, fused = (
        rehearsed("megatron.py", words + more, 8)
        for more in ("", " --fuse-accumulation")
    )
    comms = [e for e in fused.events if isinstance(e, Comm)]
    kinds = Counter((e.kind, e.axis) for e in comms)
    assert kinds["all_gather", "cp"] == 2 * 2 * 2  # micro-batches, layers, directions
    # Two layers in two parts of the model, and the embedding; sent when all
    # micro-batches are summed up.
    assert kinds["reduce_scatter", "dp_cp"] == 3
    last = max(place for place, e in enumerate(fused.events) if is_product(e))
    sent = [e for e in fused.events[last:] if isinstance(e, Comm)]
    assert any((e.kind, e.axis) == ("reduce_scatter", "dp_cp") for e in sent)
    names = [
        Counter(e.name for e in r.events if isinstance(e, Op)) for r in (plain, fused)
    ]
    products = 2 * 2 * 4  # of weights: micro-batches, layers, four in each
    assert names[0]["aten.addmm.dtype_out"] == 0
    assert names[1]["aten.addmm.dtype_out"] == products
    assert names[0]["aten.add_.Tensor"] - names[1]["aten.add_.Tensor"] == products


SMALL = (
    "--width 512 --heads 8 --hidden 1024 --sequence 256 --vocabulary 1024 --layers 4"
)


def test_nanotron_keeps_as_many_micro_batches_as_stages_are_behind():
    words = f"{SMALL} --accumulate 4 --tp 2 --pp 2 --zero --steps 2"
    first, last = (rehearsed("nanotron.py", words, 8, rank) for rank in (0, 4))
    comms = [e for e in first.events if isinstance(e, Comm)]
    kinds = Counter((e.kind, e.axis) for e in comms)
    # Two steps of four micro-batches, three of four layers on the first stage, as the head
    # is small: a layer gathers two inputs in forward, and in backward again, beside the
    # gradients of two outputs; the embedding gathers its gradient.
    assert kinds["all_gather", "tp"] == 2 * 4 * (3 * (2 + 4) + 1)
    assert kinds["all_reduce", "dp"] == 2  # all gradients at once
    assert kinds["all_gather", "dp"] == 2
    in_flight = [{"send": 1, "recv": -1}.get(e.kind, 0) for e in comms]
    assert max(itertools.accumulate(in_flight)) == 2
    timed = predict_time([first, last], load_gpu("h100"), load_network("ib-ndr400"))
    assert timed.step_seconds > 0  # sends and receives meet


def test_nanotron_keeps_queries_keys_and_values_beside_those_that_are_rotated():
    events = rehearsed("nanotron.py", f"{SMALL} --steps 1", 1).events
    backward = next(
        place
        for place, event in enumerate(events)
        if isinstance(event, Op) and event.site.phase is Phase.BACKWARD
    )
    freed = {event.storage for event in events[:backward] if isinstance(event, Free)}
    kept = sum(
        event.nbytes
        for event in events[:backward]
        if isinstance(event, Alloc)
        and event.site.phase is Phase.FORWARD
        and event.site.module.startswith("Layer#2")
        and event.storage not in freed
    )
    width, hidden = 2 * 512 * 256, 2 * 1024 * 256  # bytes of a sequence
    # Both sums, both norms, attention's result; queries, keys and values before keys and
    # values are copied again, and after; four tensors of the MLP.
    whole = (2 + 2 + 1 + 3 + 2) * width + 4 * hidden
    assert kept == pytest.approx(whole, rel=0.03)


def test_nanotron_without_zero_keeps_the_buckets_of_ddp():
    words = f"{SMALL} --accumulate 2 --steps 1"
    sizes = {}
    for ranks in (1, 2):
        account = count_memory(rehearsed("nanotron.py", words, ranks), load_gpu("h100"))
        sizes[ranks] = account.steady
    parameters = 4 * (4 * 512 * 512 + 3 * 512 * 1024 + 2 * 512)
    parameters += 2 * 1024 * 512 + 512
    assert sizes[2] - sizes[1] == pytest.approx(2 * parameters, rel=0.05)


@pytest.mark.parametrize(
    ("words", "size", "text"),
    [
        ("--layers 2 --pp 8", 8, r"stages \[\d.*\] of 8 have no blocks"),
        ("--layers 1 --zero", 3, "not divisible by 3 data parallel ranks"),
    ],
)
def test_nanotron_says_what_it_cannot_lay_out(words, size, text):
    small = SMALL.removesuffix(" --layers 4")
    with pytest.raises((SystemExit, UsageError), match=text):
        rehearsed("nanotron.py", f"{small} {words} --steps 1", size)
