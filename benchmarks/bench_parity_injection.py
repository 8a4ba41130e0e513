"""How many planted bugs does check_parity find, and does it name the right module?

Each bug is a right configuration with one mistake. The second table runs right
configurations: an alarm there is false.

    python benchmarks/bench_parity_injection.py [--only tp4] [--json figures.json]
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

from _harness import environment
from _parity_bugs import BUGS, Bug
from _parity_bugs_more import MORE
from _parity_correct import CORRECT

from torchspmd.errors import RankError, SpmdError
from torchspmd.testing import Ranks
from torchspmd.verify import check_parity

WORLD = 4  # of the planted bugs


def try_bug(bug: Bug, ranks: Ranks) -> dict[str, Any]:
    """One planted bug: was it found, was its place, was its cause."""
    start = time.perf_counter()
    try:
        first = check_parity(**bug.arguments, ranks=ranks, raises=False).first
    except (
        RankError
    ) as error:  # the styles themselves noticed it, before any comparison
        if not bug.refused or bug.refused not in str(error):
            raise
        detected, place, cause = True, "-", "refused"
    else:
        detected = first is not None
        place = "-" if first is None else first.place
        cause = "-" if first is None else first.cause.code
    is_judged = bool(bug.causes) and cause != "refused"
    return {
        "bug": bug.name,
        "detected": detected,
        "localised": place in bug.places or cause == "refused",
        "place": place,
        "cause": cause,
        "cause right": cause in bug.causes if is_judged else None,
        "seconds": time.perf_counter() - start,
    }


def try_correct(name: str, arguments: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """One right configuration: an alarm is false, and so is an error."""
    start = time.perf_counter()
    compared, alarm = 0, ""
    try:
        verdict = check_parity(**arguments, ranks=ranks, raises=False)
        compared = sum(verdict.compared.values())
        alarm = "" if verdict.ok else str(verdict)
    except SpmdError as error:
        alarm = str(error)
    return {
        "configuration": name,
        "values compared": compared,
        "alarm": alarm,
        "seconds": time.perf_counter() - start,
    }


def summary(bugs: list[dict[str, Any]], correct: list[dict[str, Any]]) -> str:
    """The figures in two sentences."""
    detected = sum(row["detected"] for row in bugs)
    localised = sum(row["localised"] for row in bugs)
    judged = [row for row in bugs if row["cause right"] is not None]
    causes = sum(row["cause right"] for row in judged)
    alarms = sum(bool(row["alarm"]) for row in correct)
    refused = sum(row["cause"] == "refused" for row in bugs)
    return (
        f"{detected} of {len(bugs)} planted bugs detected, {refused} of them by the styles "
        f"before anything was compared, {localised} localised to the "
        f"right place, the cause right in {causes} of {len(judged)} where one is "
        f"expected.\n{alarms} false alarms on {len(correct)} right configurations."
    )


def show(rows: list[dict[str, Any]], columns: list[str]) -> None:
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(_cell(row[column]) for column in columns) + " |")
    print()


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    bugs, correct = [], []
    with Ranks(2) as two, Ranks(3) as three, Ranks(4) as four:
        worlds = {2: two, 3: three, 4: four}
        for bug in BUGS + MORE:
            if options.only in bug.name:
                bugs.append(try_bug(bug, worlds[WORLD]))
        for name, arguments in CORRECT.items():
            if options.only in name:
                world = worlds[math.prod(arguments["mesh"].values())]
                correct.append(try_correct(name, arguments, world))
    show(bugs, ["bug", "detected", "localised", "place", "cause", "seconds"])
    show(correct, ["configuration", "values compared", "seconds"])
    for row in correct:
        if row["alarm"]:
            print(f"FALSE ALARM: {row['configuration']}\n{row['alarm']}\n")
    print(summary(bugs, correct))
    print("\n" + ", ".join(f"{k} {v}" for k, v in environment().items() if v))
    if options.json is not None:
        result = {"environment": environment(), "bugs": bugs, "correct": correct}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
