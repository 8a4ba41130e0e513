"""Flat tensors as sequences of segments: pieces of other values, one after the other.

A tensor that passes pack and unpack is read in its logical (row-major) order. Views change
its shape only; ``cat``, ``split`` and ``slice`` reorder and cut the pieces. Two ways to
pack and unpack that bring each element back to its place give the same sequence.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

EVERYWHERE = -1  # the offset into a value that is the same at every place


class Segment(NamedTuple):
    """``length`` elements of the value ``atom`` from ``offset`` on."""

    atom: int
    offset: int
    length: int


Segments = tuple[Segment, ...]
Shape = tuple[int, ...]


def join(segments: Iterable[Segment]) -> Segments:
    """The same elements in as few segments as possible.

    >>> join([Segment(7, 0, 2), Segment(7, 2, 3), Segment(8, 0, 0)])
    (Segment(atom=7, offset=0, length=5),)
    """
    joined: list[Segment] = []
    for segment in segments:
        if segment.length == 0:
            continue
        last = joined[-1] if joined else None
        if last is not None and _continues(last, segment):
            joined[-1] = Segment(last.atom, last.offset, last.length + segment.length)
        else:
            joined.append(segment)
    return tuple(joined)


def _continues(last: Segment, segment: Segment) -> bool:
    if last.atom != segment.atom:
        return False
    if last.offset == EVERYWHERE:
        return True
    return last.offset + last.length == segment.offset


class Pieces:
    """A sequence of segments that can be cut anywhere."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self._ends = list(accumulate(segment.length for segment in segments))

    def at(self, place: int) -> Segment:
        """What stands at a place, up to the end of its segment."""
        index = bisect_right(self._ends, place)
        return self.cut(place, self._ends[index] - place)[0]

    def cut(self, start: int, length: int) -> list[Segment]:
        """The segments of ``length`` elements from ``start`` on.

        >>> Pieces([Segment(7, 10, 3), Segment(8, 0, 3)]).cut(2, 2)
        [Segment(atom=7, offset=12, length=1), Segment(atom=8, offset=0, length=1)]
        """
        found = []
        index, end = bisect_right(self._ends, start), start + length
        while start < end:
            atom, offset, size = self._segments[index]
            skipped = start - (self._ends[index] - size)
            taken = min(self._ends[index], end) - start
            offset = offset if offset == EVERYWHERE else offset + skipped
            found.append(Segment(atom, offset, taken))
            start, index = start + taken, index + 1
        return found


def narrow(pieces: Pieces, shape: Shape, dim: int, start: int, length: int) -> Segments:
    """``length`` places of a dimension from ``start`` on.

    >>> narrow(Pieces([Segment(7, 0, 6)]), (2, 3), 1, 0, 2)
    (Segment(atom=7, offset=0, length=2), Segment(atom=7, offset=3, length=2))
    """
    inner = prod(shape[dim + 1 :])
    row = shape[dim] * inner
    rows = range(prod(shape[:dim]))
    cuts = (pieces.cut(i * row + start * inner, length * inner) for i in rows)
    return join(segment for cut in cuts for segment in cut)


def concatenate(parts: Sequence[tuple[Pieces, int]], num_rows: int) -> Segments:
    """Rows that each hold a row of every part; a part comes with the length of its rows.

    >>> a, b = Pieces([Segment(7, 0, 4)]), Pieces([Segment(8, 0, 2)])
    >>> [segment.atom for segment in concatenate([(a, 2), (b, 1)], num_rows=2)]
    [7, 8, 7, 8]
    """
    return join(
        segment
        for row in range(num_rows)
        for pieces, width in parts
        for segment in pieces.cut(row * width, width)
    )
