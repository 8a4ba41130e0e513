"""How many equal blocks each stage of a pipeline has, and could have."""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchspmd.predict.program import Program
from torchspmd.predict.timeline import Item, Kind
from torchspmd.rehearse.recording import Comm, Op, Phase

__all__ = ["Blocks", "count_blocks", "evened", "with_blocks"]

_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")
_OUTSIDE = frozenset({Phase.INIT, Phase.OPTIMIZER})


class Blocks(NamedTuple):
    """Of a stage.

    Attributes:
        name: What the modules are called in front of their number.
        number: How many there are.
        seconds: That all of them compute in a step.
        rest: That the others do.
    """

    name: str
    number: int
    seconds: float
    rest: float


def count_blocks(programs: Sequence[Program]) -> list[Blocks]:
    """The blocks of each stage; [] where a stage has none, or is several parts."""
    order = sorted(each.recording.rank for each in programs)
    beside = dict(itertools.pairwise(order))
    seconds = [defaultdict[str, float](float) for _ in programs]
    numbers = [defaultdict[str, set[str]](set) for _ in programs]
    whole = [0.0 for _ in programs]
    for place, program in enumerate(programs):
        mine = program.recording.rank
        for item in program.items:
            event = item.event
            if isinstance(event, Comm) and event.peer >= 0:
                first, second = sorted((mine, event.peer))
                if beside.get(first) != second:
                    return []  # parts of the model go round: no stage is one piece of it
            if item.kind is Kind.COMPUTE:
                whole[place] += item.work
            for name, number in _places(item):
                seconds[place][name] += item.work
                numbers[place][name].add(number)
    names = {n for each in numbers for n, found in each.items() if len(found) > 1}
    if not names:
        return []
    name = max(sorted(names), key=lambda name: sum(each[name] for each in seconds))
    blocks = [
        Blocks(
            name, len(numbers[p][name]), seconds[p][name], whole[p] - seconds[p][name]
        )
        for p in range(len(programs))
    ]
    return blocks if all(each.number for each in blocks) else []


def _places(item: Item) -> Iterator[tuple[str, str]]:
    """Each number in the path of its module, with what is in front of it."""
    event = item.event
    if isinstance(event, Op) and event.site.phase not in _OUTSIDE:
        path = event.site.module
        for found in _NUMBER.finditer(path):
            yield path[: found.start()].rstrip("."), found.group()


def evened(blocks: Sequence[Blocks]) -> list[int]:
    """How many each stage should have, so that the slowest one is as fast as can be."""
    counts = [each.number for each in blocks]
    if not counts:
        return counts
    one = sum(each.seconds for each in blocks) / sum(counts)
    loads = [each.seconds + each.rest for each in blocks]
    while True:
        slowest = max(range(len(loads)), key=lambda place: loads[place])
        fastest = min(range(len(loads)), key=lambda place: loads[place])
        if counts[slowest] < 2 or loads[fastest] + one >= loads[slowest]:
            return counts
        for place, more in ((slowest, -1), (fastest, 1)):
            counts[place] += more
            loads[place] += more * one


def with_blocks(program: Program, blocks: Blocks, count: int) -> Program:
    """The same stage with so many of them."""
    times = count / blocks.number
    items = [
        item._replace(work=item.work * times, host=item.host * times)
        if any(name == blocks.name for name, _ in _places(item))
        else item
        for item in program.items
    ]
    return Program(program.recording, items, program.costs, program.start)
