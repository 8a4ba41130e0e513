"""Draw training steps for some minutes, and compare each with eager.

    python benchmarks/adversary.py --minutes 60 --seed 0            # one rank, all modes
    python benchmarks/adversary.py --minutes 10 --ranks 2 --inductor
    python benchmarks/adversary.py --recipe "Recipe(layers=('tanh',), seed=1)"

Prints every fault with its recipe, and counts at the end; exits with 1 where there are any.
"""

import argparse
import collections
import contextlib
import itertools
import sys
import textwrap
import time
from collections.abc import Iterator

import _adversary
from hypothesis import HealthCheck, Phase, given, seed, settings

from torchspmd.testing import Ranks

MODES = ("", "default", "replicate", "fully_shard")
_AT_ONCE = 20  # recipes of one seed
_SECONDS = 300.0  # for ranks that may wait for each other


def draw(number: int, ranks: int, *, inductor: bool) -> list[_adversary.Recipe]:
    """Some recipes, the same for the same seed."""
    found: list[_adversary.Recipe] = []
    backends = ("graph",) * 9 + (("inductor",) if inductor else ())
    modes = MODES if ranks == 1 else MODES[1:]

    @seed(number)
    @settings(
        max_examples=_AT_ONCE,
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


class Judge:
    """Runs recipes on ranks; those that hang are ended, and started again."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ranks: Ranks | None = None

    def __call__(self, recipe: _adversary.Recipe) -> tuple[str, str]:
        """The outcome, and its text: that of a rank with a fault where there is any."""
        outcomes = self._outcomes(recipe)
        faults = [each for each in outcomes if each[0].startswith("fault")]
        kinds = [outcome for outcome, _ in outcomes]
        if not faults and len(set(kinds)) > 1:
            return "fault: ranks differ", f"{', '.join(kinds)}: {max(outcomes)[1]}"
        return faults[0] if faults else outcomes[0]

    def _outcomes(self, recipe: _adversary.Recipe) -> list[tuple[str, str]]:
        if self._size == 1:
            group = _adversary.group_of_one() if recipe.mode else None
            with group or contextlib.nullcontext():
                return [_adversary.judge(recipe)]
        if self._ranks is None:
            self._ranks = Ranks(self._size).__enter__()
        try:
            return list(self._ranks.run(_adversary.judge, recipe, timeout=_SECONDS))
        except Exception as error:
            self.close()
            return [("fault: ranks", f"{type(error).__name__}: {error}"[:2000])]

    def close(self) -> None:
        """End the ranks."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.__exit__(None, None, None)


def drawn_until(end: float, options: argparse.Namespace) -> Iterator[_adversary.Recipe]:
    for number in itertools.count(options.seed):
        for recipe in draw(number, options.ranks, inductor=options.inductor):
            if time.monotonic() > end:
                return
            yield recipe


def indented(text: str, first: str = "  ") -> str:
    """Lines of at most 80 columns; what begins the first one may be given."""
    lines = text.splitlines()
    starts = [first, *("  " for _ in lines[1:])]
    return "\n".join(
        textwrap.fill(line, 80, initial_indent=start, subsequent_indent="       ")
        for line, start in zip(lines, starts, strict=True)
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--inductor", action="store_true", help="rarely, by Inductor")
    parser.add_argument("--recipe", help="this one alone, as a fault prints it")
    options = parser.parse_args()
    recipes = drawn_until(time.monotonic() + 60 * options.minutes, options)
    if options.recipe:
        recipes = iter([_adversary.Recipe.parse(options.recipe)])
    counts: collections.Counter[str] = collections.Counter()
    refusals: collections.Counter[str] = collections.Counter()
    judge = Judge(options.ranks)
    try:
        for recipe in recipes:
            outcome, text = judge(recipe)
            counts[outcome] += 1
            if outcome == _adversary.REFUSED:
                refusals[text[:180]] += 1
            elif outcome != _adversary.EQUAL and (
                outcome != _adversary.SKIPPED or options.recipe
            ):
                print(f"{outcome}\n{indented(text)}\n  {recipe}\n", flush=True)
    finally:
        judge.close()
    print(f"{counts.total()} steps drawn, seed {options.seed}, {options.ranks} ranks")
    for outcome, count in counts.most_common():
        print(f"{count:6d} {outcome}")
    print("Refused because of" if refusals else "Nothing was refused")
    for text, count in refusals.most_common(12):
        print(indented(text, f"{count:6d} "))
    return int(any(name.startswith("fault") for name in counts))


if __name__ == "__main__":
    sys.exit(main())
