"""Which module was running when an autograd node was created, in bounded memory."""

from array import array
from bisect import bisect_right

# A module call makes at most two boundaries. Older ones are forgotten.
_FIRST_BOUNDARIES = 1 << 12
_MAX_BOUNDARIES = 1 << 16


class Boundaries:
    """From which autograd sequence number on which module was running; bounded."""

    def __init__(self) -> None:
        self._starts = array("q", bytes(8 * _FIRST_BOUNDARIES))
        self._paths = array("i", bytes(4 * _FIRST_BOUNDARIES))
        self._size = 0
        self._lost_below = 0

    def begin(self, start: int, path: int) -> None:
        """From this sequence number on, this path is running; -1 for none."""
        last = self._size - 1
        if last >= 0 and self._starts[last] == start:
            self._paths[last] = path  # no node was created since: it never mattered
            return
        if self._size == len(self._starts):
            self._make_room()
        self._starts[self._size] = start
        self._paths[self._size] = path
        self._size += 1

    def find(self, sequence: int) -> int | None:
        """The path that was running; -1 for none, None when it was forgotten."""
        if sequence < self._lost_below:
            return None
        place = bisect_right(self._starts, sequence, 0, self._size) - 1
        return self._paths[place] if place >= 0 else -1

    def _make_room(self) -> None:
        if self._size < _MAX_BOUNDARIES:
            self._starts.extend(self._starts)
            self._paths.extend(self._paths)
            return
        half = self._size // 2
        self._starts[:half] = self._starts[half:]
        self._paths[:half] = self._paths[half:]
        self._size = half
        self._lost_below = self._starts[0]
