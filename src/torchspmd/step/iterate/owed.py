"""What an iteration left for the next one, and how much of it is done."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Owed:
    """Work of an iteration that is over; its regions are known by number.

    Attributes:
        carried: The values that the work needs.
        begun: Regions that have begun to write into their states.
        done: Regions that have written all of their states.
    """

    carried: tuple[Any, ...]
    begun: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)

    @property
    def half_way(self) -> frozenset[int]:
        """Regions whose states are neither the old nor the new ones.

        >>> Owed((), begun={0, 1}, done={0}).half_way
        frozenset({1})
        """
        return frozenset(self.begun - self.done)


@dataclass(frozen=True, slots=True)
class Marks:
    """What a running graph calls around the writes of a region, with its number."""

    begin: Callable[[int], None]
    end: Callable[[int], None]
