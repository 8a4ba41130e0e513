"""The gradient rules, as a table: layouts and evidence in, gradient layouts out."""

from typing import Any

import pytest
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchspmd.local.evidence import Evidence
from torchspmd.local.frame import LocalAxis
from torchspmd.local.gradient import (
    BoundaryTensor,
    Work,
    count_shares,
    derive,
    needs_evidence,
    written_problem,
)

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
TP = LocalAxis(0, "tp", 4)
DP = LocalAxis(0, "dp", 2)

CLEAN = Evidence((), has_collective=False, has_opaque=False)
REDUCED = Evidence((), has_collective=True, has_opaque=False)


def run(
    arguments: list[Placement],
    outputs: list[Placement],
    evidence: Evidence | None = CLEAN,
    axis: LocalAxis = TP,
    **written: Any,
) -> Any:
    ins = [
        BoundaryTensor(f"a{i}", (entry,), True, written.get(f"a{i}"))
        for i, entry in enumerate(arguments)
    ]
    outs = [
        BoundaryTensor(f"o{i}", (entry,), True, written.get(f"o{i}"))
        for i, entry in enumerate(outputs)
    ]
    found = None if evidence is None else (lambda output, position: evidence)
    gradients, problems = derive(ins, outs, [axis], found)
    return (
        gradients.works[0],
        [layout[0] for layout in gradients.arguments],
        [layout[0] for layout in gradients.outputs],
        [problem.text for problem in problems],
    )


@pytest.mark.parametrize(
    ("arguments", "outputs", "evidence", "work", "leaving", "entering"),
    [
        # Every rank does the same: nothing to reduce, nothing to divide.
        ([R, R], [R], CLEAN, Work.SAME, [R, R], [R]),
        # Split by an argument or by an output: replicated arguments get a partial sum.
        ([S0, R], [S0], CLEAN, Work.SPLIT, [S0, P], [S0]),
        ([R, R], [S1], CLEAN, Work.SPLIT, [P, P], [S1]),
        ([S1, S0], [P], CLEAN, Work.SPLIT, [S1, S0], [R]),
        # The gradient of a partial argument is the same on every rank.
        ([P, R], [P], CLEAN, Work.SPLIT, [R, P], [R]),
        # A reduced value enters as an equal share, so that shares add up to it.
        ([S1, S0], [R], REDUCED, Work.SPLIT, [S1, S0], [P]),
        ([R, R], [R], REDUCED, Work.SPLIT, [P, P], [P]),
        ([P], [R], REDUCED, Work.SPLIT, [R], [P]),
        # A mean is a sum of shares.
        ([S0], [Partial("avg")], CLEAN, Work.SPLIT, [S0], [P]),
        # A replicated output next to a sharded one.
        ([S0, R], [S0, R], CLEAN, Work.SPLIT, [S0, P], [S0, P]),
    ],
)
def test_rules(
    arguments: Any, outputs: Any, evidence: Any, work: Any, leaving: Any, entering: Any
) -> None:
    assert run(arguments, outputs, evidence) == (work, leaving, entering, [])


def test_an_axis_of_one_rank_changes_nothing() -> None:
    one = LocalAxis(0, "tp", 1)
    assert run([R, S0, P], [R], CLEAN, one) == (Work.SAME, [R, S0, R], [R], [])


def test_a_reduction_that_cannot_be_seen() -> None:
    bare = Evidence(((0, ""),), has_collective=False, has_opaque=False)
    *_, problems = run([S0, R], [R], bare)
    assert problems == [
        "a0: has [Shard(0)], while o0 is Replicate() over 'tp'; no differentiable "
        "collective is between them"
    ]
    custom = Evidence(((0, "Reduce"),), has_collective=False, has_opaque=True)
    assert "custom autograd function 'Reduce'" in run([S0], [R], custom)[3][0]


def test_without_a_graph_a_replicated_output_is_unclear() -> None:
    for arguments in ([S0], [R]):
        *_, problems = run(arguments, [R], None)
        assert problems == [
            "o0: is Replicate() over 'tp'; torch.compile is tracing, so a reduction "
            "inside cannot be seen"
        ]
    assert run([R], [R], None, a0=(R,))[3] == []


def test_what_was_written_wins() -> None:
    bare = Evidence(((0, ""),), has_collective=False, has_opaque=False)
    # Gradient layouts for all arguments: the whole gradient enters.
    result = run([S0, R], [R], bare, a0=(S0,), a1=(R,))
    assert result == (Work.DECLARED, [S0, R], [R], [])
    # What enters: the rest is derived from it.
    assert run([S0, R], [R], None, o0=(R,)) == (Work.DECLARED, [S0, P], [R], [])
    assert run([S0, R], [R], None, o0=(P,)) == (Work.SPLIT, [S0, P], [P], [])
    assert run([R, R], [R], None, o0=(R,)) == (Work.SAME, [R, R], [R], [])


def test_an_unseen_reduction_matters_only_for_what_differs() -> None:
    bare = Evidence(((1, ""),), has_collective=False, has_opaque=False)
    assert run([S0, R], [R, S0], bare)[3] == []


def test_a_redundant_reduction() -> None:
    *_, problems = run([R], [R], CLEAN, a0=(P,))
    assert "every rank of 'tp' computes the whole gradient" in problems[0]
    opaque = Evidence((), has_collective=False, has_opaque=True)
    assert run([R], [R], opaque, a0=(P,))[3] == []


def test_a_mean_of_shares() -> None:
    *_, problems = run([S0, R], [R], REDUCED, a1=(Partial("avg"),))
    assert "is divided by the 4 ranks of 'tp'" in problems[0]


def test_reductions_that_are_no_sum() -> None:
    assert "reduction by 'max' over 'tp'" in run([S0], [Partial("max")])[3][0]
    assert "reduction by 'avg' over 'tp'" in run([Partial("avg")], [P])[3][0]


def test_no_gradient_no_question() -> None:
    silent = BoundaryTensor("o", (R,), needs_grad=False)
    asked = BoundaryTensor("o", (R,), needs_grad=True)
    written = BoundaryTensor("o", (R,), needs_grad=True, written=(P,))
    assert needs_evidence([silent, asked, written], [TP]) == [(1, 0)]
    argument = BoundaryTensor("a", (S0,), needs_grad=False)
    gradients, problems = derive([argument], [silent], [TP], None)
    assert (gradients.arguments, gradients.outputs, problems) == ((None,), (None,), [])


def test_axes_are_judged_one_by_one() -> None:
    x, w = BoundaryTensor("x", (S0, R), True), BoundaryTensor("w", (R, S1), True)
    y = BoundaryTensor("y", (S0, S1), True)
    gradients, problems = derive([x, w], [y], [DP, TP], None)
    assert not problems
    assert gradients.arguments == ((S0, P), (P, S1))
    assert gradients.outputs == ((S0, S1),)


def test_shares_of_several_axes() -> None:
    assert count_shares((P, R), [DP, TP]) == 2
    assert count_shares((P, P), [DP, TP]) == 8


def test_gradients_have_the_shape_of_their_tensor() -> None:
    assert written_problem((S0, R), (S0, P)) is None
    assert written_problem((R,), (S0,)) is not None
    assert written_problem((S0,), (S1,)) is not None
