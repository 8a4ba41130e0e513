"""Drawn models, plans and meshes agree with one device; drawn bugs are found."""

import functools

import parity_cases as cases
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from torchspmd.verify import check_parity

BLOCK = st.one_of(
    st.just(("norm",)),
    st.tuples(st.just("pair"), st.sampled_from((4, 7, 12)), st.booleans()),
    st.tuples(st.just("attention"), st.just(8), st.booleans()),
)
MESHES = {
    "tp": ({"tp": 4}, ""),
    "ddp": ({"dp": 4}, "ddp"),
    "fsdp": ({"dp": 4}, "fsdp"),
    "ddp x tp": ({"dp": 2, "tp": 2}, "ddp"),
    "fsdp x tp": ({"dp": 2, "tp": 2}, "fsdp"),
    "tp x dp": ({"tp": 2, "dp": 2}, "fsdp"),
}
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05),
    "momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
}
# A failure ends the ranks, so it is reported as drawn instead of being made smaller.
SETTINGS = settings(
    max_examples=8,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
)


@st.composite
def configurations(draw):
    blocks = tuple(draw(st.lists(BLOCK, min_size=1, max_size=4)))
    layouts = tuple(draw(st.booleans()) for _ in blocks)
    mesh, data = MESHES[draw(st.sampled_from(sorted(MESHES)))]
    arguments = {
        "build_model": functools.partial(cases.build, blocks),
        "step": draw(st.sampled_from((cases.step, cases.loss))),
        "batch": draw(st.sampled_from((cases.batch, cases.batch()))),
        "optimizer": OPTIMIZERS[draw(st.sampled_from(sorted(OPTIMIZERS)))],
        "mesh": mesh,
        "steps": 2,
        "dtype": draw(st.sampled_from((None, torch.float64))),
    }
    spread = functools.partial(cases.spread, blocks=blocks, layouts=layouts, data=data)
    return arguments, spread, blocks


def test_drawn_configurations_agree(ranks4):
    @SETTINGS
    @given(configurations())
    def check(case):
        arguments, spread, _ = case
        verdict = check_parity(
            **arguments, parallelize=spread, ranks=ranks4, raises=False
        )
        assert verdict, str(verdict)

    check()


def test_drawn_bugs_are_found_where_they_are(ranks4):
    @SETTINGS
    @given(configurations(), st.integers(0, 3))
    def check(case, number):
        arguments, spread, blocks = case
        place = number % len(blocks)
        # A norm that follows takes the factor out again: all results are the same.
        assume(blocks[place + 1 : place + 2] != (("norm",),))
        bug = f"blocks.{place}"
        spoiled = functools.partial(spread, bug=bug)
        verdict = check_parity(
            **arguments, parallelize=spoiled, ranks=ranks4, raises=False
        )
        assert verdict.first is not None, bug
        assert verdict.first.place == bug, str(verdict)
        assert verdict.first.cause.code == "factor", str(verdict)

    check()
