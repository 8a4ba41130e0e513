"""Draw training steps for some minutes, and compare each with eager.

    python benchmarks/adversary.py --minutes 60 --seed 0            # one rank, all modes
    python benchmarks/adversary.py --minutes 10 --ranks 2

Prints every fault with its recipe, and counts at the end; exits with 1 where there are any.
"""

import argparse
import collections
import sys
import time

import _adversary
from hypothesis import HealthCheck, Phase, given, seed, settings

from torchspmd.testing import Ranks

MODES = ("", "default", "replicate", "fully_shard")


def draw(
    count: int, number: int, ranks: int, *, inductor: bool
) -> list[_adversary.Recipe]:
    """So many recipes, the same for the same seed."""
    found: list[_adversary.Recipe] = []
    backends = ("graph",) * 9 + (("inductor",) if inductor else ())
    modes = MODES if ranks == 1 else MODES[1:]

    @seed(number)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(_adversary.recipes(modes=modes, backends=backends, ranks=ranks))
    def note(recipe: _adversary.Recipe) -> None:
        found.append(recipe)

    note()
    return found


def judge_here(recipe: _adversary.Recipe) -> tuple[str, str]:
    if not recipe.mode:
        return _adversary.judge(recipe)
    with _adversary.group_of_one():
        return _adversary.judge(recipe)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--inductor", action="store_true", help="rarely, by Inductor")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    counts: collections.Counter[str] = collections.Counter()
    refusals: collections.Counter[str] = collections.Counter()
    number = options.seed
    while time.monotonic() < end:
        drawn = draw(20, number, options.ranks, inductor=options.inductor)
        for recipe in drawn:
            if time.monotonic() > end:
                break
            if options.ranks == 1:
                outcomes = [judge_here(recipe)]
            else:
                outcomes = on_ranks(options.ranks, recipe)
            outcome, text = max(outcomes)
            faults = [each for each in outcomes if each[0].startswith("fault")]
            if faults:
                outcome, text = faults[0]
                print(f"{outcome}: {text}\n  {recipe}\n", flush=True)
            if outcome == _adversary.REFUSED:
                refusals[text[:180]] += 1
            counts[outcome] += 1
        number += 1
    print(
        "drawn:", sum(counts.values()), dict(counts), f"seeds {options.seed}-{number}"
    )
    for text, count in refusals.most_common(12):
        print(f"  refused {count}: {text}")
    return int(any(name.startswith("fault") for name in counts))


_ranks: list[Ranks] = []


def on_ranks(size: int, recipe: _adversary.Recipe) -> list[tuple[str, str]]:
    """The outcome on each rank; ranks that hang are ended, and started again."""
    if not _ranks:
        _ranks.append(Ranks(size).__enter__())
    try:
        return list(_ranks[0].run(_adversary.judge, recipe, timeout=600.0))
    except Exception as error:
        with_error = _ranks.pop()
        with_error.__exit__(None, None, None)
        return [("fault: ranks", f"{type(error).__name__}: {error}"[:2000])]


if __name__ == "__main__":
    code = main()
    for each in _ranks:
        each.__exit__(None, None, None)
    sys.exit(code)
