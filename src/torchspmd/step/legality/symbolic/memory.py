"""Writes into a part of a tensor's memory."""

from collections.abc import Callable

from torchspmd.step.legality.symbolic.segments import Pieces, Segment
from torchspmd.step.legality.symbolic.table import Flat, ValueTable

_MOST_RUNS = 4096


def overwrite(
    table: ValueTable, old: int, new: int, through: Callable[[int], int]
) -> int:
    """A tensor after ``new`` was written into a view of it.

    Args:
        table: The values.
        old: What the memory held.
        new: What is written.
        through: What the view shows of a value of the whole memory.
    """
    whole = table[old]
    if not isinstance(whole, Flat):
        return table.term("overwritten", None, (old, through(old), new))
    atom = table.term("memory", whole.shape, ())
    shown = through(table.tensor(atom, whole.shape))
    places = _places(table, shown, atom)
    if places is None or not isinstance(table[new], Flat):
        made = table.term("overwritten", None, (old, shown, new))
        return table.tensor(made, whole.shape)
    return table.flat(whole.shape, _spliced(table, old, new, places))


def _places(table: ValueTable, shown: int, memory: int) -> list[Segment] | None:
    """Which elements of the memory a view shows, in its own order."""
    flat = table[shown]
    if not isinstance(flat, Flat):
        return None
    places: list[Segment] = []
    for segment in flat.segments:
        runs = table.runs_of(segment.atom)
        if segment.atom == memory:
            places.append(segment)
            continue
        if runs is None or runs.base != memory or runs.num > _MOST_RUNS:
            return None
        parts = [
            Segment(memory, runs.offset + i * runs.stride, runs.length)
            for i in range(runs.num)
        ]
        places += Pieces(parts).cut(segment.offset, segment.length)
    return places


def _spliced(
    table: ValueTable, old: int, new: int, places: list[Segment]
) -> list[Segment]:
    """The old elements, with the new ones at their places."""
    written: list[tuple[int, int, int]] = []  # where it goes, where it is, how long
    taken = 0
    for segment in places:
        written.append((segment.offset, taken, segment.length))
        taken += segment.length
    segments: list[Segment] = []
    at = 0
    kept, fresh = table.pieces(old), table.pieces(new)
    for start, source, length in sorted(written):
        segments += kept.cut(at, start - at)
        segments += fresh.cut(source, length)
        at = start + length
    return segments + kept.cut(at, table.num_elements(old) - at)
