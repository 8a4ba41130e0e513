"""An append-only, memory-bounded record of communication.

Totals are always exact. Single events are kept up to a limit and counted as dropped
beyond it; whatever shows a ledger says so.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torchspmd.comm.event import CommEvent, Phase
from torchspmd.comm.kinds import Kind
from torchspmd.comm.measure import format_bytes
from torchspmd.comm.notebook import html_table
from torchspmd.errors import UsageError

DEFAULT_MAX_EVENTS = 10_000


class Key(NamedTuple):
    """What one row of totals stands for."""

    kind: Kind
    op: str
    axis: str
    dtype: str
    phase: Phase
    module: str
    implicit: bool = False
    compiled: bool = False
    check: bool = False


def key_of(event: CommEvent) -> Key:
    """The row that an event is counted in."""
    return Key(
        event.kind,
        event.op,
        event.axis,
        event.dtype,
        event.phase,
        event.module,
        event.implicit,
        event.compiled,
        event.check,
    )


@dataclass(frozen=True, slots=True)
class Total:
    """How often, and how much."""

    count: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0

    def __add__(self, other: "Total") -> "Total":
        return Total(
            self.count + other.count,
            self.payload_bytes + other.payload_bytes,
            self.wire_bytes + other.wire_bytes,
        )

    def __mul__(self, times: int) -> "Total":
        return Total(
            self.count * times, self.payload_bytes * times, self.wire_bytes * times
        )


FIELDS = Key._fields


class Ledger:
    """All communication of one run, with queries.

    Args:
        max_events: How many single events to keep; totals do not depend on it.

    Example:
        >>> from torchspmd.comm import Group
        >>> ledger = Ledger()
        >>> group = Group(name="0", ranks=(0, 1, 2, 3), axis="tp")
        >>> ledger.append(CommEvent(Kind.ALL_REDUCE, "c10d_functional.all_reduce",
        ...                         "float32", (8, 4), 128, 192, group))
        >>> ledger.total(axis="tp", phase="forward")
        Total(count=1, payload_bytes=128, wire_bytes=192)
        >>> ledger.total_by("kind")
        {('all_reduce',): Total(count=1, payload_bytes=128, wire_bytes=192)}
    """

    def __init__(self, *, max_events: int = DEFAULT_MAX_EVENTS) -> None:
        if max_events < 0:
            raise UsageError(
                f"Ledger(max_events={max_events}): the number of events to keep cannot "
                "be negative. Pass 0 to keep totals only."
            )
        self.max_events = max_events
        self.clear()

    def clear(self) -> None:
        """Empty the ledger, for a recording that leaves out what came before."""
        self._events: list[CommEvent] = []
        # Steps repeat themselves: an event equal to the last one of its row is that one,
        # so that keeping it costs a reference.
        self._last: dict[Key, CommEvent] = {}
        self._dropped = 0
        # [count, payload bytes, wire bytes], added to in place.
        self._totals: dict[Key, list[int]] = {}
        self._notes: dict[str, int] = {}

    def append(self, event: CommEvent) -> None:
        """Record one communication."""
        key = key_of(event)
        row = self._row(key)
        row[0] += 1
        row[1] += event.payload_bytes
        row[2] += event.wire_bytes
        if len(self._events) >= self.max_events:
            self._dropped += 1
            return
        last = self._last.get(key)
        if last != event:
            last = self._last[key] = event
        self._events.append(last)

    def add_total(self, key: Key, total: Total) -> None:
        """Add to one row without a single event; for sums over ranks and loaded files."""
        row = self._row(key)
        row[0] += total.count
        row[1] += total.payload_bytes
        row[2] += total.wire_bytes

    def _row(self, key: Key) -> list[int]:
        row = self._totals.get(key)
        if row is None:
            row = self._totals[key] = [0, 0, 0]
        return row

    def restore_events(self, events: Iterable[CommEvent], dropped: int) -> None:
        """Put back single events whose totals are here already."""
        self._events = list(events)
        self._dropped = dropped

    def note(self, text: str, times: int = 1) -> None:
        """Record something that a reader of this ledger must know."""
        self._notes[text] = self._notes.get(text, 0) + times

    @property
    def events(self) -> tuple[CommEvent, ...]:
        """The single events that were kept, in order."""
        return tuple(self._events)

    @property
    def dropped(self) -> int:
        """How many single events were not kept; the totals include them."""
        return self._dropped

    @property
    def notes(self) -> dict[str, int]:
        """What a reader must know, and how often it happened."""
        return dict(self._notes)

    def note_lines(self) -> list[str]:
        """Sentences on what a reader of the numbers must know."""
        lines = [
            f"Note: {text}" + (f" ({times} times)." if times > 1 else ".")
            for text, times in self._notes.items()
        ]
        if self._dropped:
            lines.append(
                f"Note: {self._dropped} single events were dropped (the limit is "
                f"{self.max_events}), with their causes and lines; counts and bytes "
                "include them."
            )
        return lines

    @property
    def rows(self) -> dict[Key, Total]:
        """Exact totals of everything, by key."""
        return {key: Total(*row) for key, row in self._totals.items()}

    def select(self, **where: object) -> dict[Key, Total]:
        """Rows that match: ``kind``, ``axis``, ``phase``, ``module``, ``dtype`` and so on.

        ``module`` matches the module and everything inside it; pass ``within=False``
        for the module's own communication only.

        No match is a total of zero, as it must be to say that an axis or a module sends
        nothing. Of kinds and phases there are only so many: a misspelt one is refused.
        Axes and modules that sent nothing are not known here, so a misspelt one is zero
        too; ``verify.expect`` with a mesh knows its axes.
        """
        within = bool(where.pop("within", True))
        unknown = sorted(set(where) - set(FIELDS))
        if unknown:
            raise UsageError(
                f"Ledger.select: unknown field {', '.join(map(repr, unknown))}. "
                f"Choose among: {', '.join((*FIELDS, 'within'))}."
            )
        _check_values(where)
        return {
            key: Total(*row)
            for key, row in self._totals.items()
            if all(_matches(key, name, value, within) for name, value in where.items())
        }

    def total(self, **where: object) -> Total:
        """The sum of the rows that match; fields as in ``select``."""
        return sum(self.select(**where).values(), Total())

    def total_by(
        self, *fields: str, **where: object
    ) -> dict[tuple[object, ...], Total]:
        """Sums grouped by the named fields, for instance ``total_by("kind", "axis")``."""
        unknown = sorted(set(fields) - set(FIELDS))
        if unknown:
            raise UsageError(
                f"Ledger.total_by: unknown field {', '.join(map(repr, unknown))}. "
                f"Choose among: {', '.join(FIELDS)}."
            )
        sums: dict[tuple[object, ...], Total] = {}
        for key, total in self.select(**where).items():
            group = tuple(_plain(getattr(key, field)) for field in fields)
            sums[group] = sums.get(group, Total()) + total
        return sums

    def __len__(self) -> int:
        """How many communications were recorded, dropped events included."""
        return sum(row[0] for row in self._totals.values())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ledger):
            return NotImplemented
        return (
            self._totals == other._totals
            and self._events == other._events
            and self._dropped == other._dropped
            and self._notes == other._notes
        )

    __hash__ = None  # type: ignore[assignment]  # it changes while it records

    def _repr_html_(self) -> str:
        """What a notebook shows: sums by kind, axis and phase."""
        rows = [
            [
                *map(str, key),
                str(total.count),
                format_bytes(total.payload_bytes),
                format_bytes(total.wire_bytes),
            ]
            for key, total in self.total_by("kind", "axis", "phase").items()
        ]
        header = ("kind", "axis", "phase", "count", "payload", "wire")
        title = f"Ledger: {len(self)} communications"
        return html_table(title, header, rows, self.note_lines())

    def __repr__(self) -> str:
        total = self.total()
        return (
            f"Ledger({total.count} communications, {total.payload_bytes} payload bytes, "
            f"{self._dropped} events dropped)"
        )


def is_within(module: str, parent: str) -> bool:
    """Whether a module path is the parent's or lies inside it.

    >>> is_within("GPT.layers.1", "GPT.layers"), is_within("GPT.layers2", "GPT.layers")
    (True, False)
    """
    return module == parent or module.startswith(f"{parent}.")


def _check_values(where: Mapping[str, object]) -> None:
    """A misspelt kind would read as zero."""
    for field, names in (("kind", list(Kind)), ("phase", list(Phase))):
        if field in where and where[field] not in names:
            raise UsageError(
                f"Ledger.select: {field}={where[field]!r} is no {field}. Choose among: "
                f"{', '.join(names)}."
            )


def _matches(key: Key, field: str, wanted: object, within: bool) -> bool:
    value = getattr(key, field)
    if field == "module" and within and isinstance(wanted, str):
        return is_within(value, wanted)
    return bool(value == wanted)


def _plain(value: object) -> object:
    return value.value if isinstance(value, (Kind, Phase)) else value
