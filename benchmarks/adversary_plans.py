"""Draw models, plans and mapped functions for some minutes, against one device.

    python benchmarks/adversary_plans.py --minutes 5 --ranks 2 3 [--first 0]

Prints every case that differs from one device, every right plan that fails and every case
that hangs, and the counts. A printed number replays its case: --first NUMBER --cases 1.
"""

import argparse
import collections
import sys
import time

from _drawn_functions import run_cases
from _drawn_plans import Outcome

from torchspmd.errors import RankError
from torchspmd.testing import Ranks

_BATCH = 20  # cases between two looks at the clock
_KINDS = ("equal", "refused", "error of torch", "failed", "different")
_SECONDS = 60.0  # for a batch; longer is a hang


def main() -> int:
    """Draw until the time is over; the exit status is 1 where a case differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=0, help="stop after so many")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    counts: collections.Counter[str] = collections.Counter()
    with Ranks(options.ranks[0]) as first, Ranks(options.ranks[-1]) as last:
        worlds = [first] if len(options.ranks) == 1 else [first, last]
        seed = options.first
        while time.monotonic() < end:
            count = min(_BATCH, options.cases or _BATCH)
            for world in worlds:
                counts.update(_report(world, seed, count))
            seed += count
            if options.cases and seed >= options.first + options.cases:
                break
    print(f"{seed - options.first} cases on {options.ranks} ranks: {dict(counts)}")
    return any(counts[kind] for kind in ("different", "failed", "hang"))


def _report(world: Ranks, seed: int, count: int) -> list[str]:
    """Run a batch; print what is not as it should be."""
    try:
        by_rank = world.run(run_cases, seed, count, timeout=_SECONDS)
    except RankError as error:
        if count > 1:  # find the case
            return [k for i in range(count) for k in _report(world, seed + i, 1)]
        print(f"hang: case {seed}: {str(error)[:300]}", flush=True)
        return ["hang"]
    kinds = []
    for outcomes in zip(*by_rank, strict=True):
        worst = max(outcomes, key=_badness)
        if worst.kind in ("different", "failed"):
            print(f"{worst.kind}: {worst.text}", flush=True)
        kinds.append(worst.kind)
    return kinds


def _badness(outcome: Outcome) -> int:
    return _KINDS.index(outcome.kind)


if __name__ == "__main__":
    sys.exit(main())
