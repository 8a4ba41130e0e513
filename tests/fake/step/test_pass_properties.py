"""Drawn graphs compute the same bits after the passes, on four virtual ranks."""

import warnings

import torch
from comm_graphs import all_gather, all_reduce, captured, copied, reduce_scatter
from hypothesis import given, settings
from hypothesis import strategies as st

from torchspmd.errors import PassWarning
from torchspmd.step.graph.collectives import get_all_comm_blocks
from torchspmd.step.graph.memory import LiveBytes
from torchspmd.step.passes import (
    comm_fusion_with_concat,
    dedupe_collectives,
    prefetch_gathers,
    remove_dead_code,
    schedule_comm_wait,
)
from torchspmd.step.virtual.ranks import VirtualRanks
from torchspmd.testing import fake_mesh

RANKS = 4


@st.composite
def programs(draw):
    """What is sent, in which dtype, from where, and where it is read."""
    count = draw(st.integers(2, 7))
    return [
        (
            draw(st.sampled_from(["sum", "max", "gather", "scatter"])),
            draw(st.integers(1, 40)),
            draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16])),
            draw(st.sampled_from(["input", "made", "earlier"])),
            draw(st.sampled_from(["late", "late", "scaled", "at once"])),
        )
        for _ in range(count)
    ]


def build(program):
    """The function of a program, and the inputs of each rank."""

    def function(*tensors):
        late, results, total = [], [], torch.zeros(())
        for (kind, _, _, source, reader), tensor in zip(program, tensors, strict=True):
            sent = tensor if source == "input" else tensor + 1
            if source == "earlier":
                sent = sent + total.to(sent.dtype)
            result = send(kind, sent)
            if reader == "scaled":
                result = result / RANKS
            if reader == "at once":
                total = total + result.float().sum()
            late.append(result)
            results.append(sent.float().exp().sum())
        return [*results, *(each + 1 for each in late), total]

    def send(kind, tensor):
        if kind == "gather":
            return all_gather(tensor, RANKS)
        if kind == "scatter":
            return reduce_scatter(tensor, RANKS)
        return all_reduce(tensor, kind)

    def inputs(rank):
        torch.manual_seed(rank)
        sizes = [n * RANKS if kind == "scatter" else n for kind, n, *_ in program]
        dtypes = [dtype for _, _, dtype, *_ in program]
        return [torch.randn(n).to(t) for n, t in zip(sizes, dtypes, strict=True)]

    return function, [inputs(rank) for rank in range(RANKS)]


def run(gm, inputs, order):
    outputs = VirtualRanks.of(gm, RANKS, order=order).run(gm, inputs)
    return [value for rank in outputs for value in rank]


def assert_same(gm, edited, inputs, orders):
    for order in orders:
        pairs = zip(run(gm, inputs, order), run(edited, inputs, order), strict=True)
        assert all(torch.equal(left, right) for left, right in pairs), order


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(
    programs(),
    st.sampled_from([50, 200, 2**20]),
    st.sampled_from([None, 1e-4]),
    st.sampled_from(["plain", "rank_major"]),
)
def test_fused_graphs(program, cap, first, layout):
    with fake_mesh(RANKS, ("dp",)), warnings.catch_warnings():
        warnings.simplefilter("ignore", PassWarning)
        function, inputs = build(program)
        gm = captured(function, *inputs[0])
        edited = copied(gm)
        outcome = comm_fusion_with_concat(
            edited, cap / 2**20, first_bucket_mb=first, layout=layout
        ).outcome
        assert outcome.changed + len(outcome.refused) == len(program)
        assert_same(gm, edited, inputs, outcome.keeps_bits)
        sizes = [block.event.payload_bytes for block in get_all_comm_blocks(edited)]
        # Padding of a rank-major bucket comes on top of what its tensors take.
        if layout == "plain" and not any("is sent alone" in r for r in outcome.refused):
            assert max(sizes) <= cap


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(programs(), st.sampled_from([None, 0, 100, 400]))
def test_all_passes(program, budget):
    with fake_mesh(RANKS, ("dp",)), warnings.catch_warnings():
        warnings.simplefilter("ignore", PassWarning)
        function, inputs = build(program)
        gm = captured(function, *inputs[0])
        edited = copied(gm)
        dedupe_collectives(edited)
        kept = comm_fusion_with_concat(edited, 1, layout="rank_major").outcome
        prefetch_gathers(edited, memory_budget_mb=budget)
        remove_dead_code(edited)
        before = max(LiveBytes(edited.graph).now().values())
        mib = None if budget is None else budget / 2**20
        schedule_comm_wait(edited, memory_budget_mb=mib)
        if budget is not None:
            assert max(LiveBytes(edited.graph).now().values()) <= before + budget
        assert_same(gm, edited, inputs, kept.keeps_bits)
