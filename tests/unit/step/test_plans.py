"""Plans of ranks: what must be equal, and what may differ."""

from dataclasses import replace

import pytest

from torchspmd.step.rank_agreement import (
    Collective,
    CommPlan,
    differ_in_values_only,
    differences,
)


def sum_over(*ranks, axis="dp", text="all_reduce float32[4] (sum)"):
    return Collective(text, axis, ranks)


def test_a_group_may_have_another_name_on_another_rank():
    one, other = sum_over(0, 1, axis="dp"), sum_over(0, 1, axis="world")
    assert differences({0: CommPlan((one,)), 1: CommPlan((other,))}) == []


def test_groups_side_by_side_go_together():
    plans = {
        rank: CommPlan((sum_over(*ranks),))
        for ranks in ((0, 1), (2, 3))
        for rank in ranks
    }
    assert differences(plans) == []


def test_a_rank_that_sends_to_others_than_those_who_count_on_it():
    """One rank sums over its row of a 2 by 2 mesh, the others over their columns."""
    plans = {
        0: CommPlan((sum_over(0, 1, axis="tp"),)),
        1: CommPlan((sum_over(1, 3),)),
        2: CommPlan((sum_over(0, 2),)),
        3: CommPlan((sum_over(1, 3),)),
    }
    assert differences(plans) == [
        "collective 0: rank 0 has all_reduce float32[4] (sum) over tp (2 ranks), "
        "namely [0, 1], rank 1 has it over [1, 3]",
        "collective 0: rank 2 has all_reduce float32[4] (sum) over dp (2 ranks), "
        "namely [0, 2], rank 0 has it over [0, 1]",
    ]
    assert not differ_in_values_only(plans)


def test_ranks_outside_a_comparison_are_not_missed():
    assert (
        differences(
            {0: CommPlan((sum_over(0, 1, 2),)), 1: CommPlan((sum_over(0, 1, 2),))}
        )
        == []
    )


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (
            (sum_over(0, 1, text="all_gather float32[4]"),),
            "rank 0 has all_reduce float32[4] (sum) over dp (2 ranks), rank 1 has "
            "all_gather float32[4] over dp (2 ranks)",
        ),
        (
            (),
            "rank 0 has all_reduce float32[4] (sum) over dp (2 ranks), rank 1 has none",
        ),
        (
            (sum_over(0, 1, 2, 3),),
            "rank 0 has all_reduce float32[4] (sum) over dp (2 ranks), rank 1 has "
            "all_reduce float32[4] (sum) over dp (4 ranks)",
        ),
    ],
)
def test_other_collectives(other, line):
    plans = {0: CommPlan((sum_over(0, 1),)), 1: CommPlan(other)}
    assert differences(plans) == [f"collective 0: {line}"]


def test_values():
    one = CommPlan((sum_over(0, 1),), ("batch",), ("weight 1",), ("update",))
    plans = {0: one, 1: replace(one, values=("weight 2",))}
    assert differences(plans) == ["values 0: rank 0 has weight 1, rank 1 has weight 2"]
    assert differ_in_values_only(plans)
    assert not differ_in_values_only({0: one, 1: replace(one, deferred=())})


def test_long_differences_are_cut():
    plans = {
        0: CommPlan(inputs=tuple("abcdefghijklmnop")),
        1: CommPlan(inputs=tuple("ABCDEFGHIJKLMNOP")),
    }
    lines = differences(plans)
    assert len(lines) == 13
    assert lines[-1] == "and 4 more differences"


def test_a_plan_travels():
    plan = CommPlan((sum_over(0, 1),), ("batch",), ("weight 1",), ("update",))
    assert CommPlan.from_json(plan.to_json()) == plan
