"""A part of the injection suite; all of it is benchmarks/bench_parity_injection.py."""

import re

import pytest
from _parity_bugs import BUGS
from _parity_correct import CORRECT

from torchspmd.errors import RankError
from torchspmd.verify import check_parity

SOME = (
    "missing sum of a row-parallel output",
    "missing sum of a column-parallel input's gradient",
    "shards swapped, DTensor",
    "unreduced norm gradients under sequence parallelism",
    "dropout differs where it must not",
    "label smoothing over the local vocabulary",
    "clipped by the local norm",
    "tied weights untied",
    "micro-batches not divided",
    "DDP ignores one parameter",
    "batch norm over local rows",
    "the last update lost",
)
RIGHT = (
    "tp4, sequence, AdamW",
    "tp4, fused query, key, value",
    "fsdp2 x tp2, sequence, AdamW",
    "hybrid 2 x 2",
)


@pytest.mark.parametrize(
    "bug", [bug for bug in BUGS if bug.name in SOME], ids=lambda bug: bug.name
)
def test_planted_bug(bug, ranks4):
    if bug.refused:
        with pytest.raises(RankError, match=re.escape(bug.refused)):
            check_parity(**bug.arguments, ranks=ranks4, raises=False)
        return
    verdict = check_parity(**bug.arguments, ranks=ranks4, raises=False)
    assert verdict.first is not None
    assert verdict.first.place in bug.places, str(verdict)
    if bug.causes:
        assert verdict.first.cause.code in bug.causes, str(verdict)


@pytest.mark.parametrize("name", RIGHT)
def test_right_configuration(name, ranks4):
    assert check_parity(**CORRECT[name], ranks=ranks4)


def test_the_suite_is_large_enough():
    assert len(BUGS) >= 20
    assert len(CORRECT) >= 50
    assert len({bug.name for bug in BUGS}) == len(BUGS)
