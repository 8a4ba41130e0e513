"""Drawn models under drawn plans, and drawn mapped functions, against one device."""

from collections import Counter

from _drawn_functions import run_cases

from torchspmd.testing import Ranks

CASES = 40


def test_drawn_plans_and_functions(ranks: Ranks) -> None:
    """`benchmarks/adversary_plans.py --minutes` draws more of them."""
    by_rank = ranks.run(run_cases, 0, CASES)
    bad = [
        outcome.text
        for outcomes in by_rank
        for outcome in outcomes
        if outcome.kind in ("different", "failed")
    ]
    assert not bad, "\n".join(bad)
    kinds = Counter(outcome.kind for outcome in by_rank[0])
    assert kinds["equal"] > CASES / 4 and kinds["refused"] > CASES / 8, kinds
